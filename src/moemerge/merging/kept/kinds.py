"""What is kept of a model, unit by unit, and the model's unit again: tensors in, tensors out.

With W the merged unit as it is shared, W_0 the base's and W_i a model's own, all in float32:

* tall: mask_i = [|τ_i| > t |τ - τ_i|];  W where mask_i, else W_0
* emr:  mask_i = [τ_i τ > 0];  W_0 + λ_i mask_i τ, with λ_i = Σ |τ_i| / Σ |mask_i τ| over the model
* twin: the leading singular directions of W_i - W, added to W
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.schema import Keep, KeptModels
from moemerge.merging.methods._spectra import Spectrum
from moemerge.runtime.dtypes import Dtype
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

MASK, LEFT, RIGHT, REST = "mask", "left", "right", "rest"
Parts = Mapping[str, "Tensor"]
BITS = 8


def pack_bits(mask: Tensor) -> Tensor:
    """A mask of any shape as bytes, eight elements each, the first in the lowest bit."""
    flat = mask.reshape(-1)
    bits = torch.zeros(-(-flat.numel() // BITS) * BITS, dtype=torch.uint8, device=mask.device)
    bits[: flat.numel()] = flat
    weights = torch.tensor([1 << i for i in range(BITS)], dtype=torch.uint8, device=mask.device)
    return (bits.view(-1, BITS) * weights).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The mask again."""
    weights = torch.tensor([1 << i for i in range(BITS)], dtype=torch.uint8, device=packed.device)
    bits = (packed[:, None] & weights) != 0
    count = 1
    for length in shape:
        count *= length
    return bits.reshape(-1)[:count].view(shape)


@dataclass(frozen=True)
class PartSpec:
    """One tensor that is kept of a unit."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]


def part_specs(settings: KeptModels, shape: tuple[int, ...], dtype: Dtype) -> list[PartSpec]:
    """What will be kept of a unit of this shape, stored in this dtype."""
    if settings.keep != "twin":
        count = 1
        for length in shape:
            count *= length
        return [PartSpec(MASK, Dtype.UINT8, (-(-count // BITS),))]
    rank = twin_rank(settings, shape)
    if rank is None:
        return [PartSpec(REST, dtype, shape)]
    out, width = shape
    return [PartSpec(LEFT, dtype, (out, rank)), PartSpec(RIGHT, dtype, (width, rank))]


def twin_rank(settings: KeptModels, shape: tuple[int, ...]) -> int | None:
    """How many directions are kept of a matrix; None where all of it takes no more room."""
    if len(shape) != 2 or settings.rank * sum(shape) >= shape[0] * shape[1]:
        return None
    return settings.rank


def keep_unit(settings: KeptModels, own: Tensor, base: Tensor, merged: Tensor) -> dict[str, Tensor]:
    """The parts of one model's unit."""
    if settings.keep == "tall":
        change, rest = own - base, merged - own
        return {MASK: pack_bits(change.abs() > settings.threshold * rest.abs())}
    if settings.keep == "emr":
        return {MASK: pack_bits((own - base) * (merged - base) > 0)}
    rank = twin_rank(settings, tuple(own.shape))
    rest = own - merged
    if rank is None:
        return {REST: rest}
    spectrum = Spectrum.of(rest, most=rank)
    root = spectrum.values.sqrt()
    left, right = own.new_zeros(own.shape[0], rank), own.new_zeros(own.shape[1], rank)
    left[:, : len(root)] = (spectrum.left * root).to(own.dtype)
    right[:, : len(root)] = (spectrum.right * root).to(own.dtype)
    return {LEFT: left, RIGHT: right}


def sizes(own: Tensor, base: Tensor, merged: Tensor) -> tuple[float, float]:
    """Σ |τ_i| and Σ |mask_i τ| of EMR's scale."""
    change, shared = own - base, merged - base
    agreed = shared.masked_fill(change * shared <= 0, 0.0)
    return float(change.abs().double().sum()), float(agreed.abs().double().sum())


def give_back(keep: Keep, parts: Parts, base: Tensor, merged: Tensor, scale: float) -> Tensor:
    """The model's unit again, as far as what was kept tells."""
    shape = tuple(merged.shape)
    if keep == "tall":
        return torch.where(unpack_bits(parts[MASK], shape), merged, base)
    if keep == "emr":
        mask = unpack_bits(parts[MASK], shape)
        return base + scale * torch.where(mask, merged - base, 0.0)
    if REST in parts:
        return merged + parts[REST].to(merged.dtype)
    return merged + parts[LEFT].to(merged.dtype) @ parts[RIGHT].to(merged.dtype).T
