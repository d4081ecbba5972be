"""Quantised formats that publishers of models use: FP8, ModelOpt and MXFP4.

FP8 of DeepSeek-V3, Qwen3, GLM and MiniMax (`quant_method: fp8`): `X.weight` holds eight-bit floats,
`X.weight_scale_inv` a factor for each block of `weight_block_size`; without a block size there is
one factor for the whole tensor. Some checkpoints call it `X.scale`, and some round it to powers of
two.

NVIDIA ModelOpt (`quant_method: modelopt`, or a `hf_quant_config.json`). NVFP4: `X.weight` holds two
four-bit floats per byte, `X.weight_scale` an eight-bit float for each 16 of them, and
`X.weight_scale_2` one factor for all scales. FP8: `X.weight_scale` is one number.

MXFP4 of gpt-oss (`quant_method: mxfp4`): `X_blocks` (experts, out, groups, 16) holds two four-bit
floats per byte. `X_scales` (experts, out, groups) holds the exponent of a power of two for each 32
of them. The tensor is X, which transformers stores as (experts, in, out).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from moemerge.checkpoint.quantised.scheme import (
    E4M3,
    E5M2,
    FP4,
    Scheme,
    largest,
    largest_power_of_two,
)
from moemerge.checkpoint.quantised.tensor import (
    DAMAGED_HINT,
    LARGEST_SCALES,
    SMALLEST_SCALES,
    Headers,
    QuantisedInfo,
    count_pair,
    part_of,
    quantised,
    siblings,
)
from moemerge.checkpoint.tensors import TensorInfo
from moemerge.errors import CheckpointError
from moemerge.runtime.dtypes import Dtype
from moemerge.runtime.files import read_object

CODES: Final = {Dtype.FLOAT8_E4M3FN: E4M3, Dtype.FLOAT8_E5M2: E5M2}
_EXPONENTS: Final = (Dtype.UINT8, Dtype.FLOAT8_E8M0FNU)
NVFP4_GROUP: Final = 16


def find_fp8(section: Mapping[str, Any], headers: Headers, dtype: Dtype) -> Iterator[QuantisedInfo]:
    """Yield every tensor in FP8."""
    size = section.get("weight_block_size")
    block = None if size is None else count_pair(size, "weight_block_size")
    powers = section.get("scale_fmt") == "ue8m0"
    for name, info in headers.items():
        inverse = headers.get(f"{name}_scale_inv")
        other = headers.get(f"{name.removesuffix('weight')}scale")
        scales = inverse or (other if name.endswith(".weight") else None)
        if info.dtype in CODES:
            scales = scales or part_of(headers, f"{name}_scale_inv", name, info.dtype)
            scheme = _scheme(info.dtype, scales.dtype, block, powers=powers)
            others = siblings(name, LARGEST_SCALES, headers)
            yield quantised(name, dtype, info.shape, scheme, info, scales, others=others)
        elif scales is not None and (inverse is not None or info.dtype is Dtype.INT8):
            raise CheckpointError(
                f"{name!r} has the scales {scales.name!r}, but is stored as {info.dtype}",
                hint=f"FP8 weights are {' or '.join(map(str, CODES))}; FP4 in bytes is not read",
            )


@cache
def _scheme(codes: Dtype, scales: Dtype, block: tuple[int, int] | None, *, powers: bool) -> Scheme:
    height, width = block if block is not None else (None, None)
    fit = largest_power_of_two if powers or scales in _EXPONENTS else largest
    return Scheme(CODES[codes], height, width, fit, scales)


FILE: Final = "hf_quant_config.json"
READABLE: Final = ("NVFP4", "W4A16_NVFP4", "FP8", "MIXED_PRECISION")
_CODES: Final = (Dtype.UINT8, Dtype.FLOAT8_E4M3FN)


def section_of(folder: Path) -> dict[str, Any]:
    """Return a quantization_config from the file that older versions write instead of it."""
    if not os.path.isfile(folder / FILE):
        return {}
    stated = read_object(folder / FILE, "fetch it again").get("quantization")
    if not isinstance(stated, Mapping):
        return {}
    section = {"quant_method": "modelopt", **stated}
    section["ignore"] = section.pop("exclude_modules", [])
    return {"quantization_config": section}


def find_modelopt(headers: Headers, dtype: Dtype) -> Iterator[QuantisedInfo]:
    """Yield every tensor in ModelOpt's formats."""
    for name, info in headers.items():
        if not name.endswith(".weight") or info.dtype not in _CODES:
            continue
        if info.dtype is Dtype.UINT8:
            yield nvfp4(name, dtype, info, headers, factor=".weight_scale_2", divides=False)
            continue
        scales = part_of(headers, f"{name}_scale", name, info.dtype)
        scheme = Scheme(
            E4M3, None if scales.shape in ((), (1,)) else 1, None, largest, scales.dtype
        )
        others = siblings(name, LARGEST_SCALES, headers)
        yield quantised(name, dtype, info.shape, scheme, info, scales, others=others)


_GROUP_SIZE: Final = 32
_BYTES: Final = _GROUP_SIZE // 2
_BLOCKS: Final = "_blocks"
_FACTORS: Final = "_scales"


def find_mxfp4(headers: Headers, dtype: Dtype) -> Iterator[QuantisedInfo]:
    """Yield every tensor in MXFP4."""
    scheme = Scheme(FP4, 1, _GROUP_SIZE, largest_power_of_two, Dtype.UINT8)
    for name, info in headers.items():
        if name.endswith(_FACTORS) and name.removesuffix(_FACTORS) + _BLOCKS not in headers:
            raise CheckpointError(
                f"there is {name!r}, but no {name.removesuffix(_FACTORS)}{_BLOCKS}"
            )
        if not name.endswith(_BLOCKS):
            continue
        stem = name.removesuffix(_BLOCKS)
        scales = headers.get(stem + _FACTORS)
        if scales is None or stem in headers:
            why = f"but no {stem}{_FACTORS}" if scales is None else f"and also {stem!r} itself"
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
        yield quantised(stem, dtype, shape, scheme, info, scales, transposed=True)


def nvfp4(
    name: str, dtype: Dtype, codes: TensorInfo, headers: Headers, *, factor: str, divides: bool
) -> QuantisedInfo:
    """Return a matrix in NVFP4: two four-bit floats per byte, a scale in FP8 for each 16 of them,
    and one factor for all scales."""
    stem = codes.name.rpartition(".")[0]
    scales = part_of(headers, f"{stem}.weight_scale", codes.name, "NVFP4")
    number = part_of(headers, stem + factor, codes.name, "NVFP4")
    bad = scales if scales.dtype is not Dtype.FLOAT8_E4M3FN else None
    bad = number if number.shape not in ((), (1,)) or number.dtype is not Dtype.FLOAT32 else bad
    bad = codes if codes.dtype is not Dtype.UINT8 or len(codes.shape) != 2 else bad
    if bad is not None:
        raise CheckpointError(
            f"{bad.name!r} is {list(bad.shape)} {bad.dtype}; NVFP4 has a matrix of uint8, scales "
            "in float8_e4m3fn and one factor in float32",
            hint=DAMAGED_HINT,
        )
    shape = (codes.shape[0], codes.shape[1] * 2)
    scheme = Scheme(FP4, 1, NVFP4_GROUP, largest, Dtype.FLOAT8_E4M3FN)
    rest = {"factor": number, "divides": divides}
    others = siblings(codes.name, (*LARGEST_SCALES, *SMALLEST_SCALES), headers)
    return quantised(name, dtype, shape, scheme, codes, scales, others=others, **rest)
