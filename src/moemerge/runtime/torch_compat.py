"""Every private name of torch that this package needs, each with the reason.

These are not in `features/compat.py`, because `kernels` and `checkpoint` need them: packages below
`features`, which must not import transformers. `tests/forward/test_compat.py` has a test for each.
Checked with torch 2.13; 2.9 is the oldest supported release.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moemerge.errors import CheckpointError
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return each group's rows times its matrix: (rows, in) x (groups, in, out) -> (rows, out).

    `ends` are the ends of the groups' rows. `torch.nn.functional.grouped_mm` is public from torch
    2.10 on; before, the operation has only its private name.
    """
    product: Any = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    products: Tensor = product(rows, weights, offs=ends)
    return products


def record_offset(storage: torch.UntypedStorage) -> int:
    """Return the position in the file of the data of a storage loaded with map_location="meta".

    `torch.load(..., mmap=True)` does not notice that a record is cut off, and maps the bytes that
    follow. No public name tells where a record begins, and torch 2.9 has no private one.
    """
    offset = storage._checkpoint_offset
    if offset is None:
        raise CheckpointError(
            f"torch {torch.__version__} cannot check that a pickled file is complete",
            hint="use torch 2.13 or newer, or convert the file to safetensors",
        )
    return int(offset)
