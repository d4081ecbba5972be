"""Launch the Triton kernels for products with bf16 features, with tiles for each shape.

One application of the curvature reads the features twice: once for u = H (X Vᵀ), and once for
uᵀ X, summed over splits of the tokens in float32 and over the splits in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moemerge.kernels.availability import launch, triton_works
from moemerge.kernels.splitting import ACCURATE, COARSE, FAST, Terms

# Up to this number of experts, one tile holds all logits of a token, and the kernel applies H.
FUSED_EXPERTS = 128
# Experts per program of the second product; the terms of a group are adjacent in u.
GROUP = 64
# Tokens that are summed in float32, by the number of terms; the rest is summed in float64.
ROWS_PER_SPLIT = {FAST.weighted: 1 << 17, ACCURATE.weighted: 1 << 13}
# Blocks of tokens that the tensor cores sum in the stacked second product.
STRETCH = 8
SPLIT_BLOCK = 1024
SUM_BLOCK = 256
ALIGNMENT = 16  # bytes, of addresses and rows
HOPPER = 9  # the compute capability that the tiles are for; others use plain torch
WEIGHED = 8192  # elements of a tile of `weigh` and `moment`
# Maximum stages of a loop over tiles, and the shared memory for its prefetched tiles (stages - 1).
# A Hopper GPU has 227 KB; the rest is for the products' operands.
STAGES, READ_AHEAD = 3, 180 * 2**10
MOMENTS = 4  # programs of `moment` per multiprocessor


@dataclass(frozen=True)
class Tile:
    """A kernel's tile (tokens × columns) and its compile options."""

    rows: int
    columns: int
    warps: int
    stages: int
    stacked: bool = False  # two terms as one product of twice the size
    early: bool = False  # load H before the logits are computed


def usable(x: Tensor) -> bool:
    """Return whether the kernels support these features; if not, plain torch computes."""
    return (
        x.dtype == torch.bfloat16
        and x.dim() == 2
        and x.is_cuda
        and x.stride(1) == 1
        and x.stride(0) * x.element_size() % ALIGNMENT == 0
        and x.data_ptr() % ALIGNMENT == 0
        and torch.cuda.get_device_capability(x.device)[0] == HOPPER
        and triton_works(x.device)
    )


def logits(x: Tensor, v: Tensor, *, terms: int) -> Tensor:
    """Return X Vᵀ, plus V's last column if it has one more than X: (tokens, experts) float32."""
    out = torch.empty(x.shape[0], v.shape[0], dtype=torch.float32, device=x.device)
    _launch_logits(x, v, "logits", None, None, out, terms=Terms(terms, terms))
    return out


def add_product(
    out: Tensor,
    x: Tensor,
    diagonal: Tensor | None,
    rank_one: Tensor | None,
    v: Tensor,
    *,
    terms: Terms,
    factor: float = 1.0,
) -> None:
    """Add `factor` Σ_t H_t (V x_t) x_tᵀ to `out`; COARSE and FAST need a `representable` V.

    `out` is contiguous float64 of V's shape. H v = diagonal ⊙ v − rank_one (rank_one · v), both
    (tokens, experts) float32. Without `diagonal` it is the identity; without `rank_one`, zero.
    """
    if out.dtype != torch.float64 or not out.is_contiguous():
        raise ValueError(f"out is {out.dtype} with strides {out.stride()}, not contiguous float64")
    experts = v.shape[0]
    weights = _kind(diagonal, rank_one)
    if experts <= FUSED_EXPERTS:
        u = x.new_empty(x.shape[0], terms.weighted * _padded(experts))
        sums = _launch_logits(x, v, weights, diagonal, rank_one, u, terms=terms)
    else:
        z = logits(x, v, terms=terms.vector)
        u, sums = weigh(z, diagonal, rank_one, terms=terms.weighted, like=x)
    _add_outer(out, u, x, sums, terms=terms.weighted, factor=factor)


def outer(u: Tensor, x: Tensor, columns: int, *, terms: int, square: bool = False) -> Tensor:
    """Return Σ_t u_t [x_t 1]ᵀ (the 1 if `columns` includes it), or with x_t² elementwise."""
    parts, sums = weigh(u.float(), None, None, terms=terms, like=x)
    out = torch.zeros(u.shape[1], columns, dtype=torch.float64, device=x.device)
    _add_outer(out, parts, x, sums, terms=terms, square=square)
    return out


@dataclass(frozen=True)
class Shift:
    """Logits added along a few directions of the features: coefficients · projected."""

    projected: Tensor  # (tokens, J) float32
    coefficients: Tensor  # (experts, J)


