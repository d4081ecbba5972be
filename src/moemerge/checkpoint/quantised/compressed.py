"""The formats of compressed-tensors: `quant_method: compressed-tensors`.

FP8 and INT8 are stored in `X.weight`, packed INT4 and INT8 in the 32-bit words of
`X.weight_packed`, NVFP4 in its bytes. `X.weight_scale` has a scale per tensor, row, group of a row
or block; those of NVFP4 are divided by `X.weight_global_scale`. There may be a
`X.weight_zero_point` and, if columns were grouped out of order, a `X.weight_g_idx`.
`config_groups` assigns formats to modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from moemerge.checkpoint.quantised.formats import NVFP4_GROUP, nvfp4
from moemerge.checkpoint.quantised.scheme import (
    E4M3,
    INT8,
    PACKED_INT4,
    PACKED_INT8,
    Codes,
    Scheme,
    asymmetric,
    symmetric,
)
from moemerge.checkpoint.quantised.tensor import (
    DAMAGED_HINT,
    LARGEST_SCALES,
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

READABLE: Final = (
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


def find(
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
