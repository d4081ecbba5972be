"""Write float tensors as quantised codes and scales."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moemerge.checkpoint.quantised.tensor import QuantisedInfo, Rounding, Written
from moemerge.checkpoint.reader import Checkpoint
from moemerge.checkpoint.tensors import TensorInfo
from moemerge.checkpoint.writer import CheckpointWriter
from moemerge.errors import NumericalError

if TYPE_CHECKING:
    from torch import Tensor


def stored_tensors(tensors: Sequence[TensorInfo]) -> Iterator[TensorInfo]:
    """Yield the tensors on disk: all parts of quantised tensors, and the others themselves."""
    for info in tensors:
        if isinstance(info, QuantisedInfo):
            yield from info.parts
        else:
            yield info


class RoundingErrors:
    """Rounding errors by format. Thread-safe."""

    def __init__(self) -> None:
        self._sums: dict[str, Rounding] = {}
        self._tensors: Counter[str] = Counter()
        self._lock = threading.Lock()

    def encode(
        self, info: QuantisedInfo, source: Checkpoint, block: Tensor, row: int
    ) -> Iterator[Written]:
        """Yield the parts of a block of rows; `source` is the model with the stored format."""
        rounding = Rounding()
        yield from info.encode(source.stored, block, row, rounding)
        with self._lock:
            total = self._sums.setdefault(info.stored_as, Rounding())
            total.error += rounding.error
            total.size += rounding.size
            self._tensors[info.stored_as] += row == 0

    @property
    def sums(self) -> dict[str, tuple[float, float, int]]:
        """Return, by format, Σ(x − x̂)², Σx² and the number of tensors."""
        return {
            name: (rounding.error, rounding.size, self._tensors[name])
            for name, rounding in self._sums.items()
        }

    def add(self, sums: Mapping[str, tuple[float, float, int]]) -> None:
        """Add the sums of another process."""
        for name, (error, size, tensors) in sums.items():
            total = self._sums.setdefault(name, Rounding())
            total.error += error
            total.size += size
            self._tensors[name] += tensors

    def to_json(self) -> dict[str, Any]:
        """Return, by format, the number of tensors and their √(Σ(x − x̂)² / Σx²)."""
        return {
            name: {"tensors": self._tensors[name], "relative_error": rounding.relative}
            for name, rounding in sorted(self._sums.items())
        }


class QuantisingWriter:
    """Writes tensors, some of them in the quantised format of the model they come from."""

    def __init__(
        self, writer: CheckpointWriter, quantised: Mapping[str, tuple[QuantisedInfo, Checkpoint]]
    ) -> None:
        self._writer = writer
        self._quantised = quantised
        self.errors = RoundingErrors()
        for info, source in quantised.values():
            for part in info.kept:
                stored = source.stored(part.name)
                if not bool(stored.float().isfinite().all()):
                    raise NumericalError(
                        f"{source.label}: {part.name} holds non-finite values (NaN or infinity)",
                        hint="repair that model, or leave `requantize` out",
                    )
                writer.write(part.name, stored)

    def write(self, name: str, tensor: Tensor, row: int = 0) -> None:
        """Write like `CheckpointWriter`; rows of a quantised tensor must be multiples of `step`."""
        if name not in self._quantised:
            self._writer.write(name, tensor, row)
            return
        info, source = self._quantised[name]
        for part in self.errors.encode(info, source, tensor, row):
            self._writer.write(part.name, part.tensor, part.row)
