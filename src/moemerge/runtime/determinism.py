"""The same bits from the same numbers, also where a GPU's gradients are summed by many at once."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.deterministic


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Inside, operations take their deterministic form where they have one."""
    if device.type != "cuda":
        yield
        return
    settings: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False  # it finds faults, and takes a write of everything
    try:
        with warnings.catch_warnings():
            # cuBLAS may differ between streams; one is used here. The message says otherwise.
            warnings.filterwarnings("ignore", message=".*determinis")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filled
