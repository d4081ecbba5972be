"""Headers of stored tensors, and sizes in bytes as text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from moemerge.errors import CheckpointError, UsageError
from moemerge.runtime.dtypes import Dtype
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


RowRange = tuple[int, int]  # the rows [start, stop) of a tensor's leading axis


@dataclass(unsafe_hash=True)
class TensorInfo:
    """One tensor's header. Never changed; `frozen` would make it three times as slow to create."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, name: str, dtype: Dtype | torch.dtype, shape: Sequence[int]) -> TensorInfo:
        return cls(name, Dtype.of(dtype), tuple(shape), math.prod(shape) * dtype.itemsize)

    @property
    def rows(self) -> int:
        """Return the length of the leading axis; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def parts(self) -> tuple[TensorInfo, ...]:
        """Return the tensors on disk: only itself, unless it is quantised."""
        return (self,)

    @property
    def stored_bytes(self) -> int:
        """Return the bytes on disk, fewer than `nbytes` for a quantised tensor."""
        return sum(part.nbytes for part in self.parts)

    @property
    def stored_as(self) -> str:
        """Describe the format of the elements on disk."""
        return str(self.dtype)

    @property
    def stored_shape(self) -> list[int]:
        """Return the shape in a safetensors header; it counts elements where torch counts packs."""
        return [*self.shape[:-1], self.shape[-1] * self.dtype.pack] if self.shape else []

    def require_fit(self, tensor: Tensor, row: int) -> None:
        """Refuse a tensor, or rows from `row` on, of another shape or dtype."""
        stop = row + (tensor.shape[0] if tensor.dim() else 1)
        whole = tuple(tensor.shape) == self.shape and row == 0
        inner = tensor.dim() == len(self.shape) > 0 and tuple(tensor.shape[1:]) == self.shape[1:]
        block = inner and 0 <= row <= stop <= self.rows
        if tensor.dtype != self.dtype.torch or not (whole or block):
            raise CheckpointError(
                f"tensor {self.name!r} is {list(self.shape)} {self.dtype}, but "
                f"{list(tensor.shape)} {tensor.dtype} was written at row {row}",
                hint="write the shape and dtype that were declared, or that the source has",
            )

    def block_shape(self, rows: RowRange | None) -> tuple[int, ...]:
        """Return the shape of a range of leading-axis rows. Refuse an invalid range."""
        if rows is None:
            return self.shape
        start, stop = rows
        if not self.shape or not 0 <= start <= stop <= self.shape[0]:
            raise CheckpointError(
                f"rows {start}:{stop} were requested of tensor {self.name!r} of shape "
                f"{list(self.shape)}",
                hint="request a range within the leading axis; a scalar can only be read whole",
            )
        return (stop - start, *self.shape[1:])


def main_dtype(tensors: Iterable[TensorInfo]) -> Dtype:
    """Return the dtype of most bytes; routers and biases may have a wider one."""
    bytes_of: Counter[Dtype] = Counter()
    for info in tensors:
        if info.dtype.is_floating_point:
            bytes_of[info.dtype] += info.nbytes
    return max(bytes_of, key=bytes_of.__getitem__, default=Dtype.FLOAT32)


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as writable bytes, without a copy."""
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


# --- sizes as text --------------------------------------------------------------------------------

_UNITS: Final[dict[str, int]] = {
    "": 1,
    "k": 10**3,
    "kb": 10**3,
    "m": 10**6,
    "mb": 10**6,
    "g": 10**9,
    "gb": 10**9,
    "b": 10**9,  # mergekit's "5B": five billion
    "t": 10**12,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE: Final = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([a-zA-Z]*)\s*")


def parse_size(size: str | int) -> int:
    """Parse `5GB`, `500MB`, `2GiB`, `5B` (five billion, as in mergekit) or a plain number."""
    match = _SIZE.fullmatch(str(size))
    if match is None or isinstance(size, bool) or match[2].lower() not in _UNITS:
        raise UsageError(
            f"{size!r} is not a size", hint="write a number of bytes, or e.g. 5GB, 500MB or 2GiB"
        )
    number, unit = match[1], _UNITS[match[2].lower()]
    # Whole numbers stay integers: a float would round sizes beyond 2**53.
    nbytes = int(float(number) * unit) if "." in number else int(number) * unit
    if nbytes < 1:
        raise UsageError(f"{size!r} is not a usable size", hint="use at least one byte, e.g. 5GB")
    return nbytes


def format_size(nbytes: int) -> str:
    """Return a size such as `1.3 GB`, in powers of ten like disk sizes."""
    amount = float(nbytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{nbytes} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
