"""How long the batches of a model are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zoo
from moemerge.architectures.opened import open_model
from moemerge.features import settings
from moemerge.features.settings import batch_tokens

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_rows_of_a_model_with_an_indexer_are_never_padded(family: str, tmp_path: Path) -> None:
    """Its attention counts padding among the keys it picks, so padding changes hidden states."""
    folder = zoo.build(family, tmp_path / family)
    assert batch_tokens(open_model("model", folder), CPU) == 1


def test_other_rows_share_a_batch(tmp_path: Path) -> None:
    folder = zoo.build("olmoe", tmp_path / "olmoe")
    assert batch_tokens(open_model("model", folder), CPU) > 1


@pytest.mark.parametrize(("family", "shorter"), [("olmoe", False), ("gpt_oss", True)])
def test_long_batches_are_for_fused_attention_and_large_gpus(
    family: str, shorter: bool, zoo_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model("model", zoo_folder(family))
    sizes = []
    for memory in (1 * 10**9, 141 * 10**9):
        monkeypatch.setattr(settings, "gpu_memory", lambda _, size=memory: size)
        sizes.append(batch_tokens(model, torch.device("cuda")))
    assert sizes == [2**14 if shorter else 2**20 // 32, 2**14 if shorter else 2**27 // 32]
