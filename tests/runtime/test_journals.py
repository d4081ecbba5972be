"""Files of JSON lines: what was written comes back, and nothing else does."""

import json
import os
import resource

import pytest

from moemerge.errors import DataError
from moemerge.runtime.journals import LineStore, OtherRunError
from processes import limited

HEAD = {"kind": "test", "made_by": {"seed": 1}}
LINES = [{"text": "é", "n": 1}, {"text": "half \ud800", "n": 2.5}, {"text": "", "n": None}]


def written(path):
    with LineStore(path, HEAD) as file:
        for line in LINES:
            file.add(line)
    return path.read_bytes()


def test_lines_come_back(tmp_path):
    written(tmp_path / "f")
    with LineStore(tmp_path / "f", HEAD) as file:
        assert file.lines == LINES
        file.add({"more": 1})
    with LineStore(tmp_path / "f", HEAD) as file:
        assert file.lines == [*LINES, {"more": 1}]
    with LineStore(tmp_path / "f", HEAD, restart=True) as file:
        assert file.lines == []


def test_half_a_line_at_the_end_is_cut(tmp_path):
    whole = written(tmp_path / "f")
    for cut in range(1, 60):
        (tmp_path / "f").write_bytes(whole[:-cut])
        with LineStore(tmp_path / "f", HEAD) as file:
            assert file.lines == LINES[:2]


def test_a_changed_line_is_refused(tmp_path):
    whole = written(tmp_path / "f")
    begin = whole.index(b"\n") + 1
    for place in range(begin, len(whole) - 1, 7):
        if whole[place : place + 1] == b"\n":
            continue
        changed = bytearray(whole)
        changed[place] ^= 1
        (tmp_path / "f").write_bytes(bytes(changed))
        with pytest.raises(DataError, match=r"line [2-5]"):
            LineStore(tmp_path / "f", HEAD)


def test_a_line_of_another_file_is_refused(tmp_path):
    whole = written(tmp_path / "f")
    other = {"kind": "test", "made_by": {"seed": 2}}
    with LineStore(tmp_path / "g", other):
        pass
    with (tmp_path / "g").open("ab") as stream:
        stream.write(whole.splitlines(keepends=True)[1])
    with pytest.raises(DataError, match="line 2 is not as it was written"):
        LineStore(tmp_path / "g", other)


def test_another_run_is_told(tmp_path):
    written(tmp_path / "f")
    with pytest.raises(OtherRunError) as caught:
        LineStore(tmp_path / "f", {"kind": "test", "made_by": {"seed": 2}})
    assert caught.value.stored == HEAD


@pytest.mark.parametrize(
    "content", [b"[]\n", b"\xff\n", b"{\n", b"\n", json.dumps([[0]] * 3).encode() + b"\n"]
)
def test_what_is_no_such_file_is_refused(tmp_path, content):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(DataError, match="line 1"):
        LineStore(tmp_path / "f", HEAD)


def test_links_pipes_and_folders_are_refused(tmp_path):
    (tmp_path / "secret").write_text("s")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "folder", "missing/f"):
        with pytest.raises(DataError, match="cannot be written"):
            LineStore(tmp_path / name, HEAD)
    assert (tmp_path / "secret").read_text() == "s"


def test_two_runs_do_not_write_one_file(tmp_path):
    with LineStore(tmp_path / "f", HEAD), pytest.raises(DataError, match="another run"):
        LineStore(tmp_path / "f", HEAD)


def test_a_file_that_cannot_grow_is_reported_and_stays_usable(tmp_path):
    whole = written(tmp_path / "f")
    with (
        limited(resource.RLIMIT_FSIZE, len(whole) + 20),
        LineStore(tmp_path / "f", HEAD) as file,
        pytest.raises(DataError, match="cannot be written: File too large"),
    ):
        file.add({"text": "x" * 100})
    with LineStore(tmp_path / "f", HEAD) as file:
        assert file.lines == LINES
