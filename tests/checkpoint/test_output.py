import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from moemerge.checkpoint.output import (
    OutputFolder,
    check_output,
    copy_file,
    require_space,
    writing,
)
from moemerge.errors import CheckpointError, ResourceError
from processes import limited


def model(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("old")
    return folder


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_loop_of_links_is_refused(tmp_path, overwrite):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(CheckpointError, match="cannot be used: Too many levels"):
        check_output(tmp_path / "loop", overwrite=overwrite)


def test_existing_output_needs_overwrite(tmp_path):
    out = model(tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"exists\n.*overwrite=True"):
        OutputFolder(out, overwrite=False)
    folder = OutputFolder(out, overwrite=True)
    (folder.path / "new").touch()
    assert os.listdir(out) == ["config.json"]  # untouched until the commit
    folder.commit()
    assert os.listdir(out) == ["new"]
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_empty_folder_is_as_good_as_none(tmp_path, overwrite):
    (tmp_path / "out").mkdir()
    folder = OutputFolder(tmp_path / "out", overwrite=overwrite)
    (folder.path / "new").touch()
    folder.commit()
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(tmp_path / "out") == ["new"]


def test_a_mount_point_is_refused(tmp_path, monkeypatch):
    """It is another disk, so it cannot be renamed."""
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path)
    with pytest.raises(CheckpointError, match=r"is a mount point(?s:.*)/merged"):
        check_output(tmp_path, overwrite=True)


@pytest.mark.parametrize("content", ["thesis.txt", "config.json checkpoint-500/", "a.py .git/"])
def test_other_peoples_data_are_never_overwritten(tmp_path, content):
    out = tmp_path / "out"
    out.mkdir()
    for name in content.split():
        (out / name).mkdir() if name.endswith("/") else (out / name).touch()
    with pytest.raises(CheckpointError, match="is not overwritten"):
        OutputFolder(out, overwrite=True)
    assert len(os.listdir(out)) == len(content.split())
    assert os.listdir(tmp_path) == ["out"]


