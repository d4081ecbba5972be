from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import zoo
from moemerge.checkpoint import Checkpoint, CheckpointPatch
from moemerge.errors import CheckpointError


@pytest.mark.parametrize("how", ["touched", "grown", "replaced", "gone"])
def test_a_model_that_changes_while_it_is_read_gives_no_output(
    zoo_folder: Callable[..., Path], tmp_path: Path, how: str
) -> None:
    source = zoo.perturb(zoo_folder("olmoe"), tmp_path / "source", seed=1)
    weights = source / "model.safetensors"
    checkpoint = Checkpoint.open(source)
    patch = CheckpointPatch(checkpoint, tmp_path / "out")
    if how == "touched":
        os.utime(weights)
    elif how == "grown":
        weights.open("ab").write(b"x")
    elif how == "replaced":
        (tmp_path / "other").write_bytes(weights.read_bytes())
        (tmp_path / "other").replace(weights)
    else:
        weights.unlink()
    with pytest.raises(CheckpointError, match="was changed or replaced while it was read"):
        patch.commit()
    patch.abort()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "other") == ["source"]
