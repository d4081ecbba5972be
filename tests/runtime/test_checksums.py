"""The report of an output holds checksums of its files."""

import json
import re
import shutil
import zlib
from pathlib import Path

import pytest

import moemerge
import zoo
from moemerge.checkpoint import output, writer
from moemerge.errors import CheckpointError
from moemerge.runtime import checksums
from moemerge.runtime.checksums import REPORT_NAME, add_checksums, update_checksum


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checksums")
    model = zoo.build("olmoe", folder / "model", shard_size="40KB")
    zoo.tiny_tokenizer(model)
    config = {"merge_method": "passthrough", "models": [{"model": str(model)}]}
    moemerge.merge(config, folder / "out", out_shard_size="100KB")
    return folder / "out"


def test_every_file_is_covered(merged, monkeypatch):
    names = {p.relative_to(merged).as_posix() for p in merged.rglob("*")} - {REPORT_NAME}
    assert len([name for name in names if name.endswith(".safetensors")]) > 2
    stored = json.loads((merged / REPORT_NAME).read_text())["checksums"]
    assert set(stored) == names == set(moemerge.verify(merged).same)
    data = (merged / "config.json").read_bytes()
    assert stored["config.json"] == {"bytes": len(data), "crc32": [f"{zlib.crc32(data):08x}"]}
    monkeypatch.setattr(checksums, "PART_BYTES", 1000)
    monkeypatch.setattr(checksums, "_BLOCK", 300)
    parts = [f"{zlib.crc32(data[at : at + 1000]):08x}" for at in range(0, len(data), 1000)]
    assert checksums._sums(merged, ["config.json"])["config.json"]["crc32"] == parts


def flip(folder):
    path = sorted(folder.glob("*.safetensors"))[1]
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flip, r"changed: model-00002-of-\d+.safetensors"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "missing: tokenizer.json"),
        (lambda folder: (folder / "modeling_x.py").touch(), "added: modeling_x.py"),
    ],
)
def test_verify_names_what_differs(merged, tmp_path, change, message):
    folder = Path(shutil.copytree(merged, tmp_path / "copy"))
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x").touch()  # hidden files are not part of the model
    assert not moemerge.verify(folder).differences
    change(folder)
    assert re.fullmatch(message, moemerge.verify(folder).differences)


def test_a_repair_and_a_new_card_update_the_checksums(merged, tmp_path):
    moemerge.swap_routers(merged, merged, tmp_path / "swapped")
    assert not moemerge.verify(tmp_path / "swapped").differences
    folder = Path(shutil.copytree(merged, tmp_path / "copy"))
    (folder / "README.md").write_text("other")
    update_checksum(folder / "README.md")
    assert not moemerge.verify(folder).differences


@pytest.mark.parametrize("content", ["[]", '{"moemerge": "0"}', '{"checksums": {}}', "{"])
def test_folders_without_checksums_are_refused(content, tmp_path):
    (tmp_path / REPORT_NAME).write_text(content)
    with pytest.raises(CheckpointError, match=REPORT_NAME):
        moemerge.verify(tmp_path)


def test_a_report_of_another_tool_stays(tmp_path):
    (tmp_path / REPORT_NAME).write_text('{"moemerge": NaN}')
    add_checksums(tmp_path)
    assert (tmp_path / REPORT_NAME).read_text() == '{"moemerge": NaN}'


def test_known_parts_are_not_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "PART_BYTES", 1000)
    (tmp_path / REPORT_NAME).write_text('{"moemerge": "1"}')
    data = bytes(range(250)) * 10
    (tmp_path / "file").write_bytes(data)
    add_checksums(tmp_path, {("file", 1000): 7})
    first, last = (f"{zlib.crc32(part):08x}" for part in (data[:1000], data[2000:]))
    stored = json.loads((tmp_path / REPORT_NAME).read_text())["checksums"]
    assert stored["file"] == {"bytes": 2500, "crc32": [first, "00000007", last]}


def test_a_merge_sums_every_part_while_it_writes(merged, tmp_path, monkeypatch):
    for module in (checksums, writer):
        monkeypatch.setattr(module, "PART_BYTES", 1000)
    known = []
    monkeypatch.setattr(output, "add_checksums", lambda folder, parts: known.append(parts))
    config = {"merge_method": "passthrough", "models": [{"model": str(merged)}]}
    moemerge.merge(config, tmp_path / "out", out_shard_size="100KB")
    (sums,) = known
    for path in (tmp_path / "out").glob("*.safetensors"):
        data = path.read_bytes()
        for at in range(0, len(data), 1000):
            assert sums.pop((path.name, at)) == zlib.crc32(data[at : at + 1000])
    assert not sums
