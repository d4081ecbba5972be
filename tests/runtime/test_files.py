import os
import threading
import tracemalloc

import pytest

from moemerge.config.yaml_lines import read_document
from moemerge.errors import CheckpointError, ConfigError, DataError, library_errors
from moemerge.runtime import files
from moemerge.runtime.files import (
    make_folder,
    parse_object,
    read_file,
    read_object,
    write_whole,
)
from processes import interpreter


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("1" * 5000, "not valid JSON"),
        ("[]", "holds a JSON list"),
    ],
)
def test_what_is_no_object_is_refused(text, reason):
    with pytest.raises(CheckpointError, match=reason):
        parse_object(text, "x.json")


def test_an_object_is_read(tmp_path):
    (tmp_path / "a.json").write_text('{"a": "\\ud83d\\ude00"}')
    assert read_object(tmp_path / "a.json") == {"a": "\U0001f600"}


@pytest.mark.timeout(30)
def test_only_plain_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * 11)
    odd = dict.fromkeys(("pipe", "/dev/zero", "."), "not a regular file")
    null = {"no\0ne": "its name cannot be used: embedded null byte"}
    for name, words in {**odd, **null, "none": "missing", "large": "more than 10 bytes"}.items():
        with pytest.raises(CheckpointError, match=words):
            read_file(tmp_path / name, most=10)


@pytest.mark.timeout(30)
def test_a_pipe_needs_a_writer(tmp_path, monkeypatch):
    pipe = tmp_path / "pipe.yml"
    os.mkfifo(pipe)
    with monkeypatch.context() as context:
        context.setattr(files, "PIPE_SECONDS", 0.1)
        with pytest.raises(ConfigError, match="a pipe without a writer"):
            read_document(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("a: 1"))
    writer.start()
    assert read_document(pipe).data == {"a": 1}
    writer.join()


def test_errors_of_libraries_become_ours():
    class Panic(BaseException):
        pass

    with (
        pytest.raises(DataError, match=r"a file is odd \(Panic: first\)"),
        library_errors(DataError, "a file is odd"),
    ):
        raise Panic("first\nsecond")
    with pytest.raises(KeyboardInterrupt), library_errors(DataError, "a file is odd"):
        raise KeyboardInterrupt


def test_reading_a_small_file_takes_little_memory(tmp_path):
    path = tmp_path / "small.json"
    path.write_text("{}")
    tracemalloc.start()
    try:
        assert read_file(path) == b"{}"
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_file_is_written_whole_and_what_dead_runs_left_beside_it_goes(tmp_path):
    gone = interpreter("-c", "import os; print(os.getpid())")
    left = tmp_path / f".a.json.partial-{int(gone.stdout)}-0123abcd"
    others = [
        tmp_path / f".a.json.partial-{os.getpid()}-0123abcd",  # of a run that goes on
        tmp_path / f".b.json.partial-{int(gone.stdout)}-0123abcd",
        tmp_path / ".a.json.partial-mine",
    ]
    for path in (left, *others):
        path.write_text("half")
    write_whole(tmp_path / "a.json", b"{}")
    assert (tmp_path / "a.json").read_bytes() == b"{}"
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "a.json", *others])


def test_a_file_that_cannot_be_written_is_our_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"a.json cannot be written: No such file"):
        write_whole(tmp_path / "missing" / "a.json", b"{}")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="folder cannot be written: Is a directory"):
        write_whole(tmp_path / "folder", b"{}")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_link_is_replaced_and_its_target_stays(tmp_path):
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "kept").read_text() == "kept"
    assert (tmp_path / "link").read_bytes() == b"new"
    assert not (tmp_path / "link").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "link"}


def test_folders_below_an_output_are_not_followed_through_links(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")  # the user's own choice
    assert make_folder(tmp_path / "out", "a", "b").is_dir()
    (tmp_path / "out" / "link").symlink_to(tmp_path)
    with pytest.raises(DataError, match="it is a symbolic link"):
        make_folder(tmp_path / "out", "link", "c")
    (tmp_path / "out" / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        make_folder(tmp_path / "out", "file")
