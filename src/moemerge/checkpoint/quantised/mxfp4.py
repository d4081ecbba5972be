"""MXFP4 as gpt-oss publishes its experts: `quant_method: mxfp4`.

`X_blocks` (experts, out, groups, 16) holds two four-bit floats a byte, `X_scales` (experts, out,
groups) the exponent of a power of two for every 32 of them. The tensor is X, which transformers
keeps as (experts, in, out).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from moemerge.checkpoint.quantised.codes import FP4
from moemerge.checkpoint.quantised.scheme import Scheme, largest_power_of_two
from moemerge.checkpoint.quantised.tensor import Headers, QuantisedInfo, require_scales
from moemerge.checkpoint.tensors import TensorInfo
from moemerge.errors import CheckpointError
from moemerge.runtime.dtypes import Dtype

GROUP: Final = 32
_BYTES: Final = GROUP // 2
BLOCKS: Final = "_blocks"
SCALES: Final = "_scales"


def find(section: Mapping[str, Any], headers: Headers, dtype: Dtype) -> Iterator[QuantisedInfo]:
    """Every tensor that is stored so."""
    scheme = Scheme(FP4, 1, GROUP, largest_power_of_two, Dtype.UINT8)
    for name, info in headers.items():
        if name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS not in headers:
            raise CheckpointError(f"there is {name!r}, but no {name.removesuffix(SCALES)}{BLOCKS}")
        if not name.endswith(BLOCKS):
            continue
        stem = name.removesuffix(BLOCKS)
        scales = headers.get(stem + SCALES)
        if scales is None or stem in headers:
            why = f"but no {stem}{SCALES}" if scales is None else f"and also {stem!r} itself"
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
        shape = (experts, groups * GROUP, rows)
        nbytes = TensorInfo.of(stem, dtype, shape).nbytes
        yield require_scales(
            QuantisedInfo(
                stem, dtype, shape, nbytes, scheme, info, scales, stacked=True, transposed=True
            )
        )