def add_weighted(
    out: Tensor,
    x: Tensor,
    diagonal: Tensor | None,
    rank_one: Tensor | None,
    z: Tensor,
    shift: Shift | None,
    *,
    terms: int,
    factor: float = 1.0,
) -> None:
    """Add `factor` Σ_t H_t (z_t + shift_t) x_tᵀ to `out`: the second half of `add_product`."""
    u, sums = weigh(z, diagonal, rank_one, terms=terms, like=x, shift=shift)
    _add_outer(out, u, x, sums, terms=terms, factor=factor)


def moment(
    z: Tensor, diagonal: Tensor | None, rank_one: Tensor | None, projected: Tensor, *, wide: bool
) -> Tensor:
    """Return Σ_t (H_t z_t) projected_tᵀ, (experts, J) float64. `wide` is for the interpreter."""
    tokens, experts = z.shape
    directions = projected.shape[1]
    padded, columns = _padded(experts), _padded(directions)
    rows = _rows_of_a_tile(padded)
    splits = max(1, min(_ceil(tokens, rows), MOMENTS * _multiprocessors(z.device)))
    rows_per_split = _ceil(_ceil(tokens, splits), rows) * rows
    splits = _ceil(tokens, rows_per_split)
    partial = torch.empty(splits, padded, columns, dtype=torch.float32, device=z.device)
    arrays = 1 + sum(weights is not None for weights in (diagonal, rank_one))
    _launch(
        "moment_kernel",
        (splits,),
        z.contiguous(),
        _or(diagonal, z),
        _or(rank_one, z),
        projected.contiguous(),
        partial,
        tokens,
        rows_per_split,
        K=experts,
        J=directions,
        BT=rows,
        BK=padded,
        BJ=columns,
        WEIGHTS=_kind(diagonal, rank_one),
        WIDE=wide,
        num_stages=_stages(rows, arrays * padded + columns),
    )
    return partial.sum(dim=0, dtype=torch.float64)[:experts, :directions]


def weigh(
    z: Tensor,
    diagonal: Tensor | None,
    rank_one: Tensor | None,
    *,
    terms: int,
    like: Tensor,
    shift: Shift | None = None,
) -> tuple[Tensor, Tensor]:
    """Return H (z + shift) in terms, (tokens, terms · padded experts), and sums over tiles."""
    tokens, experts = z.shape
    padded = _padded(experts)
    rows = _rows_of_a_tile(padded)
    tiles = _ceil(tokens, rows)
    u = like.new_empty(tokens, terms * padded)
    sums = torch.empty(tiles, padded, dtype=torch.float32, device=z.device)
    directions = 0 if shift is None else shift.projected.shape[1]
    _launch(
        "weigh_kernel",
        (tiles,),
        z.contiguous(),
        _or(diagonal, z),
        _or(rank_one, z),
        z if shift is None else shift.projected.contiguous(),
        z if shift is None else shift.coefficients.float().contiguous(),
        u,
        sums,
        tokens,
        K=experts,
        J=directions,
        BT=rows,
        BK=padded,
        BM=min(padded, GROUP),
        BJ=_padded(max(directions, 1)),
        TERMS=terms,
        WEIGHTS=_kind(diagonal, rank_one),
        WIDE=like.dtype != torch.bfloat16,
    )
    return u, sums


