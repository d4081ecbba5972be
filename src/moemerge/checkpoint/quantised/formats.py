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
    LARGEST_SCALES,
    Headers,
    QuantisedInfo,
    count_pair,
    require_scales,
    siblings,
)
from moemerge.errors import CheckpointError
from moemerge.runtime.dtypes import Dtype

CODES: Final = {Dtype.FLOAT8_E4M3FN: E4M3, Dtype.FLOAT8_E5M2: E5M2}
_EXPONENTS: Final = (Dtype.UINT8, Dtype.FLOAT8_E8M0FNU)
_SCALES: Final = ("_scale_inv", ".scale")


def find(section: Mapping[str, Any], headers: Headers, dtype: Dtype) -> Iterator[QuantisedInfo]:
    """Yield every tensor in this format."""
    size = section.get("weight_block_size")
    block = None if size is None else count_pair(size, "weight_block_size")
    powers = section.get("scale_fmt") == "ue8m0"
    schemes: dict[tuple[object, ...], Scheme] = {}  # of each kind of tensor, checked once
    others = LARGEST_SCALES if any(name.endswith(LARGEST_SCALES) for name in headers) else ()
    for name, info in headers.items():
        scales = headers.get(name + _SCALES[0])
        inverse = scales is not None
        if scales is None and name.endswith(".weight"):
            scales = headers.get(name.removesuffix(".weight") + _SCALES[1])
        if info.dtype in CODES:
            if scales is None:
                raise CheckpointError(
                    f"{name!r} is stored as {info.dtype}, but there is no {name}_scale_inv",
                    hint="its download is incomplete, or it was saved without its scales",
                )
            kind = (info.dtype, info.shape, scales.dtype, scales.shape)
            scheme = schemes.get(kind)
            if scheme is None:
                scheme = _scheme(info.dtype, scales.dtype, block, powers=powers)
            quantised = QuantisedInfo(
                name,
                dtype,
                info.shape,
                info.nbytes // info.dtype.itemsize * dtype.itemsize,
                scheme,
                codes=info,
                scales=scales,
                others=siblings(name, others, headers) if others else (),
                stacked=len(info.shape) == 3,
            )
            if kind not in schemes:
                require_scales(quantised)
                schemes[kind] = scheme
            yield quantised
        elif inverse or (scales is not None and info.dtype is Dtype.INT8):
            assert scales is not None
            raise CheckpointError(
                f"{name!r} has the scales {scales.name!r}, but is stored as {info.dtype}",
                hint=f"FP8 weights are {' or '.join(map(str, CODES))}; FP4 in bytes is not read",
            )


def _scheme(codes: Dtype, scales: Dtype, block: tuple[int, int] | None, *, powers: bool) -> Scheme:
    height, width = block if block is not None else (None, None)
    fit = largest_power_of_two if powers or scales in _EXPONENTS else largest
    return Scheme(CODES[codes], height, width, fit, scales)
