"""Quantisation schemes: codes of a few bits, blocks that share a scale, and the choice of scales.

Decoding looks up two codes at a time in a table, several times as fast as torch's conversions of
eight-bit floats. Encoding rounds to the nearest value, ties to the even code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from moemerge.runtime.dtypes import Dtype
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


# The values of e2m1 by the lower three bits; the fourth is the sign.
_FP4_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Codes:
    """A format of elements: bits per element and the range of values."""

    name: str
    bits: int
    low: float
    high: float
    offset: int = 0  # integers are stored plus this
    dtype: Dtype | None = None  # if elements are not packed

    def decode(self, stored: Tensor, columns: int) -> Tensor:
        """Return the values of stored rows as float32 (rows, columns); `stored` has any dtype."""
        rows = stored.shape[0]
        raw = stored.contiguous().view(-1).view(torch.uint8)
        width = raw.numel() * 8 // self.bits // max(1, rows)  # elements per row, with padding
        if self.bits == 8:
            odd = raw.numel() % 2
            pairs = torch.cat([raw, raw[:1]]) if odd else raw
            index = pairs.view(torch.int16).to(torch.int32).add_(2**15)
            values = _pairs(self, raw.device).index_select(0, index).view(torch.float32)
            values = values[:-1] if odd else values
        else:
            index = raw.to(torch.int32)
            values = _pairs(self, raw.device).index_select(0, index).view(torch.float32)
        return values.view(rows, width)[:, :columns]

    def round(self, values: Tensor) -> Tensor:
        """Return the codes of the nearest values as uint8."""
        values = values.clamp(self.low, self.high)
        if self.dtype is not None and self.dtype.is_floating_point:
            return values.to(self.dtype.torch).view(torch.uint8)
        if self is FP4:
            sign = torch.signbit(values).to(torch.uint8) << 3
            return torch.bucketize(values.abs(), _fp4_borders()).to(torch.uint8) | sign
        return (values.round() + self.offset).to(torch.int16).to(torch.uint8)

    def values_of(self, codes: Tensor) -> Tensor:
        """Return the values of codes from `round` as float32."""
        return _table(self).index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)

    def pack(self, codes: Tensor) -> Tensor:
        """Pack codes (rows, columns) into bytes (rows, n), the first of two in the lower half."""
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
    """Return the value of every code as float32."""
    every = torch.arange(2**codes.bits, dtype=torch.uint8 if codes.bits == 8 else torch.int64)
    if codes.dtype is not None:
        return every.view(codes.dtype.torch).to(torch.float32)
    if codes is FP4:
        return torch.tensor((*_FP4_VALUES, *(-value for value in _FP4_VALUES)))
    return every.to(torch.float32) - codes.offset


@cache
def _pairs(codes: Codes, device: torch.device) -> Tensor:
    """Return the two values of every pair of adjacent codes, eight bytes per pair.

    A pair of bytes is read as a signed number, so the negative half comes first.
    """
    table, count = _table(codes), 2**codes.bits
    first, second = table.repeat(count), table.repeat_interleave(count)
    pairs = torch.stack([first, second], dim=1).view(torch.int64).view(-1)
    return (pairs.roll(2**15) if codes.bits == 8 else pairs).to(device)


@cache
def _fp4_borders() -> Tensor:
    """Return the borders at which rounding changes from one value to the next."""
    middles = [(a + b) / 2 for a, b in pairwise(_FP4_VALUES)]
    borders = torch.tensor(middles)
    below = torch.nextafter(borders, torch.tensor(-math.inf))
    # `bucketize` assigns a border to the code below it, which is right only for even codes.
    odd = torch.arange(len(middles)) % 2 == 1
    return torch.where(odd, below, borders)


# --- blocks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaleBlocks:
    """The blocks of an (out, in) matrix that share a scale; the last ones may be smaller."""

    rows: int  # of the matrix
    columns: int
    height: int  # of one block
    width: int

    @property
    def down(self) -> int:
        """Return the number of blocks per column of blocks."""
        return -(-self.rows // self.height)

    @property
    def across(self) -> int:
        return -(-self.columns // self.width)

    def rows_of(self, start: int, stop: int) -> tuple[int, int]:
        """Return the rows of blocks that contain the matrix rows [start, stop)."""
        return start // self.height, -(-stop // self.height)

    def for_rows(self, grid: Tensor, start: int, stop: int) -> Tensor:
        """Return one row of numbers for every matrix row of [start, stop): (rows, across).

        `grid` has the rows of blocks that `rows_of` returns.
        """
        if self.height == 1:
            return grid
        index = torch.arange(start, stop, device=grid.device)
        index = index.div_(self.height, rounding_mode="floor")
        return grid.index_select(0, index - start // self.height)

    def spread(self, numbers: Tensor) -> Tensor:
        """Repeat each block's number: (rows, across) -> (rows, columns)."""
        wide = numbers[:, :, None].expand(-1, -1, self.width)
        return wide.reshape(len(numbers), -1)[:, : self.columns]

    def multiply_(self, values: Tensor, factors: Tensor) -> None:
        """Multiply values (rows, columns) by each block's factor (rows, across), in place."""
        whole = self.columns // self.width
        if whole:
            part = values[:, : whole * self.width].view(-1, whole, self.width)
            part.mul_(factors[:, :whole, None])
        if whole < self.across:
            values[:, whole * self.width :].mul_(factors[:, whole:])

    def gather(self, values: Tensor) -> Tensor:
        """Rearrange values (rows, columns) to (down, across, elements of a block).

        The rows must start with a block. Smaller blocks are padded with zeros.
        """
        down = -(-len(values) // self.height)
        pad = (0, self.across * self.width - self.columns, 0, down * self.height - len(values))
        if any(pad):
            values = torch.nn.functional.pad(values, pad)
        split = values.view(down, self.height, self.across, self.width)
        return split.transpose(1, 2).reshape(down, self.across, -1)

    def scatter(self, blocks: Tensor, rows: int) -> Tensor:
        """Invert `gather` for a matrix of `rows` rows."""
        down = len(blocks)
        split = blocks.view(down, self.across, self.height, self.width).transpose(1, 2)
        return split.reshape(down * self.height, -1)[:rows, : self.columns]


# --- schemes --------------------------------------------------------------------------------------

_LEAST_EXPONENT: Final = -127  # of an eight-bit scale
# Size of the normally distributed weights on which a format's error is measured.
_SAMPLE_ROWS: Final = 256
_SAMPLE_COLUMNS: Final = 1024


class ScaleGrid(NamedTuple):
    """Scales and zero points of the blocks: value = (code - zero) * scale, in float32."""

    scale: Tensor
    zero: Tensor | None


# (smallest value, largest value of each block, codes) -> scales. The range includes zero.
ScaleRule = Callable[["Tensor", "Tensor", Codes], ScaleGrid]


@dataclass(frozen=True)
class Scheme:
    """A format of a quantised matrix. A height or width of None is the whole matrix's."""

    codes: Codes
    height: int | None
    width: int | None
    fit: ScaleRule
    scale_dtype: Dtype  # exponents of two are UINT8 or FLOAT8_E8M0FNU

    def blocks(self, rows: int, columns: int) -> ScaleBlocks:
        height, width = self.height or max(1, rows), self.width or max(1, columns)
        return ScaleBlocks(rows, columns, height, width)

    @property
    def description(self) -> str:
        """Describe the scheme: `float8_e4m3fn in 128 x 128 blocks`."""
        if self.height is None:
            return f"{self.codes.name} with one scale"
        if self.width is None:
            return f"{self.codes.name} with a scale a row"
        if self.height == 1:
            return f"{self.codes.name} in groups of {self.width}"
        return f"{self.codes.name} in {self.height} x {self.width} blocks"

    def read_scales(self, stored: Tensor) -> Tensor:
        if self.scale_dtype is Dtype.UINT8:
            stored = stored.view(torch.float8_e8m0fnu)
        return stored.to(torch.float32)

    def store_scales(self, scales: Tensor) -> Tensor:
        if self.scale_dtype is Dtype.UINT8:
            return scales.to(torch.float8_e8m0fnu).view(torch.uint8)
        if self.scale_dtype is Dtype.FLOAT8_E4M3FN:
            scales = scales.clamp(max=E4M3.high)  # torch's conversion does not saturate
        return scales.to(self.scale_dtype.torch)

    def fitted(self, blocks: Tensor) -> ScaleGrid:
        """Return the scales (down, across) for values (down, across, elements of a block).

        They are those that are read after storing.
        """
        low, high = blocks.amin(dim=-1).clamp_(max=0), blocks.amax(dim=-1).clamp_(min=0)
        scale, zero = self.fit(low, high, self.codes)
        return ScaleGrid(self.read_scales(self.store_scales(scale)), zero)

    def encode(self, blocks: Tensor, grid: ScaleGrid, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the codes of values (down, across, n), and their decoded values in `dtype`."""
        scale = grid.scale[:, :, None]
        blocks = blocks / torch.where(scale > 0, scale, math.inf)  # all is zero with scale zero
        if grid.zero is None:  # without adding 0.0, which would change the sign of -0.0
            codes = self.codes.round(blocks)
            return codes, (self.codes.values_of(codes) * scale).to(dtype)
        zero = grid.zero[:, :, None]
        codes = self.codes.round(blocks + zero)
        return codes, ((self.codes.values_of(codes) - zero) * scale).to(dtype)


@cache
def relative_error(scheme: Scheme) -> float:
    """Return √(Σ(x − x̂)² / Σx²) of normally distributed weights x after rounding."""
    known = _ERRORS.get((scheme.codes, scheme.height, scheme.width, scheme.fit))
    return _measured_error(scheme) if known is None else known


def _measured_error(scheme: Scheme) -> float:
    rng = torch.Generator().manual_seed(0)
    values = torch.randn(_SAMPLE_ROWS, _SAMPLE_COLUMNS, generator=rng)
    blocks = scheme.blocks(*values.shape).gather(values)
    read = scheme.encode(blocks, scheme.fitted(blocks), torch.float32)[1]
    return float((read - blocks).norm() / blocks.norm())


# --- scales, chosen like the tools of each format -------------------------------------------------


def largest(low: Tensor, high: Tensor, codes: Codes) -> ScaleGrid:
    """Map the largest magnitude to the largest code; all-zero blocks get scale 1 (block FP8)."""
    magnitude = torch.maximum(-low, high)
    inverse = torch.where(magnitude > 0, codes.high / magnitude, 1.0)
    return ScaleGrid(1.0 / inverse, None)


def largest_power_of_two(low: Tensor, high: Tensor, codes: Codes) -> ScaleGrid:
    """Choose the smallest power of two with which no value exceeds the largest code."""
    magnitude = torch.maximum(-low, high)
    mantissa, exponent = torch.frexp(magnitude / codes.high)
    exponent = exponent - (mantissa == 0.5).to(torch.int32)
    # Zeros are zero with any scale.
    exponent = torch.where(magnitude > 0, exponent, _LEAST_EXPONENT).clamp(min=_LEAST_EXPONENT)
    return ScaleGrid(torch.ldexp(torch.ones_like(magnitude), exponent), None)


def symmetric(low: Tensor, high: Tensor, codes: Codes) -> ScaleGrid:
    """Let the range of the codes cover twice the largest magnitude (compressed-tensors)."""
    magnitude = torch.maximum(-low, high)
    scale = magnitude / ((codes.high - codes.low) / 2)
    return ScaleGrid(torch.where(scale > 0, scale, torch.finfo(torch.bfloat16).eps), None)


def asymmetric(low: Tensor, high: Tensor, codes: Codes) -> ScaleGrid:
    """Let the codes cover the range from the smallest to the largest value (compressed-tensors)."""
    scale = (high - low) / (codes.high - codes.low)
    scale = torch.where(scale > 0, scale, torch.finfo(torch.bfloat16).eps)
    zero = (codes.low - low / scale).clamp_(codes.low, codes.high)
    return ScaleGrid(scale, zero.round_())


# Measured errors of published formats, so that planning a merge does not import torch.
_ERRORS: Final[Mapping[tuple[Codes, int | None, int | None, ScaleRule], float]] = {
    (E4M3, 128, 128, largest): 0.0264,
    (E4M3, 128, 128, largest_power_of_two): 0.0266,
    (FP4, 1, 32, largest_power_of_two): 0.1156,
    (PACKED_INT4, 1, 32, symmetric): 0.0949,
    (PACKED_INT4, 1, 128, symmetric): 0.1112,
}


def squares(values: Tensor) -> Tensor:
    """Return the squares of float32 values, in float64 if they would overflow."""
    found = values.square()
    return found if bool(found.isfinite().all()) else values.double().square()
