"""Read a quantised tensor and its scales as floats, rows at a time, write it, and check headers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from moemerge.checkpoint.quantised.scheme import (
    Codes,
    ScaleBlocks,
    ScaleGrid,
    Scheme,
    squares,
)
from moemerge.checkpoint.tensors import RowRange, TensorInfo
from moemerge.errors import CheckpointError
from moemerge.runtime.dtypes import FLOATS, Dtype
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


# Elements that are decoded or encoded at once; in float32 they fit into a core's cache. A GPU is
# faster with more.
_BAND: Final = 2**18
_GPU_BAND: Final = 2**23
WORD_BITS: Final = 32  # of packed codes and zero points

FetchStored = Callable[[str, RowRange | None], "Tensor"]  # a stored tensor, or rows of it


class Written(NamedTuple):
    """Rows of a stored tensor to write from `row` on."""

    name: str
    tensor: Tensor
    row: int


@dataclass
class Rounding:
    """Rounding error of written values: Σ(x − x̂)² and Σx²."""

    error: float = 0.0
    size: float = 0.0
    tensors: int = 0

    def add(self, other: Rounding) -> None:
        self.error += other.error
        self.size += other.size
        self.tensors += other.tensors

    @property
    def relative(self) -> float:
        return math.sqrt(self.error / self.size) if self.size else 0.0


@dataclass(unsafe_hash=True)
class QuantisedInfo(TensorInfo):
    """The header of a quantised tensor, with those of its parts (codes, scales, zeros).

    Shape and dtype are those of the dequantised tensor. A stack has one matrix per row of its
    leading axis. `order` is the group of each column; without it, groups are consecutive columns.
    """

    scheme: Scheme
    codes: TensorInfo
    scales: TensorInfo
    zeros: TensorInfo | None = None
    order: TensorInfo | None = None
    factor: TensorInfo | None = None  # one number that multiplies all scales (NVFP4)
    divides: bool = False  # it divides them instead
    others: tuple[TensorInfo, ...] = field(default=())  # not needed for reading
    stacked: bool = False
    transposed: bool = False  # stored (out, in), read (in, out)

    @property
    def parts(self) -> tuple[TensorInfo, ...]:
        """Return all stored tensors that it consists of."""
        known = (self.codes, self.scales, self.zeros, self.order, self.factor, *self.others)
        return tuple([part for part in known if part is not None])

    @property
    def stored_as(self) -> str:
        return self.scheme.description

    @property
    def matrix(self) -> tuple[int, int]:
        """Return (out, in) of the matrix, or of each in a stack."""
        rows, columns = self.shape[-2:]
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def blocks(self) -> ScaleBlocks:
        return self.scheme.blocks(*self.matrix)

    @property
    def step(self) -> int:
        """Return how many rows must be written together: whole blocks and words of zero points."""
        if self.stacked:
            return 1
        words = 1 if self.zeros is None else _rows_in_a_word(self.zeros, self.scheme.codes)
        return math.lcm(self.blocks.height, words)

    def holds_whole(self, rows: RowRange) -> bool:
        """Return whether these rows can be written without their neighbours."""
        return rows[0] % self.step == 0 and (rows[1] % self.step == 0 or rows[1] == self.rows)

    # --- reading ---

    def read(
        self,
        fetch: FetchStored,
        rows: RowRange | None,
        out: Tensor | None = None,
        codes: FetchStored | None = None,
    ) -> Tensor:
        """Read the tensor, or rows of its leading axis, in its dtype.

        If `out` is on a GPU, so is what `codes` returns, and it is decoded there.
        """
        shape = self.block_shape(rows)
        start, stop = rows if rows is not None else (0, self.rows)
        if out is None:
            out = torch.empty(shape, dtype=self.dtype.torch)
        for matrix, begin, target in self._matrices(fetch, start, stop, out, codes):
            size = _BAND if out.device.type == "cpu" else _GPU_BAND
            for first, last in _bands(begin, begin + len(target), self.matrix[1], 1, size):
                target[first - begin : last - begin] = matrix.decode(first, last)
        return out

    def _matrices(
        self,
        fetch: FetchStored,
        start: int,
        stop: int,
        block: Tensor,
        codes: FetchStored | None = None,
    ) -> Iterator[tuple[_Matrix, int, Tensor]]:
        """Yield each matrix, its first row, and the (out, in) view of its rows in `block`."""
        codes = codes or fetch
        if not self.stacked:
            yield _Matrix(self, fetch, codes), start, block
            return
        for expert in range(start, stop):
            view = block[expert - start]
            yield _Matrix(self, fetch, codes, expert), 0, view.T if self.transposed else view

    # --- writing ---

    def encode(
        self, fetch: FetchStored, block: Tensor, row: int, rounding: Rounding
    ) -> Iterator[Written]:
        """Yield the parts of a float32 tensor for the rows from `row` on.

        Each block uses the scale that the format's tools would choose or its stored one, whichever
        has the smaller error. Unchanged values therefore keep their codes.
        """
        written: dict[str, list[Tensor]] = {}
        for matrix, begin, values in self._matrices(fetch, row, row + len(block), block):
            pieces: dict[str, list[Tensor]] = {}
            height = self.blocks.height if self.stacked else self.step
            for first, last in _bands(begin, begin + len(values), self.matrix[1], height):
                band = values[first - begin : last - begin]
                for name, stored in matrix.encode(band, first, rounding):
                    pieces.setdefault(name, []).append(stored)
            for name, parts in pieces.items():
                whole = torch.cat(parts)
                written.setdefault(name, []).append(whole[None] if self.stacked else whole)
        for part, each in self._written:
            whole = torch.cat(written[part.name])
            shape = (-1, *part.shape[1:]) if part.shape else ()
            yield Written(part.name, whole.reshape(shape), row // each)

    @property
    def _written(self) -> Iterator[tuple[TensorInfo, int]]:
        """Yield the parts that new values change, and the matrix rows per row of each."""
        stacked = self.stacked
        yield self.codes, 1
        yield self.scales, 1 if stacked else self.blocks.height
        if self.zeros is not None:
            yield self.zeros, 1 if stacked else _rows_in_a_word(self.zeros, self.scheme.codes)

    @property
    def kept(self) -> tuple[TensorInfo, ...]:
        """Return the parts that do not depend on the values."""
        return tuple(part for part in (self.order, self.factor, *self.others) if part is not None)


def _bands(start: int, stop: int, columns: int, step: int, size: int = _BAND) -> Iterator[RowRange]:
    """Yield row ranges to process at once, each starting at a multiple of `step`."""
    length = max(1, size // max(1, columns) // step) * step
    first = start
    while first < stop:
        last = min(stop, (first // step) * step + length)
        yield first, last
        first = last


def _rows_in_a_word(zeros: TensorInfo, codes: Codes) -> int:
    return WORD_BITS // codes.bits if zeros.dtype is Dtype.INT32 else 1


@dataclass(frozen=True)
class _Matrix:
    """One (out, in) matrix of a quantised tensor, read and written by rows."""

    info: QuantisedInfo
    fetch: FetchStored
    fetch_codes: FetchStored
    expert: int | None = None
    _read: dict[str, Tensor] = field(default_factory=dict)  # an expert's parts, each read once

    def _part(self, part: TensorInfo, rows: RowRange | None) -> Tensor:
        fetch = self.fetch_codes if part is self.info.codes else self.fetch
        if self.expert is None:
            return fetch(part.name, rows)
        if part.name not in self._read:
            self._read[part.name] = fetch(part.name, (self.expert, self.expert + 1))[0]
        whole = self._read[part.name]
        return whole if rows is None else whole[rows[0] : rows[1]]

    def decode(self, start: int, stop: int) -> Tensor:
        info, blocks = self.info, self.info.blocks
        stored = self._part(info.codes, (start, stop))
        values = info.scheme.codes.decode(stored.reshape(stop - start, -1), blocks.columns)
        grid, device = self.grid(start, stop), values.device
        scales = blocks.for_rows(grid.scale.to(device), start, stop)
        zeros = None
        if grid.zero is not None:
            zeros = blocks.for_rows(grid.zero.to(device), start, stop)
        order = self.order()
        if order is not None:
            order = order.to(device)
            zeros = None if zeros is None else zeros.index_select(1, order)
            return (values if zeros is None else values - zeros) * scales.index_select(1, order)
        if zeros is not None:
            values = values - blocks.spread(zeros)
        blocks.multiply_(values, scales)
        return values

    def order(self) -> Tensor | None:
        """Return the group of every column, or None for consecutive groups."""
        if self.info.order is None:
            return None
        order = self._part(self.info.order, None).to(torch.int64)
        if bool((order == -1).all()):  # allocated but unused
            return None
        blocks = self.info.blocks
        inside = order.clamp(0, blocks.across - 1)
        counts = torch.bincount(inside, minlength=blocks.across)
        if not torch.equal(inside, order) or bool((counts != blocks.width).any()):
            raise CheckpointError(
                f"{self.info.order.name!r} does not assign {blocks.width} columns of "
                f"{self.info.name!r} to each of {blocks.across} groups",
                hint="the file is damaged, or its quantization_config states another group size",
            )
        return order

    def grid(self, start: int, stop: int) -> ScaleGrid:
        """Return scales and zero points of the blocks that contain these rows, (down, across)."""
        info, blocks = self.info, self.info.blocks
        first, last = blocks.rows_of(start, stop)
        stored = self._part(info.scales, (first, last) if blocks.down > 1 else None)
        scales = info.scheme.read_scales(stored.reshape(last - first, blocks.across))
        # Small scales of eight bits round to zero.
        _require_positive(scales, info.scales, zero=info.scales.dtype is Dtype.FLOAT8_E4M3FN)
        return ScaleGrid(self._times_factor(scales), self._zeros(first, last))

    def _times_factor(self, numbers: Tensor, *, inverse: bool = False) -> Tensor:
        """Return the numbers times (or with `inverse` divided by) the tensor's own factor."""
        part = self.info.factor
        if part is None:
            return numbers
        factor = self.fetch(part.name, None).to(torch.float32).reshape(())
        _require_positive(factor, part, zero=False)
        return numbers / factor if self.info.divides is not inverse else numbers * factor

    def _zeros(self, first: int, last: int) -> Tensor | None:
        part = self.info.zeros
        if part is None:
            return None
        codes = self.info.scheme.codes
        each = _rows_in_a_word(part, codes)
        if each == 1:
            stored = self._part(part, (first, last) if part.shape else None)
            return stored.to(torch.float32).reshape(last - first, -1)
        begin = first // each
        words = self._part(part, (begin, -(-last // each)))  # packed down the columns
        zeros = codes.decode(words.T.contiguous(), words.shape[0] * each).T
        return zeros[first - begin * each : last - begin * each].contiguous()

    # --- writing ---

    def encode(
        self, values: Tensor, start: int, rounding: Rounding
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the stored names and values of the parts of rows that start with a block."""
        info, scheme, blocks = self.info, self.info.scheme, self.info.blocks
        values = values.to(torch.float32).contiguous()
        order = self.order()
        place = None if order is None else torch.argsort(order, stable=True)
        if place is not None:
            values = values.index_select(1, place)
        wanted = blocks.gather(values)
        grid = self.grid(start, start + len(values))
        codes, read = scheme.encode(wanted, grid, info.dtype.torch)
        error = squares(read.to(torch.float32) - wanted).sum(dim=-1)
        fitted = scheme.fitted(self._times_factor(wanted, inverse=True))
        fitted = ScaleGrid(self._times_factor(fitted.scale), fitted.zero)
        other, read = scheme.encode(wanted, fitted, info.dtype.torch)
        others_error = squares(read.to(torch.float32) - wanted).sum(dim=-1)
        better = others_error < error  # (down, across)
        codes = torch.where(better[:, :, None], other, codes)
        rounding.error += float(torch.where(better, others_error, error).sum(dtype=torch.float64))
        rounding.size += float(squares(wanted).sum(dtype=torch.float64))
        flat = blocks.scatter(codes, len(values))
        if place is not None:
            flat = torch.empty_like(flat).index_copy_(1, place, flat)
        yield info.codes.name, self._packed(flat)
        scale = torch.where(better, fitted.scale, grid.scale)
        yield info.scales.name, scheme.store_scales(self._times_factor(scale, inverse=True))
        if info.zeros is not None and grid.zero is not None and fitted.zero is not None:
            zero = torch.where(better, fitted.zero, grid.zero)
            yield info.zeros.name, self._packed_zeros(zero)

    def _packed(self, codes: Tensor) -> Tensor:
        """Pack codes (rows, columns) into rows of the stored tensor."""
        part = self.info.codes
        each = part.shape[2:] if self.info.stacked else part.shape[1:]
        width = math.prod(each) * part.dtype.itemsize  # bytes per row
        packed = self.info.scheme.codes.pack(codes)
        if packed.shape[1] < width:
            packed = torch.nn.functional.pad(packed, (0, width - packed.shape[1]))
        return packed.reshape(-1).view(part.dtype.torch).view(len(codes), *each)

    def _packed_zeros(self, zeros: Tensor) -> Tensor:
        """Pack zero points (rows, across) into their stored form."""
        part, codes = self.info.zeros, self.info.scheme.codes
        assert part is not None
        each = _rows_in_a_word(part, codes)
        if each == 1:
            return zeros.to(part.dtype.torch)
        down = -(-len(zeros) // each) * each
        # Pad missing rows with a stored 0.
        raw = (zeros + codes.offset).to(torch.uint8)
        raw = torch.nn.functional.pad(raw, (0, 0, 0, down - len(zeros)))
        words = codes.pack(raw.T).reshape(-1).view(torch.int32)
        return words.view(zeros.shape[1], -1).T.contiguous()


def _require_positive(numbers: Tensor, part: TensorInfo, *, zero: bool) -> None:
    good = (numbers >= 0 if zero else numbers > 0) & numbers.isfinite()
    if not bool(good.all()):
        bad = numbers[~good]
        raise CheckpointError(
            f"{part.name!r} holds {bad.numel()} scales that are not above zero and finite, the "
            f"first is {float(bad[0])}",
            hint="the file is damaged; fetch it again",
        )


# --- checks of headers ----------------------------------------------------------------------------

Headers = Mapping[str, TensorInfo]
_SCALE_DTYPES = (*FLOATS, Dtype.UINT8, Dtype.FLOAT8_E8M0FNU, Dtype.FLOAT8_E4M3FN)
# Static scales of activations; those of the second kind divide.
LARGEST_SCALES: Final = (".input_scale", ".activation_scale", ".k_scale", ".v_scale")
SMALLEST_SCALES: Final = (".input_global_scale",)
DAMAGED_HINT = "the file is damaged, or config.json's quantization_config is another model's"


def count_pair(value: Any, what: str) -> tuple[int, int]:
    """Return the block size that a config states as [128, 128]."""
    if isinstance(value, Sequence) and len(value) == 2 and all(is_count(v) for v in value):
        return int(value[0]), int(value[1])
    raise CheckpointError(
        f"quantization_config: {what} is {value!r}, expected two whole numbers above zero",
        hint="repair config.json, or fetch it again",
    )


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def siblings(name: str, ends: Sequence[str], headers: Headers) -> tuple[TensorInfo, ...]:
    """Return tensors of the same module that belong to a weight."""
    stem = name.rpartition(".")[0]
    return tuple(headers[stem + end] for end in ends if stem + end in headers)


def part_of(headers: Headers, part: str, name: str, kind: object) -> TensorInfo:
    """Return a part without which the tensor `name`, stored as `kind`, cannot be read."""
    if part not in headers:
        raise CheckpointError(
            f"{name!r} is stored as {kind}, but there is no {part}",
            hint="its download is incomplete, or it was saved without its scales",
        )
    return headers[part]


def quantised(
    name: str,
    dtype: Dtype,
    shape: tuple[int, ...],
    scheme: Scheme,
    codes: TensorInfo,
    scales: TensorInfo,
    **rest: Any,
) -> QuantisedInfo:
    """Return a quantised matrix or stack of matrices. Refuse scales that do not fit."""
    if len(shape) not in (2, 3):
        raise CheckpointError(
            f"{codes.name!r} has shape {list(codes.shape)}, expected a matrix or a stack of "
            "matrices",
            hint=DAMAGED_HINT,
        )
    stacked, nbytes = len(shape) == 3, math.prod(shape) * dtype.itemsize
    info = QuantisedInfo(name, dtype, shape, nbytes, scheme, codes, scales, stacked=stacked, **rest)
    blocks = info.blocks
    lead = (info.rows,) if stacked else ()
    fitting = [(*lead, blocks.down, blocks.across)]
    if blocks.across == 1:
        fitting.append((*lead, blocks.down))
    if blocks.across == blocks.down == 1:
        fitting.append(lead)
    if scales.shape not in fitting or scales.dtype not in _SCALE_DTYPES:
        raise CheckpointError(
            f"{scales.name!r} is {list(scales.shape)} {scales.dtype}, but {codes.name!r} "
            f"{list(codes.shape)} as {info.stored_as} needs scales {list(fitting[0])}",
            hint=DAMAGED_HINT,
        )
    return info
