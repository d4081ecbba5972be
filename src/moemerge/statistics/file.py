"""Read saved statistics of one model: a safetensors file with its provenance in the metadata.

A Gram matrix is stored once for all units with the same input, as packed block rows (see
`pack_symmetric`). Fisher values are one tensor per unit. Units are named by their key, which is the
same in every on-disk layout of a model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.safetensors_file import SafetensorsFile
from moemerge.config.documents import StatisticsDocument, parse_document
from moemerge.config.parameters import StatisticsKind
from moemerge.errors import CheckpointError, NumericalError, TokenizerError
from moemerge.families.architecture import Architecture
from moemerge.runtime.dtypes import Dtype
from moemerge.runtime.files import parse_object
from moemerge.runtime.lazy import torch
from moemerge.statistics.provenance import family_name, model_fingerprint, tokenizer_fingerprint

if TYPE_CHECKING:
    from torch import Tensor

# Symmetric matrices are stored at slightly more than half their size, as block rows of the upper
# triangle: rows in blocks, so that packing and unpacking are copies of whole blocks.
PACKED_ROWS = 128  # rows; part of the file format


def packed_size(width: int) -> int:
    """Return the number of elements of a packed (width, width) matrix."""
    return sum(rows * (width - start) for start, rows in _blocks(width))


def pack_symmetric(matrix: Tensor) -> Tensor:
    """Pack a symmetric (n, n) matrix to (packed_size(n),)."""
    width = matrix.shape[0]
    out = torch.empty(packed_size(width), dtype=matrix.dtype, device=matrix.device)
    at = 0
    for start, rows in _blocks(width):
        size = rows * (width - start)
        out[at : at + size].view(rows, width - start).copy_(matrix[start : start + rows, start:])
        at += size
    return out


def unpack_symmetric(packed: Tensor, width: int) -> Tensor:
    """Unpack (packed_size(n),) to (n, n)."""
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
    for start in range(0, width, PACKED_ROWS):
        yield start, min(PACKED_ROWS, width - start)


STATISTICS_FORMAT: Final = (
    "moemerge_statistics"  # the metadata's key; its value is the format's number
)
FORMAT_NUMBER: Final = "1"
_MAKE_AGAIN: Final = "make it again with `moemerge stats`"


@dataclass(frozen=True)
class UnitStatistics:
    """One unit's statistics over its model's own text, in float32; zeros if no token passed it.

    gram: (in, in), the mean of x xᵀ over the tokens that the unit read. activation and power:
    (in,), the mean of |x| and x². fisher: the unit's shape, the mean over all sequences of
    (d loss / d w)² with the summed next-token loss, so it grows with their length; times
    sequences / tokens it is per token. sensitivity: (1,), Σ |W · d loss / d W| over the text.
    """

    values: Tensor
    tokens: int  # that passed this unit
    domain_tokens: int  # all tokens of the model's text
    sequences: int  # in a mean over sequences, without those of one token: they predict nothing


def stored_shape(kind: StatisticsKind, unit: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a unit's statistics in the file."""
    if kind == "fisher" or not unit:
        return unit
    sizes = {"gram": packed_size(unit[-1]), "sensitivity": 1}
    return (sizes.get(kind, unit[-1]),)


@dataclass(frozen=True)
class StoredUnit:
    """The tensor of a unit's statistics in the file."""

    tensor: str
    shape: tuple[int, ...]  # of the unit, (out, in)


class Statistics:
    """An open file of statistics. Reading is thread-safe."""

    def __init__(self, file: SafetensorsFile, content: StatisticsDocument) -> None:
        self._file = file
        self.path: Path = file.path
        self.kind: StatisticsKind = content.kind
        self.provenance = content.provenance
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
        """Read the header. Refuse a truncated file, and one without statistics."""
        path = Path(path)
        if os.path.isdir(path):
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
        """Refuse statistics of another family, shape, model or tokenizer, in this order.

        `name` is the user's name of the model.
        """
        own, stored = f"{name!r} ({checkpoint.label})", self.provenance
        family, units = family_name(architecture), architecture.units_by_key
        wrong = (k for k, u in self.units.items() if k not in units or units[k].shape != u.shape)
        key = next(wrong, None)
        raises: type[CheckpointError] = CheckpointError
        if stored.family != family:
            why = f", of the family {stored.family}, but {own} is {family}"
        elif key is not None and key not in units:
            why = f", which has {key}; {own} has no such tensor"
        elif key is not None:
            shape = list(self.units[key].shape)
            why = f", where {key} is {shape}; in {own} it is {list(units[key].shape)}"
        elif stored.model_fingerprint != model_fingerprint(checkpoint, architecture):
            why = f"; {own} has the same shapes but other weights"
        elif stored.tokenizer_fingerprint not in (
            None,
            tokenizer_fingerprint(checkpoint.tokenizer_folder) or stored.tokenizer_fingerprint,
        ):
            why, raises = f" with another tokenizer than {own} has now", TokenizerError
        else:
            return
        raise raises(
            f"{self.path} holds statistics of {stored.model}{why}",
            hint=f"run `moemerge stats {checkpoint.label} OUT.stats --data FILE` on what is merged",
        )

    def read(
        self, kind: StatisticsKind, unit_key: str, device: torch.device | None = None
    ) -> UnitStatistics | None:
        """Return a unit's statistics, which must be of this kind; None if it has none.

        A Gram matrix is unpacked on `device`.
        """
        if self.kind != kind:
            raise CheckpointError(
                f"{self.path} holds {self.kind} statistics, but {kind} ones are needed",
                hint=f"make them with `moemerge stats MODEL OUT --data FILE --kind {kind}`",
            )
        unit = self.units.get(unit_key)
        if unit is None:
            return None
        values = self._file.read(unit.tensor)
        if kind == "gram":
            packed = values if device is None else values.to(device)
            values = unpack_symmetric(packed, unit.shape[-1])
        elif kind == "fisher":
            values = values.reshape(unit.shape)
        sizes = values.diagonal() if kind == "gram" else values
        if bool((sizes < 0).any()) or (kind == "sensitivity" and not bool(sizes.isfinite().all())):
            raise NumericalError(
                f"{self.path}: {unit.tensor}: a sum of sizes or squares is negative or not finite",
                hint=_MAKE_AGAIN,
            )
        tokens = self.counts[unit.tensor]
        return UnitStatistics(values, tokens, self.provenance.tokens, self.sequences)

    def tokens(self, unit_key: str) -> int | None:
        """Return the number of tokens through this unit; 0 for an expert without tokens."""
        unit = self.units.get(unit_key)
        return None if unit is None else self.counts[unit.tensor]

    def _check_tensors(self) -> None:
        """Refuse a file in which a unit's tensor is missing or has another dtype or size."""
        for key, unit in self.units.items():
            info = self._file.tensors.get(unit.tensor)
            wanted = stored_shape(self.kind, unit.shape)
            fits = info is not None and info.shape == wanted and info.dtype is Dtype.FLOAT32
            if not fits or unit.tensor not in self.counts or not unit.shape:
                raise CheckpointError(
                    f"{self.path}: {unit.tensor} does not hold what {key} needs", hint=_MAKE_AGAIN
                )


def _content(metadata: Mapping[str, str], path: Path) -> StatisticsDocument:
    number = metadata.get(STATISTICS_FORMAT)
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
