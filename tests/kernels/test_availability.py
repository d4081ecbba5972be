"""Without a Triton that works everything still runs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moemerge.kernels import availability

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _untried() -> Iterator[None]:
    availability._tried.cache_clear()
    yield
    availability._tried.cache_clear()


def test_a_triton_that_cannot_compile_is_left_out_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(
        "raise RuntimeError('Failed to find C compiler. Please specify via CC')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("triton", "moemerge.kernels.experts"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with caplog.at_level(logging.WARNING):
        assert not availability.triton_works(CUDA)
        assert not availability.triton_works(CUDA)
    assert [record.message for record in caplog.records] == [
        "Triton cannot compile here; plain torch is used, which is slower "
        "(RuntimeError: Failed to find C compiler. Please specify via CC)"
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_it_works_on_a_gpu() -> None:
    assert availability.triton_works(CUDA)
