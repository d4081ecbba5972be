from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from moemerge.checkpoint.pickled import PickledFile
from moemerge.errors import CheckpointError


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("pwned"),))


def test_code_in_a_pickle_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"x": Evil()}, tmp_path / "evil.bin")
    with pytest.raises(CheckpointError, match="holds more than tensors"):
        PickledFile(tmp_path / "evil.bin")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(1)], "holds a list, expected a dict"),
        ({"x": 3}, "'x' is a int, expected a plain dense tensor"),
        ({"x": torch.eye(2).to_sparse()}, "expected a plain dense tensor"),
    ],
)
def test_other_contents_are_refused(tmp_path: Path, content: object, message: str) -> None:
    torch.save(content, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match=message):
        PickledFile(tmp_path / "x.bin")


def test_damaged_and_old_files(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1000)}, tmp_path / "x.bin")
    whole = (tmp_path / "x.bin").read_bytes()
    (tmp_path / "cut.bin").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "plain.bin").write_bytes(pickle.dumps({"x": 1}))
    torch.save({"x": torch.ones(3)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    for name in ("cut.bin", "plain.bin", "old.bin", "missing.bin"):
        with pytest.raises(CheckpointError, match=name):
            PickledFile(tmp_path / name)


def test_views_come_out_whole(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    torch.save({"t": base.T, "tied": base}, tmp_path / "x.bin")
    file = PickledFile(tmp_path / "x.bin")
    assert torch.equal(file.read("t"), base.T)
    assert torch.equal(file.read("t", (1, 3)), base.T[1:3])
    file.read("tied").zero_()
    assert torch.equal(file.read("tied"), base)
