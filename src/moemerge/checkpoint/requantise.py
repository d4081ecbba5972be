"""Writing quantised tensors: floats come in, rows of codes and scales go out."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moemerge.checkpoint.quantised.tensor import QuantisedInfo, Rounding, Written
from moemerge.checkpoint.reader import Checkpoint
from moemerge.checkpoint.tensors import TensorInfo
from moemerge.checkpoint.writer import CheckpointWriter

if TYPE_CHECKING:
    from torch import Tensor


def stored_tensors(tensors: Sequence[TensorInfo]) -> Iterator[TensorInfo]:
    """What lies on disk of tensors: all parts of those that are quantised."""
    for info in tensors:
        if isinstance(info, QuantisedInfo):
            yield from info.parts
        else:
            yield info


class RoundingErrors:
    """How far values moved, by what they are stored as. Used by many threads at once."""

    def __init__(self) -> None:
        self._sums: dict[str, Rounding] = {}
        self._tensors: Counter[str] = Counter()
        self._lock = threading.Lock()

    def encode(
        self, info: QuantisedInfo, source: Checkpoint, block: Tensor, row: int
    ) -> Iterator[Written]:
        """The parts of a block of rows; `source` is the model that stores the tensor so."""
        rounding = Rounding()
        yield from info.encode(source.stored, block, row, rounding)
        with self._lock:
            total = self._sums.setdefault(info.stored_as, Rounding())
            total.error += rounding.error
            total.size += rounding.size
            self._tensors[info.stored_as] += row == 0

    @property
    def sums(self) -> dict[str, tuple[float, float, int]]:
        """By format: Σ(x − x̂)², Σx², and tensors."""
        return {
            words: (rounding.error, rounding.size, self._tensors[words])
            for words, rounding in self._sums.items()
        }

    def add(self, sums: Mapping[str, tuple[float, float, int]]) -> None:
        """What another process has written."""
        for words, (error, size, tensors) in sums.items():
            total = self._sums.setdefault(words, Rounding())
            total.error += error
            total.size += size
            self._tensors[words] += tensors

    def to_json(self) -> dict[str, Any]:
        """By format: how many tensors, and √(Σ(x − x̂)² / Σx²) over all of them."""
        return {
            words: {"tensors": self._tensors[words], "relative_error": rounding.relative}
            for words, rounding in sorted(self._sums.items())
        }


class QuantisingWriter:
    """A writer of tensors, some of which are stored quantised as in the model they come from."""

    def __init__(
        self, writer: CheckpointWriter, quantised: Mapping[str, tuple[QuantisedInfo, Checkpoint]]
    ) -> None:
        self._writer = writer
        self._quantised = quantised
        self.errors = RoundingErrors()
        for info, source in quantised.values():
            for part in info.kept:
                writer.write(part.name, source.stored(part.name))

    def write(self, name: str, tensor: Tensor, row: int = 0) -> None:
        """As `CheckpointWriter.write`; rows of a quantised tensor are multiples of its `step`."""
        if name not in self._quantised:
            self._writer.write(name, tensor, row)
            return
        info, source = self._quantised[name]
        for part in self.errors.encode(info, source, tensor, row):
            self._writer.write(part.name, part.tensor, part.row)
