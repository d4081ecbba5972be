"""Routers found in the modules are those the architectures' tables name, for every family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zoo
from moemerge.architectures.architecture import Architecture
from moemerge.checkpoint.reader import Checkpoint
from moemerge.features.loading import build_skeleton, map_names
from moemerge.features.routers import anatomy

Folder = Callable[..., Path]


@pytest.mark.parametrize("family", [f for f in zoo.FAMILIES if f not in ("zaya", "doge")])
def test_modules_and_tables_agree(family: str, zoo_folder: Folder) -> None:
    checkpoint = Checkpoint.open(zoo_folder(family))
    table = Architecture.of(checkpoint.config, checkpoint.tensors)
    model = build_skeleton(checkpoint, torch.float32)
    names = map_names(model, checkpoint)
    found = {
        (r.layer, names.on_disk(r.weight), None if r.bias is None else names.on_disk(r.bias))
        for r in anatomy(model).routers
    }
    served = {(place.layer, place.weight, place.bias) for place in table.routers() if place.served}
    assert found == served
    assert found


def test_layers_and_owner(zoo_folder: Folder) -> None:
    model = build_skeleton(Checkpoint.open(zoo_folder("dbrx")), torch.float32)
    parts = anatomy(model)
    assert parts.owner == "transformer"
    assert parts.layers == tuple(f"transformer.blocks.{n}" for n in range(3))
    assert [router.layer for router in parts.routers] == [0, 1, 2]


def test_the_linear_map_inside_and_the_attention_router(zoo_folder: Folder) -> None:
    gemma = anatomy(build_skeleton(Checkpoint.open(zoo_folder("gemma4_text")), torch.float32))
    assert gemma.routers[0].path.endswith(".router.proj")
    jet = anatomy(build_skeleton(Checkpoint.open(zoo_folder("jetmoe")), torch.float32))
    assert sorted(router.path.removeprefix("model.layers.0.") for router in jet.routers[:2]) == [
        "mlp.router",
        "self_attention.experts.router",
    ]
