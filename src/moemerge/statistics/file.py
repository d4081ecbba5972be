"""Saved statistics of one model: a safetensors file whose metadata tells where they come from.

A Gram is kept once for all units that read the same input, as packed block rows (see `pack`);
Fisher values are one tensor a unit. Units are named by their key, which is the same in every
on-disk layout of a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moemerge.architectures.architecture import Architecture
from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.safetensors_file import SafetensorsFile
from moemerge.config.documents import StatisticsDocument, parse_document
from moemerge.config.parameters import StatisticsKind
from moemerge.errors import CheckpointError, NumericalError
from moemerge.runtime.dtypes import Dtype
from moemerge.runtime.files import parse_object
from moemerge.runtime.lazy import torch
from moemerge.statistics.provenance import Provenance, check_fits

if TYPE_CHECKING:
    from torch import Tensor

# Symmetric matrices are stored at little more than half their size, as block rows of the upper
# triangle: rows in blocks, so that packing and unpacking are copies of whole blocks.
BLOCK = 128  # rows; part of the file format


def packed_size(width: int) -> int:
    """Elements that `pack` makes of a (width, width) matrix."""
    return sum(rows * (width - start) for start, rows in _blocks(width))


def pack(matrix: Tensor) -> Tensor:
    """(n, n), symmetric -> (packed_size(n),)."""
    width = matrix.shape[0]
    out = torch.empty(packed_size(width), dtype=matrix.dtype, device=matrix.device)
    at = 0
    for start, rows in _blocks(width):
        size = rows * (width - start)
        out[at : at + size].view(rows, width - start).copy_(matrix[start : start + rows, start:])
        at += size
    return out


def unpack(packed: Tensor, width: int) -> Tensor:
    """(packed_size(n),) -> (n, n)."""
    out = torch.empty((width, width), dtype=packed.dtype, device=packed.device)
    at = 0
    for start, rows in _blocks(width):
        size = rows * (width - start)
        block = packed[at : at + size].view(rows, width - start)
        out[start : start + rows, start:] = block
        out[start + rows :, start : start + rows] = block[:, rows:].T
        at += size
    return out


def _blocks(width: int) -> Iterator[tuple[int, int]]:
    for start in range(0, width, BLOCK):
        yield start, min(BLOCK, width - start)


Kind = StatisticsKind
FORMAT: Final = "moemerge_statistics"  # the metadata's key; its value is the format's number
FORMAT_NUMBER: Final = "1"
_MAKE_AGAIN: Final = "make it again with `moemerge stats`"


@dataclass(frozen=True)
class Gram:
    """The mean of x xᵀ over the tokens that a unit has read."""

    matrix: Tensor  # (in, in), float32, CPU; zeros where tokens is 0
    tokens: int


@dataclass(frozen=True)
class Fisher:
    """The diagonal of the empirical Fisher information, as a mean over sequences.

    Of every sequence the gradient of its summed next-token loss, -log p(sequence), is squared:
    values = mean over sequences of (d loss / d w)². They grow with the length of the sequences;
    `values * sequences / tokens` is per token, and does not.
    """

    values: Tensor  # the unit's shape (out, in), float32, CPU
    tokens: int  # that passed this unit
    sequences: int  # that the mean is over: all of them, also those that passed it by


@dataclass(frozen=True)
class Activation:
    """The mean of |x|, or of x², over the tokens that a unit has read."""

    values: Tensor  # (in,), float32, CPU; zeros where tokens is 0
    tokens: int


def stored_shape(kind: Kind, unit: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a unit's statistics have in the file."""
    if kind == "fisher" or not unit:
        return unit
    sizes = {"gram": packed_size(unit[-1]), "sensitivity": 1}
    return (sizes.get(kind, unit[-1]),)


@dataclass(frozen=True)
class StoredUnit:
    """Where a unit's statistics lie in the file."""

    tensor: str
    shape: tuple[int, ...]  # of the unit, (out, in)


