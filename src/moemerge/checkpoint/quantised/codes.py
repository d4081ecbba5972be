"""The numbers that a few bits can stand for (eight-bit and four-bit floats and integers), and the
zones of a matrix whose codes share a scale.

Reading looks two codes up at a time in a table, which is several times as fast as the conversions
that torch has for eight-bit floats. Writing rounds to the nearest value, ties to the even code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from moemerge.runtime.dtypes import Dtype
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


# The values of e2m1 by its lower three bits; the fourth is the sign.
_FP4_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Codes:
    """One kind of elements: how many bits each takes, and the range it spans."""

    name: str
    bits: int
    low: float
    high: float
    offset: int = 0  # integers: what is stored is the number plus this
    dtype: Dtype | None = None  # of elements that are not packed

    def decode(self, stored: Tensor, columns: int) -> Tensor:
        """The values as float32 (rows, columns) of rows as they lie in memory, of any dtype."""
        rows = stored.shape[0]
        raw = stored.contiguous().view(-1).view(torch.uint8)
        width = raw.numel() * 8 // self.bits // max(1, rows)  # elements of a row, padding included
        if self.bits == 8:
            odd = raw.numel() % 2
            pairs = torch.cat([raw, raw[:1]]) if odd else raw
            index = pairs.view(torch.int16).to(torch.int32).add_(2**15)
            values = _pairs(self).index_select(0, index).view(torch.float32)
            values = values[:-1] if odd else values
        else:
            values = _pairs(self).index_select(0, raw.to(torch.int32)).view(torch.float32)
        return values.view(rows, width)[:, :columns]

    def round(self, values: Tensor) -> Tensor:
        """The code of the value nearest to each of `values`, as uint8."""
        values = values.clamp(self.low, self.high)
        if self.dtype is not None and self.dtype.is_floating_point:
            return values.to(self.dtype.torch).view(torch.uint8)
        if self is FP4:
            sign = torch.signbit(values).to(torch.uint8) << 3
            return torch.bucketize(values.abs(), _fp4_borders()).to(torch.uint8) | sign
        return (values.round() + self.offset).to(torch.int16).to(torch.uint8)

    def values_of(self, codes: Tensor) -> Tensor:
        """The values of codes as `round` gives them, as float32."""
        return _table(self).index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)

    def pack(self, codes: Tensor) -> Tensor:
        """Bytes (rows, n) of codes (rows, columns), the first of two in the lower half."""
        if self.bits == 8:
            return codes
        if codes.shape[1] % 2:
            codes = torch.nn.functional.pad(codes, (0, 1))
        return codes[:, 0::2] | (codes[:, 1::2] << 4)


E4M3: Final = Codes("float8_e4m3fn", 8, -448.0, 448.0, dtype=Dtype.FLOAT8_E4M3FN)
E5M2: Final = Codes("float8_e5m2", 8, -57344.0, 57344.0, dtype=Dtype.FLOAT8_E5M2)
INT8: Final = Codes("int8", 8, -128.0, 127.0, dtype=Dtype.INT8)
FP4: Final = Codes("float4_e2m1", 4, -6.0, 6.0)
PACKED_INT4: Final = Codes("int4", 4, -8.0, 7.0, offset=8)
PACKED_INT8: Final = Codes("int8", 8, -128.0, 127.0, offset=128)


@cache
def _table(codes: Codes) -> Tensor:
    """The value of every code, as float32."""
    every = torch.arange(2**codes.bits, dtype=torch.uint8 if codes.bits == 8 else torch.int64)
    if codes.dtype is not None:
        return every.view(codes.dtype.torch).to(torch.float32)
    if codes is FP4:
        return torch.tensor((*_FP4_VALUES, *(-value for value in _FP4_VALUES)))
    return every.to(torch.float32) - codes.offset


@cache
def _pairs(codes: Codes) -> Tensor:
    """The values of two codes that lie in memory together, eight bytes for every pair.

    A pair of bytes is read as a signed number, so its negative half comes first.
    """
    table, count = _table(codes), 2**codes.bits
    first, second = table.repeat(count), table.repeat_interleave(count)
    pairs = torch.stack([first, second], dim=1).view(torch.int64).view(-1)
    return pairs.roll(2**15) if codes.bits == 8 else pairs


@cache
def _fp4_borders() -> Tensor:
    """Where rounding changes over from one value to the next."""
    middles = [(a + b) / 2 for a, b in pairwise(_FP4_VALUES)]
    borders = torch.tensor(middles)
    below = torch.nextafter(borders, torch.tensor(-math.inf))
    # `bucketize` gives a border to the code below it: right for even codes alone.
    odd = torch.arange(len(middles)) % 2 == 1
    return torch.where(odd, below, borders)


# --- zones ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Zones:
    """The zones of an (out, in) matrix; those at its far edges may be cut short."""

    rows: int  # of the matrix
    columns: int
    height: int  # of one zone
    width: int

    @property
    def down(self) -> int:
        """Zones in a column of zones."""
        return -(-self.rows // self.height)

    @property
    def across(self) -> int:
        return -(-self.columns // self.width)

    def rows_of(self, start: int, stop: int) -> tuple[int, int]:
        """The rows of zones that hold the matrix rows [start, stop)."""
        return start // self.height, -(-stop // self.height)

    def for_rows(self, grid: Tensor, start: int, stop: int) -> Tensor:
        """One row of numbers for every matrix row of [start, stop): (rows, across).

        `grid` are the rows of zones that `rows_of` names.
        """
        if self.height == 1:
            return grid
        index = torch.arange(start, stop).div_(self.height, rounding_mode="floor")
        return grid.index_select(0, index - start // self.height)

    def spread(self, numbers: Tensor) -> Tensor:
        """(rows, across) -> (rows, columns)."""
        wide = numbers[:, :, None].expand(-1, -1, self.width)
        return wide.reshape(len(numbers), -1)[:, : self.columns]

    def multiply_(self, values: Tensor, factors: Tensor) -> None:
        """values (rows, columns) times what each zone has in factors (rows, across)."""
        whole = self.columns // self.width
        if whole:
            part = values[:, : whole * self.width].view(-1, whole, self.width)
            part.mul_(factors[:, :whole, None])
        if whole < self.across:
            values[:, whole * self.width :].mul_(factors[:, whole:])

    def gather(self, values: Tensor) -> Tensor:
        """values (rows, columns), rows beginning with a zone, as (down, across, elements of a
        zone); what is cut short is filled up with zeros."""
        down = -(-len(values) // self.height)
        pad = (0, self.across * self.width - self.columns, 0, down * self.height - len(values))
        if any(pad):
            values = torch.nn.functional.pad(values, pad)
        blocks = values.view(down, self.height, self.across, self.width)
        return blocks.transpose(1, 2).reshape(down, self.across, -1)

    def scatter(self, zones: Tensor, rows: int) -> Tensor:
        """The inverse of `gather`, for a matrix of `rows` rows."""
        down = len(zones)
        blocks = zones.view(down, self.across, self.height, self.width).transpose(1, 2)
        return blocks.reshape(down * self.height, -1)[:rows, : self.columns]
