"""Every family's weights go back to where they were stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zoo
from moemerge.architectures.opened import open_model
from moemerge.architectures.roles import Role
from moemerge.features.trainable import TrainedLayout, load_trainable

# One of each kind of layout: one by one, stacks, transposed, interleaved, flat, renamed, joined.
FAMILIES = [
    "olmoe",
    "mixtral",
    "gpt_oss",
    "granitemoe",
    "dbrx",
    "jetmoe",
    "deepseek_v3",
    "llama4_text",
    "nemotron_h",
    "deepseek_v4",
    "flint",
]


@pytest.mark.parametrize(
    ("family", "fused"), [*((family, False) for family in FAMILIES), ("olmoe", True)]
)
def test_what_moves_in_memory_moves_on_disk(
    family: str, fused: bool, zoo_folder: Callable[..., Path]
) -> None:
    """All parameters plus one in memory are all stored tensors plus one."""
    if not zoo.installed(family):
        pytest.skip(f"{family} is not in this transformers")
    opened = open_model("x", zoo_folder(family, fused=fused))
    layout = TrainedLayout(opened, None)
    model = load_trainable(opened, layout, torch.float32, lora=False)
    state = {n: v + 1 if v.is_floating_point() else v for n, v in model.state_dict().items()}
    written = dict(layout.written(state))
    for name, value in written.items():
        torch.testing.assert_close(value, opened.checkpoint.read(name) + 1)
    role = opened.architecture.role
    assert Role.SELECTION_BIAS not in {role(name) for name in written}  # they stay
    roles = {role(n) for n in opened.checkpoint.tensors if n not in written}
    assert roles <= {Role.SELECTION_BIAS, Role.ROUTER, Role.ATTENTION, Role.OTHER}
    assert len(written) > 0.9 * len(opened.checkpoint.tensors)
