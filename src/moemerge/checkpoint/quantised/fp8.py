"""FP8 as DeepSeek-V3, Qwen3, GLM and MiniMax publish it: `quant_method: fp8`.

`X.weight` holds eight-bit floats, `X.weight_scale_inv` a factor for each block of
`weight_block_size`; without a block size there is one factor for the whole tensor. Some checkpoints
call it `X.scale`, and some round it to powers of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from moemerge.checkpoint.quantised.scheme import E4M3, E5M2, Scheme, largest, largest_power_of_two
from moemerge.checkpoint.quantised.tensor import (
    Headers,
    QuantisedInfo,
    count_pair,
    require_scales,
    siblings,
)
from moemerge.checkpoint.tensors import TensorInfo
from moemerge.errors import CheckpointError
from moemerge.runtime.dtypes import Dtype

CODES: Final = {Dtype.FLOAT8_E4M3FN: E4M3, Dtype.FLOAT8_E5M2: E5M2}
_EXPONENTS: Final = (Dtype.UINT8, Dtype.FLOAT8_E8M0FNU)
_SCALES: Final = ("_scale_inv", ".scale")
_OTHERS: Final = (".activation_scale", ".input_scale")


def find(section: Mapping[str, Any], headers: Headers, dtype: Dtype) -> Iterator[QuantisedInfo]:
    """Yield every tensor in this format."""
    size = section.get("weight_block_size")
    block = None if size is None else count_pair(size, "weight_block_size")
    for name, info in headers.items():
        scales = next((s for s in _scales_of(name) if s in headers), None)
        if info.dtype in CODES:
            if scales is None:
                raise CheckpointError(
                    f"{name!r} is stored as {info.dtype}, but there is no {name}_scale_inv",
                    hint="its download is incomplete, or it was saved without its scales",
                )
            yield _one(info, headers, headers[scales], block, section, dtype)
        elif name + "_scale_inv" in headers or (scales and info.dtype is Dtype.INT8):
            raise CheckpointError(
                f"{name!r} has the scales {scales!r}, but is stored as {info.dtype}",
                hint=f"FP8 weights are {' or '.join(map(str, CODES))}; FP4 in bytes is not read",
            )


def _scales_of(name: str) -> Iterator[str]:
    yield name + _SCALES[0]
    if name.endswith(".weight"):
        yield name.removesuffix(".weight") + _SCALES[1]


def _one(
    info: TensorInfo,
    headers: Headers,
    scales: TensorInfo,
    block: tuple[int, int] | None,
    section: Mapping[str, Any],
    dtype: Dtype,
) -> QuantisedInfo:
    powers = scales.dtype in _EXPONENTS or section.get("scale_fmt") == "ue8m0"
    height, width = block if block is not None else (None, None)
    fit = largest_power_of_two if powers else largest
    scheme = Scheme(CODES[info.dtype], height, width, fit, scales.dtype)
    return require_scales(
        QuantisedInfo(
            info.name,
            dtype,
            info.shape,
            TensorInfo.of(info.name, dtype, info.shape).nbytes,
            scheme,
            codes=info,
            scales=scales,
            others=siblings(info.name, _OTHERS, headers),
            stacked=len(info.shape) == 3,
        )
    )
