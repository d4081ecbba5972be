"""What is known of a stored tensor without reading it, and the names safetensors gives dtypes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from moemerge.errors import CheckpointError

DTYPE_OF: Final[dict[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
}
NAME_OF: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in DTYPE_OF.items()}

# One torch element of these holds several stored ones along the last axis.
PACKED: Final[dict[torch.dtype, int]] = {torch.float4_e2m1fn_x2: 2}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's header: enough to plan everything that can be planned."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, shape: Sequence[int]) -> TensorInfo:
        return cls(name, dtype, tuple(shape), math.prod(shape) * dtype.itemsize)

    @property
    def rows(self) -> int:
        """Length of the leading axis; a scalar has one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def stored_shape(self) -> list[int]:
        """The shape a safetensors header states: it counts elements, torch counts packs."""
        pack = PACKED.get(self.dtype, 1)
        return [*self.shape[:-1], self.shape[-1] * pack] if self.shape else []

    def block_shape(self, rows: tuple[int, int] | None) -> tuple[int, ...]:
        """The shape of a range of leading-axis rows; refuses a range that does not exist."""
        if rows is None:
            return self.shape
        start, stop = rows
        if not self.shape or not 0 <= start <= stop <= self.shape[0]:
            raise CheckpointError(
                f"rows {start}:{stop} were asked of tensor {self.name!r} of shape "
                f"{list(self.shape)}",
                hint="ask for a range within the leading axis; a scalar can only be read whole",
            )
        return (stop - start, *self.shape[1:])


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable and without a copy."""
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)