def test_data_that_came_meanwhile_are_not_overwritten(tmp_path):
    folder = OutputFolder(tmp_path / "out", overwrite=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").touch()
    with pytest.raises(CheckpointError, match="is not overwritten"):
        folder.commit()
    folder.abort()
    assert os.listdir(tmp_path / "out") == ["thesis.txt"]
    assert os.listdir(tmp_path) == ["out"]


def test_a_file_is_no_output(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        check_output(tmp_path / "out", overwrite=True)
    with pytest.raises(CheckpointError, match="is a file"):
        check_output(tmp_path / "out" / "deeper", overwrite=True)


@pytest.mark.parametrize("out", ["model", "model/out", ".", "link/out", "model/../model"])
def test_outputs_and_inputs_must_not_overlap(tmp_path, out):
    source = model(tmp_path / "model")
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(CheckpointError, match="the input folder"):
        check_output(tmp_path / out, overwrite=True, inputs=[source])
    check_output(tmp_path / "model-2", overwrite=False, inputs=[source])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_parent_as_user(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="is not writable"):
        check_output(tmp_path / "out", overwrite=False)


@pytest.mark.skipif(not Path("/proc/sys").exists(), reason="needs Linux")
def test_an_unwritable_place_is_explained():
    """Nobody, root included, can make folders in /proc."""
    with pytest.raises(CheckpointError, match="/proc") as caught:
        OutputFolder(Path("/proc/out"), overwrite=False)
    assert caught.value.hint


def test_a_symlinked_output_is_written_where_it_points(tmp_path):
    (tmp_path / "disk").mkdir()
    model(tmp_path / "disk" / "real")
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "real")
    folder = OutputFolder(tmp_path / "out", overwrite=True)
    assert folder.path.parent == tmp_path / "disk"
    (folder.path / "new").touch()
    folder.commit()
    assert (tmp_path / "out").is_symlink()
    assert os.listdir(tmp_path / "disk" / "real") == ["new"]


def test_a_failed_rename_puts_the_old_output_back(tmp_path, monkeypatch):
    out = model(tmp_path / "out")
    folder = OutputFolder(out, overwrite=True)
    real = os.rename

    def failing(source, target):
        if Path(source) == folder.path:
            raise PermissionError(13, "Permission denied")
        real(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(CheckpointError, match="Permission denied"):
        folder.commit()
    folder.abort()
    assert (out / "config.json").read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


def test_free_disk_is_checked(tmp_path):
    require_space(tmp_path / "not" / "yet", 1)
    with pytest.raises(ResourceError, match=r"needs 1000000.0 TB, but only .* are free"):
        require_space(tmp_path, 10**18)


def test_copies_are_whole_and_never_over_another(tmp_path):
    data = os.urandom(3 * 2**20 + 1)
    (tmp_path / "a").write_bytes(data)
    copy_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == data
    with pytest.raises(FileExistsError):
        copy_file(tmp_path / "a", tmp_path / "b")


def test_a_file_system_that_copies_nothing_is_read_instead(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"shard" * 1000)
    monkeypatch.setattr("os.copy_file_range", lambda *_: 0, raising=False)
    copy_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"shard" * 1000


def test_a_file_that_shrinks_under_the_copy_is_told(tmp_path):
    (tmp_path / "a").write_bytes(b"shard" * 1000)

    def shrink():
        os.truncate(tmp_path / "a", 100)

    with pytest.raises(CheckpointError, match="had 5000 bytes when its copy began and 100"):
        copy_file(tmp_path / "a", tmp_path / "b", shrink)


def test_files_that_no_model_has_are_not_overwritten(tmp_path):
    out = full_model(tmp_path / "out")
    OutputFolder(out, overwrite=True).abort()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"not overwritten: it holds notes\.txt"):
        OutputFolder(out, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"


def test_what_killed_runs_left_is_removed(tmp_path):
    process = 2**22 + 1  # beyond the numbers of processes
    full_model(tmp_path / f".out.partial-{process}-0123abcd")
    old = full_model(tmp_path / f".out.replaced-{process}-0123abcd")
    OutputFolder(tmp_path / "out", overwrite=True).abort()
    assert [path.name for path in tmp_path.iterdir()] == [old.name]  # the only copy
    full_model(tmp_path / "out")
    OutputFolder(tmp_path / "out", overwrite=True).abort()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def full_model(folder):
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "README.md", "moemerge_report.json"):
        (folder / name).write_text(name)
    return folder


def test_runs_that_end_at_once_leave_one_whole_folder(tmp_path):
    """Again and again, as it takes a moment between looking and renaming to go wrong."""
    count = 4
    ready = threading.Barrier(count)

    def end(number, out):
        folder = OutputFolder(out, overwrite=False)
        for name in ("config.json", "model.safetensors"):
            (folder.path / name).write_text(str(number))
        ready.wait()
        try:
            folder.commit()
        except CheckpointError as error:
            folder.abort()
            return str(error)
        return "done"

    with ThreadPoolExecutor(count) as pool:
        for attempt in range(60):
            out = tmp_path / str(attempt) / "out"
            ends = list(pool.map(end, range(count), [out] * count))
            assert ends.count("done") == 1, ends
            assert len({(out / name).read_text() for name in sorted(os.listdir(out))}) == 1
            assert os.listdir(out.parent) == ["out"]


@pytest.mark.parametrize("most", [0, 100, 30_000])
def test_a_state_that_does_not_fit_is_reported_as_such(tmp_path, most):
    with (
        limited(resource.RLIMIT_FSIZE, most),
        pytest.raises(CheckpointError, match=r"x cannot be written: .*\n  free some space"),
        writing(tmp_path / "x"),
    ):
        torch.save({"weights": torch.zeros(20_000)}, tmp_path / "x")
