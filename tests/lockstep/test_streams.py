"""Models beside each other stop at the same routers, or say that they cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from features import reference
from moemerge.architectures.opened import OpenModel, open_model
from moemerge.errors import ArchitectureError
from moemerge.features.router_stream import RouterStream
from moemerge.lockstep.streams import Lockstep
from moemerge.text.batches import Batch

Folder = Callable[..., Path]


def opened(
    name: str, folder: Path, batches: tuple[Batch, ...], **options: Any
) -> tuple[OpenModel, RouterStream]:
    model = open_model(name, folder)
    return model, RouterStream(model.checkpoint, batches, **options)


def test_each_stop_is_of_one_router(zoo_folder: Folder, tmp_path: Path) -> None:
    folder = zoo_folder("olmoe")
    other = zoo.perturb(folder, tmp_path / "other", seed=3, scale=0.3)
    batches = reference.batches()
    code = tuple(batch for batch in batches if batch.domain == "code")
    with Lockstep(
        opened("merged", folder, batches), {"code": opened("code", other, code)}
    ) as models:
        seen = []
        for stops in models:
            stop, others = stops.lead, stops.others
            seen.append(stop.layer)
            assert others["code"].path == stop.path
            assert stop.domains == ("math", "code")
            assert others["code"].domains == ("code",)
            for (mine, x), (theirs, y) in zip(
                stop.by_batch("code"), others["code"].by_batch("code"), strict=True
            ):
                assert mine is theirs
                assert x.shape == y.shape
                assert not torch.equal(x, y)
        assert seen == [0, 1, 2]
        assert models.memory == [stream.memory for stream in models.streams]


@pytest.mark.parametrize("mine", [(0, 1), (0, 1, 2)])
def test_models_that_stop_elsewhere_are_refused(mine: tuple[int, ...], zoo_folder: Folder) -> None:
    folder, batches = zoo_folder("olmoe"), reference.batches()
    theirs = (0, 1, 2) if mine == (0, 1) else (0, 2)
    lead = opened("merged", folder, batches, layers=mine)
    others = {"code": opened("code", folder, batches, layers=theirs)}
    with Lockstep(lead, others) as models, pytest.raises(ArchitectureError, match="same structure"):
        for _ in models:
            pass
