"""Deterministic operations for a while, and everything as it was afterwards."""

from __future__ import annotations

import pytest
import torch

from moemerge.runtime.gpu import deterministic


def state() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


def test_it_ends_with_the_context() -> None:
    before = state()
    with deterministic(torch.device("cuda")):
        assert state() == (True, True, False)
    assert state() == before

    def fail() -> None:
        with deterministic(torch.device("cuda")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert state() == before


def test_a_cpu_needs_none_of_it() -> None:
    before = state()
    with deterministic(torch.device("cpu")):
        assert state() == before
