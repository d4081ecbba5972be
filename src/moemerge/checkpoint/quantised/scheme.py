"""How values become codes: which of them share a scale, and how scales are chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from moemerge.checkpoint.quantised.codes import Codes, Zones
from moemerge.runtime.dtypes import Dtype
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_LEAST_EXPONENT: Final = -127  # that a scale of eight bits can have
# Weights that a format's coarseness is measured on: normally distributed, a few zones of them.
_SAMPLE_ROWS: Final = 256
_SAMPLE_COLUMNS: Final = 1024


class Grid(NamedTuple):
    """What the zones of a matrix have: value = (code - zero) * scale, in float32."""

    scale: Tensor
    zero: Tensor | None


# From the least and the greatest value of each zone, neither beyond zero, to its scale.
Fit = Callable[["Tensor", "Tensor", Codes], Grid]


@dataclass(frozen=True)
class Scheme:
    """One way of storing a matrix. A height or width of None is the matrix's own."""

    codes: Codes
    height: int | None
    width: int | None
    fit: Fit
    scale_dtype: Dtype  # exponents of two are UINT8 or FLOAT8_E8M0FNU

    def zones(self, rows: int, columns: int) -> Zones:
        return Zones(rows, columns, self.height or max(1, rows), self.width or max(1, columns))

    @property
    def words(self) -> str:
        """`float8_e4m3fn in 128 x 128 blocks`."""
        if self.height is None:
            return f"{self.codes.name} with one scale"
        if self.width is None:
            return f"{self.codes.name} with a scale a row"
        if self.height == 1:
            return f"{self.codes.name} in groups of {self.width}"
        return f"{self.codes.name} in {self.height} x {self.width} blocks"

    def rounded(self, grid: Grid) -> Grid:
        """The grid as it will be read again."""
        return Grid(self.read_scales(self.store_scales(grid.scale)), grid.zero)

    def read_scales(self, stored: Tensor) -> Tensor:
        if self.scale_dtype is Dtype.UINT8:
            stored = stored.view(torch.float8_e8m0fnu)
        return stored.to(torch.float32)

    def store_scales(self, scales: Tensor) -> Tensor:
        if self.scale_dtype is Dtype.UINT8:
            return scales.to(torch.float8_e8m0fnu).view(torch.uint8)
        return scales.to(self.scale_dtype.torch)

    def fitted(self, zones: Tensor) -> Grid:
        """The scales (down, across) of values (down, across, elements of a zone)."""
        low, high = zones.amin(dim=-1).clamp_(max=0), zones.amax(dim=-1).clamp_(min=0)
        return self.rounded(self.fit(low, high, self.codes))

    def encode(self, zones: Tensor, grid: Grid, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Codes of values (down, across, n), and what will be read of them in `dtype`."""
        scale = grid.scale[:, :, None]
        if grid.zero is None:  # nothing is added: zero keeps its sign
            codes = self.codes.round(zones / scale)
            return codes, (self.codes.values_of(codes) * scale).to(dtype)
        zero = grid.zero[:, :, None]
        codes = self.codes.round(zones / scale + zero)
        return codes, ((self.codes.values_of(codes) - zero) * scale).to(dtype)


def relative_error(scheme: Scheme) -> float:
    """√(Σ(x − x̂)² / Σx²) of normally distributed weights x that are rounded to the scheme."""
    return _relative_error(scheme)


@cache
def _relative_error(scheme: Scheme) -> float:
    rng = torch.Generator().manual_seed(0)
    values = torch.randn(_SAMPLE_ROWS, _SAMPLE_COLUMNS, generator=rng)
    zones = scheme.zones(*values.shape).gather(values)
    read = scheme.encode(zones, scheme.fitted(zones), torch.float32)[1]
    return float((read - zones).norm() / zones.norm())


# --- scales from extents, as the tools of each format choose them --------------------------------


def largest(low: Tensor, high: Tensor, codes: Codes) -> Grid:
    """The largest magnitude becomes the largest code (block FP8, where zeros get the scale 1)."""
    magnitude = torch.maximum(-low, high)
    inverse = torch.where(magnitude > 0, codes.high / magnitude, 1.0)
    return Grid(1.0 / inverse, None)


def largest_power_of_two(low: Tensor, high: Tensor, codes: Codes) -> Grid:
    """The least power of two under which no value outgrows the largest code."""
    magnitude = torch.maximum(-low, high)
    mantissa, exponent = torch.frexp(magnitude / codes.high)
    exponent = exponent - (mantissa == 0.5).to(torch.int32)
    # Zeros read as zero under any scale.
    exponent = torch.where(magnitude > 0, exponent, _LEAST_EXPONENT).clamp(min=_LEAST_EXPONENT)
    return Grid(torch.ldexp(torch.ones_like(magnitude), exponent), None)


def symmetric(low: Tensor, high: Tensor, codes: Codes) -> Grid:
    """compressed-tensors: the span of the codes covers twice the largest magnitude."""
    magnitude = torch.maximum(-low, high)
    scale = magnitude / ((codes.high - codes.low) / 2)
    return Grid(torch.where(scale > 0, scale, torch.finfo(torch.bfloat16).eps), None)


def asymmetric(low: Tensor, high: Tensor, codes: Codes) -> Grid:
    """compressed-tensors: the codes span what lies between the least and the greatest value."""
    scale = (high - low) / (codes.high - codes.low)
    scale = torch.where(scale > 0, scale, torch.finfo(torch.bfloat16).eps)
    zero = (codes.low - low / scale).clamp_(codes.low, codes.high)
    return Grid(scale, zero.round_())
