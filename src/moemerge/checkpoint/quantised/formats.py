"""Quantised formats that publishers of models use: FP8, ModelOpt, MXFP4 and compressed-tensors.

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

compressed-tensors (`quant_method: compressed-tensors`): FP8 and INT8 are stored in `X.weight`,
packed INT4 and INT8 in the 32-bit words of `X.weight_packed`, NVFP4 in its bytes. `X.weight_scale`
has a scale per tensor, row, group of a row or block; those of NVFP4 are divided by
`X.weight_global_scale`. There may be a `X.weight_zero_point` and, if columns were grouped out of
order, a `X.weight_g_idx`. `config_groups` assigns formats to modules.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from moemerge.checkpoint.quantised.scheme import (
    E4M3,
    E5M2,
    FP4,
    INT8,
    PACKED_INT4,
    PACKED_INT8,
    Codes,
    Scheme,
    asymmetric,
    largest,
    largest_power_of_two,
    symmetric,
)
from moemerge.checkpoint.quantised.tensor import (
    DAMAGED_HINT,
    LARGEST_SCALES,
    SMALLEST_SCALES,
    WORD_BITS,
    Headers,
    QuantisedInfo,
    count_pair,
    is_count,
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


# --- ModelOpt -------------------------------------------------------------------------------------

FILE: Final = "hf_quant_config.json"
READABLE_ALGORITHMS: Final = ("NVFP4", "W4A16_NVFP4", "FP8", "MIXED_PRECISION")
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


# --- MXFP4 and NVFP4 ------------------------------------------------------------------------------

MXFP4_GROUP: Final = 32
_BYTES: Final = MXFP4_GROUP // 2
_BLOCKS: Final = "_blocks"
_FACTORS: Final = "_scales"


def find_mxfp4(headers: Headers, dtype: Dtype) -> Iterator[QuantisedInfo]:
    """Yield every tensor in MXFP4."""
    scheme = Scheme(FP4, 1, MXFP4_GROUP, largest_power_of_two, Dtype.UINT8)
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
        shape = (experts, groups * MXFP4_GROUP, rows)
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


# --- compressed-tensors ---------------------------------------------------------------------------

READABLE_COMPRESSED: Final = (
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "pack-quantized",
    "mixed-precision",
    "nvfp4-pack-quantized",
)
_PACKED: Final = {4: PACKED_INT4, 8: PACKED_INT8}
_PLAIN: Final = {Dtype.FLOAT8_E4M3FN: ("float", E4M3), Dtype.INT8: ("int", INT8)}
_OTHERS: Final = (".weight_shape", *LARGEST_SCALES, ".input_zero_point")

ReadShape = Callable[[str], list[int]]  # the numbers of a small integer tensor


@dataclass(frozen=True)
class _Weights:
    """The weight format of one group of modules in the config."""

    bits: int
    kind: str  # float or int
    symmetric: bool
    height: int | None
    width: int | None

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> _Weights:
        strategy = stated.get("strategy")
        height: int | None = 1
        width: int | None = None
        if strategy == "tensor":
            height = None
        elif strategy == "block":
            height, width = count_pair(stated.get("block_structure"), "block_structure")
        elif strategy in ("group", "tensor_group"):
            width = stated.get("group_size")
        if strategy not in ("tensor", "channel", "group", "tensor_group", "block") or (
            "group" in strategy and not is_count(width)
        ):
            raise CheckpointError(
                f"quantization_config: weights by strategy {strategy!r} with group_size "
                f"{stated.get('group_size')!r} are not read",
                hint="readable: tensor, channel, group (with a group_size) and block",
            )
        kind, bits = str(stated.get("type", "int")), stated.get("num_bits")
        return cls(
            bits if isinstance(bits, int) else 0,
            kind,
            bool(stated.get("symmetric", True)),
            height,
            width,
        )

    def scheme(self, codes: Codes, scales: TensorInfo) -> Scheme:
        fit = symmetric if self.symmetric else asymmetric
        return Scheme(codes, self.height, self.width, fit, scales.dtype)


class _Groups:
    """Assigns weight formats to modules."""

    def __init__(self, section: Mapping[str, Any]) -> None:
        groups = section.get("config_groups")
        if not isinstance(groups, Mapping) or not all(
            isinstance(g, Mapping) for g in groups.values()
        ):
            raise CheckpointError(
                f"quantization_config: config_groups is {str(groups)[:80]}, expected an object of "
                "objects",
                hint="repair config.json, or fetch it again",
            )
        self._patterns: list[tuple[re.Pattern[str], _Weights]] = []
        self._by_class: list[_Weights] = []
        for group in groups.values():
            if isinstance(group.get("weights"), Mapping):
                self._add(group.get("targets") or [], _Weights.of(group["weights"]))

    def _add(self, targets: Any, weights: _Weights) -> None:
        for target in targets:
            if not isinstance(target, str):
                continue
            if target.startswith("re:"):
                try:
                    self._patterns.append((re.compile(target.removeprefix("re:")), weights))
                except re.error as error:
                    raise CheckpointError(
                        f"quantization_config: the target {target!r} is an invalid pattern: {error}"
                    ) from error
            elif "." in target or target.islower():
                self._patterns.append((re.compile(rf"(.*\.)?{re.escape(target)}$"), weights))
            else:
                self._by_class.append(weights)  # `Linear`: modules that no name matches

    def of(self, module: str) -> _Weights:
        for pattern, weights in self._patterns:
            if pattern.match(module):
                return weights
        if self._by_class:
            return self._by_class[0]
        raise CheckpointError(
            f"{module!r} is stored quantised, but no group of quantization_config has it as target",
            hint=DAMAGED_HINT,
        )


def find_compressed(
    section: Mapping[str, Any], headers: Headers, dtype: Dtype, read: ReadShape
) -> Iterator[QuantisedInfo]:
    """Yield every tensor in this format; `read` returns the numbers of a `weight_shape`."""
    groups = _Groups(section)
    for name, info in headers.items():
        stem, _, leaf = name.rpartition(".")
        part = f"{stem}.weight_scale"
        packed = leaf == "weight_packed"
        if packed or (leaf == "weight" and (part in headers or info.dtype in _PLAIN)):
            scales, weights = part_of(headers, part, name, info.dtype), groups.of(stem)
            if packed:
                yield _packed(info, headers, scales, weights, dtype, read)
            else:
                yield _plain(info, headers, scales, weights, dtype)


def _plain(
    info: TensorInfo, headers: Headers, scales: TensorInfo, weights: _Weights, dtype: Dtype
) -> QuantisedInfo:
    kind, codes = _PLAIN.get(info.dtype, ("", INT8))
    if (kind, 8) != (weights.kind, weights.bits):
        raise CheckpointError(
            f"{info.name!r} is stored as {info.dtype}, but quantization_config states "
            f"{weights.kind} of {weights.bits} bits",
            hint=DAMAGED_HINT,
        )
    return _checked(
        info.name, dtype, info.shape, weights.scheme(codes, scales), info, scales, headers
    )


def _packed(
    info: TensorInfo,
    headers: Headers,
    scales: TensorInfo,
    weights: _Weights,
    dtype: Dtype,
    read: ReadShape,
) -> QuantisedInfo:
    stem = info.name.rpartition(".")[0]
    name = f"{stem}.weight"
    if (weights.kind, weights.bits, weights.width) == ("float", 4, NVFP4_GROUP):
        return nvfp4(name, dtype, info, headers, factor=".weight_global_scale", divides=True)
    codes = _PACKED.get(weights.bits)
    if codes is None or weights.kind != "int" or info.dtype is not Dtype.INT32:
        raise CheckpointError(
            f"{info.name!r} is stored as {info.dtype}, {weights.kind} of {weights.bits} bits",
            hint="readable packs: INT4 and INT8 in int32, NVFP4; convert others by their own tool",
        )
    if len(info.shape) != 2:
        raise CheckpointError(f"{info.name!r} has shape {list(info.shape)}, expected a matrix")
    stated = headers.get(f"{stem}.weight_shape")
    if weights.width is not None and len(scales.shape) == 2:
        shape = (info.shape[0], scales.shape[1] * weights.width)
    elif stated is not None:
        shape = _shape(stated, read)
    else:
        shape = (info.shape[0], info.shape[1] * WORD_BITS // codes.bits)
    if info.shape != (shape[0], -(-shape[1] * codes.bits // WORD_BITS)):
        raise CheckpointError(
            f"{info.name!r} is {list(info.shape)}, which is not {shape[0]} x {shape[1]} numbers of "
            f"{codes.bits} bits",
            hint=DAMAGED_HINT,
        )
    if name in headers:
        raise CheckpointError(f"there is {info.name!r} and also {name!r}")
    return _checked(name, dtype, shape, weights.scheme(codes, scales), info, scales, headers)


def _shape(stated: TensorInfo, read: ReadShape) -> tuple[int, int]:
    numbers = read(stated.name) if stated.shape == (2,) else []
    if not numbers or not all(is_count(n) for n in numbers):
        raise CheckpointError(
            f"{stated.name!r} holds {numbers or list(stated.shape)}, expected two whole numbers "
            "above zero",
            hint="the file is damaged; fetch it again",
        )
    return numbers[0], numbers[1]


def _checked(
    name: str,
    dtype: Dtype,
    shape: tuple[int, ...],
    scheme: Scheme,
    info: TensorInfo,
    scales: TensorInfo,
    headers: Headers,
) -> QuantisedInfo:
    """Return the unit with its zero points and groups. Refuse those that do not fit."""
    zeros = next(iter(siblings(info.name, (".weight_zero_point",), headers)), None)
    order = next(iter(siblings(info.name, (".weight_g_idx",), headers)), None)
    others = siblings(info.name, _OTHERS, headers)
    if scheme.fit is symmetric and zeros is not None:  # they are not used
        others, zeros = (*others, zeros), None
    unit = quantised(
        name, dtype, shape, scheme, info, scales, zeros=zeros, order=order, others=others
    )
    blocks = unit.blocks
    if scheme.fit is asymmetric:
        packed = -(-blocks.down * scheme.codes.bits // WORD_BITS), blocks.across
        fitting: list[tuple[Dtype, tuple[int, ...]]] = [(Dtype.INT32, packed)]
        fitting.append((Dtype.INT8, (blocks.down, blocks.across)))
        if blocks.across == 1:
            fitting.append((Dtype.INT8, (blocks.down,)))
        if zeros is None or (zeros.dtype, zeros.shape) not in fitting:
            shown = "none" if zeros is None else f"{list(zeros.shape)} {zeros.dtype}"
            raise CheckpointError(
                f"{unit.name!r} is asymmetric: its weight_zero_point is {shown}, expected "
                f"{list(packed)} int32 or {[blocks.down, blocks.across]} int8",
                hint=DAMAGED_HINT,
            )
    if order is not None and (order.shape != (blocks.columns,) or order.dtype.is_floating_point):
        raise CheckpointError(
            f"{order.name!r} is {list(order.shape)} {order.dtype}, expected a whole number for "
            f"each of {blocks.columns} columns",
            hint=DAMAGED_HINT,
        )
    return unit