class Statistics:
    """An open file of statistics. Reading is safe from any thread."""

    def __init__(self, file: SafetensorsFile, content: StatisticsDocument) -> None:
        self._file = file
        self.path: Path = file.path
        self.kind: Kind = content.kind
        self.provenance = Provenance(**content.provenance.model_dump())
        self.units: Mapping[str, StoredUnit] = {
            key: StoredUnit(str(tensor), tuple(map(int, shape)))
            for key, (tensor, shape) in content.units.items()
        }
        self.counts: Mapping[str, int] = content.tokens
        self.sequences = content.sequences
        self.notices: tuple[str, ...] = tuple(content.notices)
        self._check_tensors()

    @classmethod
    def open(cls, path: str | Path) -> Statistics:
        """Read the header; refuses a truncated file, or one that is no file of statistics."""
        path = Path(path)
        if path.is_dir():
            raise CheckpointError(
                f"{path} is a folder, expected a file of statistics", hint=_MAKE_AGAIN
            )
        file = SafetensorsFile(path)
        try:
            return cls(file, _content(file.metadata, path))
        except BaseException:
            file.close()
            raise

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Statistics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Statistics({str(self.path)!r}, {self.kind}, {len(self.units)} units)"

    def check_fits(self, name: str, checkpoint: Checkpoint, architecture: Architecture) -> None:
        """Refuse statistics of another model; `name` is what the user calls the model."""
        shapes = {key: unit.shape for key, unit in self.units.items()}
        check_fits(str(self.path), self.provenance, shapes, name, checkpoint, architecture)

    def gram(self, unit_key: str, device: torch.device | None = None) -> Gram | None:
        """The Gram of a unit's input, on a device; None for a unit that is no linear map of one."""
        self._require("gram")
        unit = self.units.get(unit_key)
        if unit is None:
            return None
        packed = self._file.read(unit.tensor)
        matrix = unpack(packed if device is None else packed.to(device), unit.shape[-1])
        if bool((matrix.diagonal() < 0).any()):
            raise self._damaged(unit, "its diagonal, a mean of squares, is negative")
        return Gram(matrix, self.counts[unit.tensor])

    def fisher(self, unit_key: str) -> Fisher | None:
        """The Fisher values of a unit; None for one that they were not gathered for."""
        self._require("fisher")
        unit = self.units.get(unit_key)
        if unit is None:
            return None
        values = self._file.read(unit.tensor).reshape(unit.shape)
        if bool((values < 0).any()):
            raise self._damaged(unit, "a mean of squares is negative")
        return Fisher(values, self.counts[unit.tensor], self.sequences)

    def activation(self, unit_key: str) -> Activation | None:
        """Mean sizes of a unit's inputs; None for a unit that is no linear map of one."""
        return self._mean("activation", unit_key)

    def power(self, unit_key: str) -> Activation | None:
        """Mean squares of a unit's inputs; None for a unit that is no linear map of one."""
        return self._mean("power", unit_key)

    def _mean(self, kind: Kind, unit_key: str) -> Activation | None:
        self._require(kind)
        unit = self.units.get(unit_key)
        if unit is None:
            return None
        values = self._file.read(unit.tensor)
        if bool((values < 0).any()):
            raise self._damaged(unit, "a mean of sizes or squares is negative")
        return Activation(values, self.counts[unit.tensor])

    def sensitivity(self, unit_key: str) -> float | None:
        """Σ |W · d loss / d W| of a unit over the text; None for one that it was not taken of."""
        self._require("sensitivity")
        unit = self.units.get(unit_key)
        if unit is None:
            return None
        value = float(self._file.read(unit.tensor))
        if not 0 <= value < math.inf:
            raise self._damaged(unit, "a sum of sizes is negative or not finite")
        return value

    def _damaged(self, unit: StoredUnit, reason: str) -> NumericalError:
        return NumericalError(f"{self.path}: {unit.tensor}: {reason}", hint=_MAKE_AGAIN)

    def tokens(self, unit_key: str) -> int | None:
        """Tokens that passed this unit (0: an expert that none was routed to)."""
        unit = self.units.get(unit_key)
        return None if unit is None else self.counts[unit.tensor]

    def _require(self, kind: Kind) -> None:
        if self.kind != kind:
            raise CheckpointError(
                f"{self.path} holds {self.kind} statistics, but {kind} ones are needed",
                hint=f"make them with `moemerge stats MODEL OUT --data FILE --kind {kind}`",
            )

    def _check_tensors(self) -> None:
        """Every unit's tensor is there, in float32, of the size its shape asks for."""
        for key, unit in self.units.items():
            info = self._file.tensors.get(unit.tensor)
            wanted = stored_shape(self.kind, unit.shape)
            fits = info is not None and info.shape == wanted and info.dtype is Dtype.FLOAT32
            if not fits or unit.tensor not in self.counts or not unit.shape:
                raise CheckpointError(
                    f"{self.path}: {unit.tensor} does not hold what {key} needs", hint=_MAKE_AGAIN
                )


def _content(metadata: Mapping[str, str], path: Path) -> StatisticsDocument:
    number = metadata.get(FORMAT)
    if number is None:
        raise CheckpointError(
            f"{path} is a safetensors file, but holds no statistics", hint=_MAKE_AGAIN
        )
    if number != FORMAT_NUMBER:
        raise CheckpointError(
            f"{path} holds statistics in format {number}, this version reads {FORMAT_NUMBER}",
            hint=_MAKE_AGAIN,
        )
    where = f"{path}: the statistics' metadata"
    content = parse_object(metadata.get("content", ""), where, _MAKE_AGAIN)
    return parse_document(StatisticsDocument, content, where, _MAKE_AGAIN)
