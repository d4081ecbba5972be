"""The same statistics on a GPU, wherever hidden states are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from collecting.cases import Collect, Folder
from moemerge.statistics import Statistics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# bfloat16 may send a token elsewhere; float32 does not.
TOLERANCE = 1e-4


def values(found: Statistics, key: str) -> torch.Tensor:
    mean = found.read(found.kind, key)
    assert mean is not None
    return mean.values


@pytest.mark.parametrize("kind", ["gram", "fisher"])
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("offload", ["device", "cpu", "disk"])
def test_a_gpu_gives_what_a_cpu_gives(
    kind: str, family: str, offload: str, model_folder: Folder, collect: Collect, tmp_path: Path
) -> None:
    collect(model_folder(family), tmp_path / "cpu", kind=kind)
    collect(model_folder(family), tmp_path / "gpu", kind=kind, device="cuda", offload=offload)
    with Statistics.open(tmp_path / "cpu") as one, Statistics.open(tmp_path / "gpu") as other:
        assert set(one.units) == set(other.units)
        for key in one.units:
            assert one.tokens(key) == other.tokens(key), key
            wanted, got = values(one, key), values(other, key)
            assert float((got - wanted).abs().max()) <= TOLERANCE * float(wanted.abs().max()), key


@pytest.mark.parametrize("kind", ["gram", "fisher"])
def test_bfloat16_gives_two_runs_of_the_same_bytes(
    kind: str, model_folder: Folder, collect: Collect, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        folder = model_folder("olmoe")
        collect(folder, tmp_path / name, kind=kind, device="cuda", dtype="bfloat16")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