def _launch_logits(
    x: Tensor,
    v: Tensor,
    weights: str,
    diagonal: Tensor | None,
    rank_one: Tensor | None,
    out: Tensor,
    *,
    terms: Terms,
) -> Tensor:
    """Fill `out`; return Σ u over each tile's tokens, (tiles, padded experts)."""
    descriptor = _descriptor()
    tokens, width = x.shape
    experts = v.shape[0]
    block = min(_padded(experts), FUSED_EXPERTS)
    expert_tiles = _ceil(experts, block)
    tile = logits_tile(block, terms.vector)
    tiles = _ceil(tokens, tile.rows)
    stacked, bias = _stacked(v, expert_tiles * block, terms.vector, like=x)
    sums = torch.empty(tiles, block, dtype=torch.float32, device=x.device)
    _launch(
        "logits_kernel",
        (tiles, expert_tiles),
        descriptor(x, [tile.rows, tile.columns]),
        descriptor(stacked, [block, tile.columns]),
        bias,
        _or(diagonal, bias),
        _or(rank_one, bias),
        out,
        sums,
        tokens,
        width,
        K=experts,
        BT=tile.rows,
        BK=block,
        BM=min(block, GROUP),
        BD=tile.columns,
        V_TERMS=terms.vector,
        CHAINED=min(terms.vector, 2) if block <= GROUP else terms.vector,
        TERMS=terms.weighted,
        PADDED=expert_tiles * block,
        WEIGHTS=weights,
        EARLY=tile.early,
        HAS_BIAS=v.shape[1] > width,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return sums


def _stacked(v: Tensor, rows: int, terms: int, *, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return V's terms stacked, each padded to `rows` experts, and its bias (zeros if none)."""
    experts, columns = v.shape
    width = like.shape[1]
    stacked = like.new_empty(terms * rows, width)
    bias = torch.empty(rows, dtype=torch.float32, device=like.device)
    _launch(
        "split_kernel",
        (rows, _ceil(width, SPLIT_BLOCK)),
        v.double().contiguous(),
        stacked,
        bias,
        width,
        columns,
        K=experts,
        TERMS=terms,
        BLOCK=SPLIT_BLOCK,
    )
    return stacked, bias


def _add_outer(
    out: Tensor,
    u: Tensor,
    x: Tensor,
    sums: Tensor,
    *,
    terms: int,
    factor: float = 1.0,
    square: bool = False,
) -> None:
    """Add `factor` Σ_t u_t [x_t 1]ᵀ to `out`; `sums` are those of u over groups of tokens."""
    descriptor = _descriptor()
    tokens, width = x.shape
    padded = _padded(out.shape[0])
    group = min(padded, GROUP)
    tile = outer_tile(group, terms, square=square)
    slices = _ceil(width, tile.columns)
    groups = padded // group
    filling = _multiprocessors(x.device) // (slices * groups)
    splits = max(1, filling, _ceil(tokens, ROWS_PER_SPLIT[terms]))
    rows = _ceil(_ceil(tokens, splits), tile.rows) * tile.rows
    splits = _ceil(tokens, rows)
    partial = torch.empty(splits, padded, width, dtype=torch.float32, device=x.device)
    _launch(
        "outer_kernel",
        (slices, groups, splits),
        descriptor(u, [tile.rows, 2 * group if tile.stacked else group]),
        descriptor(x, [tile.rows, tile.columns]),
        partial,
        tokens,
        width,
        rows,
        BT=tile.rows,
        BM=group,
        BN=tile.columns,
        BK=padded,
        TERMS=terms,
        STACKED=tile.stacked,
        STRETCH=STRETCH,
        SQUARE=square,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    _add_up(out, partial, sums, factor=factor)


def _add_up(out: Tensor, partial: Tensor, sums: Tensor, *, factor: float) -> None:
    """Add `factor` times the splits' sums to `out`, and `sums` to its bias column."""
    splits, padded, width = partial.shape
    experts, columns = out.shape
    _launch(
        "add_up_kernel",
        (experts, _ceil(width, SUM_BLOCK)),
        partial,
        out,
        splits,
        width,
        columns,
        factor,
        BK=padded,
        BLOCK=SUM_BLOCK,
    )
    if columns > width:
        last = sums[:, :experts].sum(dim=0, dtype=torch.float64)
        out[:, width].add_(last, alpha=factor)


def logits_tile(experts: int, terms: int) -> Tile:
    """Return the fastest tile measured with 64 and 128 experts."""
    few = experts <= GROUP
    if terms == COARSE.vector:
        return Tile(128, 64, 4 if few else 8, 4, early=few)
    if terms == FAST.vector:
        return Tile(128, 64, 8, 3)
    return Tile(128, 64, 8, 2) if few else Tile(64, 64, 4, 2)


def outer_tile(experts: int, terms: int, *, square: bool) -> Tile:
    """Return the fastest tile measured with groups of 64 experts."""
    if terms == ACCURATE.weighted and not square:
        return Tile(32, 128, 4, 4)
    if experts == GROUP and not square:
        return Tile(64, 128, 8, 4, stacked=True)
    return Tile(64, 128, 4, 3)


def _kind(diagonal: Tensor | None, rank_one: Tensor | None) -> str:
    if diagonal is None:
        return "identity"
    if rank_one is None:
        return "diagonal"
    return "softmax" if rank_one is diagonal else "rank_one"


def _rows_of_a_tile(padded: int) -> int:
    """Return the tokens of a (tokens, experts) tile; matrix units need at least 16."""
    return max(16, WEIGHED // padded)


def _stages(rows: int, columns: int) -> int:
    """Return the stages of a loop over (rows, columns) tiles of float32."""
    return min(STAGES, 1 + READ_AHEAD // (4 * rows * columns))


def _padded(experts: int) -> int:
    """Return the next power of two that the matrix units support."""
    return max(16, 1 << (experts - 1).bit_length())


def _ceil(count: int, size: int) -> int:
    return -(-count // size)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return `other` for None: a kernel needs a pointer even if it does not read it."""
    return other if tensor is None else tensor.contiguous()


def _launch(name: str, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    from moemerge.kernels import triton_products

    launch(getattr(triton_products, name), grid, *arguments, **options)


@cache
def _descriptor() -> Any:
    from triton.tools.tensor_descriptor import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        TensorDescriptor,
    )

    return TensorDescriptor.from_tensor


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
