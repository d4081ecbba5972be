"""What the formats ask of headers before they believe them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moemerge.checkpoint.quantised.tensor import QuantisedInfo
from moemerge.checkpoint.tensors import TensorInfo
from moemerge.errors import CheckpointError
from moemerge.runtime.dtypes import FLOATS, Dtype

Headers = Mapping[str, TensorInfo]
_SCALE_DTYPES = (*FLOATS, Dtype.UINT8, Dtype.FLOAT8_E8M0FNU)
HINT = "the file is damaged, or config.json's quantization_config is another model's"


def count_pair(value: Any, what: str) -> tuple[int, int]:
    """[128, 128], as a config states the size of a block."""
    if isinstance(value, Sequence) and len(value) == 2 and all(is_count(v) for v in value):
        return int(value[0]), int(value[1])
    raise CheckpointError(
        f"quantization_config: {what} is {value!r}, expected two whole numbers above zero",
        hint="repair config.json, or fetch it again",
    )


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def siblings(name: str, ends: Sequence[str], headers: Headers) -> tuple[TensorInfo, ...]:
    """Tensors of the same module that go with a weight."""
    stem = name.rpartition(".")[0]
    return tuple(headers[stem + end] for end in ends if stem + end in headers)


def require_scales(info: QuantisedInfo) -> QuantisedInfo:
    """The tensor, once its scales are known to fit it."""
    if len(info.shape) != (3 if info.stacked else 2):
        raise CheckpointError(
            f"{info.codes.name!r} has shape {list(info.codes.shape)}, expected a matrix or a stack "
            "of matrices",
            hint=HINT,
        )
    cells = info.cells
    lead = (info.rows,) if info.stacked else ()
    fitting = [(*lead, cells.down, cells.across)]
    if cells.across == 1:
        fitting.append((*lead, cells.down))
    if cells.across == cells.down == 1:
        fitting.append(lead)
    if info.scales.shape not in fitting or info.scales.dtype not in _SCALE_DTYPES:
        raise CheckpointError(
            f"{info.scales.name!r} is {list(info.scales.shape)} {info.scales.dtype}, but "
            f"{info.codes.name!r} {list(info.codes.shape)} as {info.stored_as} needs scales "
            f"{list(fitting[0])}",
            hint=HINT,
        )
    return info
