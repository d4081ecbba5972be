"""Write float tensors as quantised codes and scales."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from moemerge.checkpoint.quantised.tensor import (
    LARGEST_SCALES,
    SMALLEST_SCALES,
    QuantisedInfo,
    Rounding,
    Written,
)
from moemerge.checkpoint.reader import Checkpoint
from moemerge.checkpoint.tensors import RowRange, TensorInfo
from moemerge.checkpoint.writer import CheckpointWriter
from moemerge.errors import NumericalError
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


STATIC_SCALES: Final = LARGEST_SCALES + SMALLEST_SCALES


def round_trip(
    info: QuantisedInfo, source: Checkpoint, block: Tensor, row: int, rounding: Rounding
) -> Tensor:
    """Return rows from `row` on as they are read after they were quantised."""
    written = {part.name: part for part in info.encode(source.stored, block, row, rounding)}

    def fetch(name: str, rows: RowRange | None) -> Tensor:
        part = written.get(name)
        if part is None:
            return source.stored(name, rows)
        return part.tensor if rows is None else part.tensor[rows[0] - part.row : rows[1] - part.row]

    return info.read(fetch, (row, row + len(block)))


class RoundingErrors:
    """Rounding errors by format. Thread-safe."""

    def __init__(self) -> None:
        self.sums: dict[str, Rounding] = {}
        self._lock = threading.Lock()

    def encode(
        self, info: QuantisedInfo, source: Checkpoint, block: Tensor, row: int
    ) -> Iterator[Written]:
        """Yield the parts of a block of rows; `source` is the model with the stored format."""
        rounding = Rounding(tensors=int(row == 0))
        yield from info.encode(source.stored, block, row, rounding)
        self.add({info.stored_as: rounding})

    def add(self, sums: Mapping[str, Rounding]) -> None:
        """Add the errors of another tensor or process."""
        with self._lock:
            for name, rounding in sums.items():
                self.sums.setdefault(name, Rounding()).add(rounding)

    def to_json(self) -> dict[str, Any]:
        """Return, by format, the number of tensors and their √(Σ(x − x̂)² / Σx²)."""
        return {
            name: {"tensors": rounding.tensors, "relative_error": rounding.relative}
            for name, rounding in sorted(self.sums.items())
        }


def _static_scale(part: TensorInfo, source: Checkpoint, models: Sequence[Checkpoint]) -> Tensor:
    """Return a part that does not depend on the weights: the source's.

    A static scale of activations is the widest of all models', so that none clips its inputs.
    """
    stored = source.stored(part.name)
    if part.name.endswith(STATIC_SCALES) and not _zero_points(part, source):
        for model in models:
            other = model.stored(part.name) if _has(model, part) else stored
            widest = torch.minimum if part.name.endswith(SMALLEST_SCALES) else torch.maximum
            stored = widest(stored, other)
    return stored


def _has(model: Checkpoint, part: TensorInfo) -> bool:
    info = model.stored_info(part.name)
    return info is not None and (info.shape, info.dtype) == (part.shape, part.dtype)


def _zero_points(part: TensorInfo, source: Checkpoint) -> bool:
    return source.stored_info(f"{part.name.rpartition('.')[0]}.input_zero_point") is not None


def static_scale_notices(source: Checkpoint, models: Sequence[Checkpoint]) -> list[str]:
    """State where the static scales of activations come from, if the source has any."""
    units = source.quantisation.units.values() if source.quantisation is not None else ()
    static = [p for unit in units for p in unit.kept if p.name.endswith(STATIC_SCALES)]
    if not static:
        return []
    without = [m.label for m in models if not all(_has(m, part) for part in static)]
    if any(_zero_points(part, source) for part in static):
        chosen = f"those of {source.label}, because they have zero points"
    elif without:
        chosen = f"the widest of the models that have them; {', '.join(without)} lacks some"
    else:
        chosen = "the widest of all models"
    return [
        f"{len(static)} static scales of activations are {chosen}. They were not measured on the "
        "merged model: calibrate them again with the format's tool"
    ]


class QuantisingWriter:
    """Writes tensors, some of them in the quantised format of the model they come from.

    `models` are all merged models, for static scales of activations.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        quantised: Mapping[str, tuple[QuantisedInfo, Checkpoint]],
        models: Sequence[Checkpoint] = (),
    ) -> None:
        self._writer = writer
        self._quantised = quantised
        self.errors = RoundingErrors()
        for info, source in quantised.values():
            for part in info.kept:
                stored = _static_scale(part, source, models)
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
