"""An emptied storage takes no memory and comes back with the same bytes under every reference."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from moemerge.errors import CheckpointError
from moemerge.features.spill import SpillFactory, Tracker, held_by

CPU = torch.device("cpu")


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    spill = SpillFactory("disk", CPU, tmp_path).spill(0)
    assert spill is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(CheckpointError, match="cannot be written"):
            spill.out([torch.ones(2**20)], keep=set(), smallest=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_every_reference_comes_back(tmp_path: Path) -> None:
    room = SpillFactory("disk", CPU, tmp_path)
    spill = room.spill(0)
    assert spill is not None
    value = torch.randn(64, 32)
    view, expected = value.t()[3:], value.clone()
    spill.out([value, view, value], keep=set(), smallest=0)
    assert value.untyped_storage().nbytes() == 0
    assert len(list(tmp_path.rglob("*.bin"))) == 1  # one storage, once
    spill.back()
    assert torch.equal(value, expected)
    assert torch.equal(view, expected.t()[3:])
    spill.out([value], keep=set(), smallest=0)  # and again, after numpy has been near it
    assert value.untyped_storage().nbytes() == 0
    spill.back()
    assert torch.equal(value, expected)
    room.close()
    assert not list(tmp_path.iterdir())


def test_shared_and_small_storages_stay(tmp_path: Path) -> None:
    room = SpillFactory("disk", CPU, tmp_path)
    spill = room.spill(0)
    assert spill is not None
    layer = torch.nn.Linear(8, 8)
    layer.cache = torch.ones(8, 8)
    small = torch.ones(4)
    spill.out([layer.weight, layer.cache, small], keep=held_by([layer]), smallest=16)
    assert layer.weight.untyped_storage().nbytes() == layer.cache.untyped_storage().nbytes() == 256
    assert small.untyped_storage().nbytes() == 16
    room.close()


def test_a_cpu_run_has_nothing_to_gain_from_the_cpu() -> None:
    assert not SpillFactory("cpu", CPU).active
    assert not SpillFactory("device", torch.device("cuda")).active
    assert SpillFactory("cpu", torch.device("cuda")).active


def test_the_tracker_knows_what_is_alive() -> None:
    tracker = Tracker()
    with tracker:
        kept = torch.ones(4) * 2
        part, _ = (kept + 1).split(2)
        torch.zeros(4)
    alive = tracker.alive()
    assert any(tensor is kept for tensor in alive)
    assert any(tensor is part for tensor in alive)
    assert not any(bool((tensor == 0).all()) for tensor in alive)  # nobody kept the zeros
