"""MXFP4 as gpt-oss publishes its experts: `quant_method: mxfp4`.

`X_blocks` (experts, out, groups, 16) holds two four-bit floats per byte. `X_scales` (experts, out,
groups) holds the exponent of a power of two for each 32 of them. The tensor is X, which
transformers stores as (experts, in, out).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from moemerge.checkpoint.quantised.scheme import FP4, Scheme, largest_power_of_two
from moemerge.checkpoint.quantised.tensor import Headers, QuantisedInfo, require_scales
from moemerge.checkpoint.tensors import TensorInfo
from moemerge.errors import CheckpointError
from moemerge.runtime.dtypes import Dtype

_GROUP_SIZE: Final = 32
_BYTES: Final = _GROUP_SIZE // 2
_BLOCKS: Final = "_blocks"
_SCALES: Final = "_scales"


def find(section: Mapping[str, Any], headers: Headers, dtype: Dtype) -> Iterator[QuantisedInfo]:
    """Yield every tensor in this format."""
    scheme = Scheme(FP4, 1, _GROUP_SIZE, largest_power_of_two, Dtype.UINT8)
    for name, info in headers.items():
        if name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS not in headers:
            raise CheckpointError(
                f"there is {name!r}, but no {name.removesuffix(_SCALES)}{_BLOCKS}"
            )
        if not name.endswith(_BLOCKS):
            continue
        stem = name.removesuffix(_BLOCKS)
        scales = headers.get(stem + _SCALES)
        if scales is None or stem in headers:
            why = f"but no {stem}{_SCALES}" if scales is None else f"and also {stem!r} itself"
            raise CheckpointError(
                f"there is {name!r}, {why}", hint="its download is incomplete, or two were mixed"
            )
        if info.dtype is not Dtype.UINT8 or len(info.shape) != 4 or info.shape[3] != _BYTES:
            raise CheckpointError(
                f"{name!r} is {list(info.shape)} {info.dtype}, expected (experts, out, groups, "
                f"{_BYTES}) uint8",
                hint="the file is damaged, or its quantization_config is another model's",
            )
        experts, rows, groups, _ = info.shape
        shape = (experts, groups * _GROUP_SIZE, rows)
        nbytes = TensorInfo.of(stem, dtype, shape).nbytes
        yield require_scales(
            QuantisedInfo(
                stem, dtype, shape, nbytes, scheme, info, scales, stacked=True, transposed=True
            )
        )
