"""Find the quantised tensors of a checkpoint from its config and headers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from moemerge.checkpoint.quantised import formats
from moemerge.checkpoint.quantised.scheme import relative_error
from moemerge.checkpoint.quantised.tensor import (
    FetchStored,
    Headers,
    QuantisedInfo,
    Rounding,
    Written,
)
from moemerge.checkpoint.tensors import RowRange, TensorInfo
from moemerge.errors import CheckpointError
from moemerge.runtime.dtypes import FLOAT_NAMES, Dtype, parse_dtype
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


SECTIONS: Final = ("quantization_config", "compression_config")
_DTYPE_KEYS: Final = ("dtype", "torch_dtype")
_SCALES: Final = (
    "_scale_inv",
    ".weight_scale",
    ".weight_scale_2",
    ".weight_global_scale",
    ".weight_zero_point",
    ".weight_g_idx",
    ".weight_shape",
)


@dataclass(frozen=True)
class Quantisation:
    """The quantised tensors of a checkpoint in a supported format."""

    method: str
    section: Mapping[str, Any]
    keys: tuple[str, ...]  # path of the section in the config
    units: Mapping[str, QuantisedInfo]
    stored: frozenset[str]  # names of all parts

    @property
    def coarseness(self) -> str:
        """Describe the rounding error that the model already has."""
        distinct = {id(unit.scheme): unit.scheme for unit in self.units.values()}
        schemes = {scheme.description: scheme for scheme in distinct.values()}
        errors = [f"{name} ({relative_error(scheme):.1%})" for name, scheme in schemes.items()]
        return (
            f"its weights are quantised: {', '.join(errors)}; in brackets the relative error that "
            "such rounding makes in normally distributed weights. Task vectors smaller than that "
            "are noise"
        )


def recognise(
    config: Mapping[str, Any], headers: Headers, read: formats.ReadShape
) -> Quantisation | None:
    """Return the quantised tensors; None for plain floats and unsupported formats."""
    keys = _keys(config)
    section: Any = config
    for key in keys:
        section = section[key]
    if not keys or not is_readable(section):
        return None
    method = section.get("quant_method")
    dtype = _dtype(config)
    tensors: Iterable[QuantisedInfo]
    if method == "fp8":
        tensors = formats.find_fp8(section, headers, dtype)
    elif method == "mxfp4":
        tensors = formats.find_mxfp4(headers, dtype)
    elif method == "modelopt":
        tensors = formats.find_modelopt(headers, dtype)
    else:
        tensors = formats.find_compressed(section, headers, dtype, read)
    units = stack_experts(config, {unit.name: unit for unit in tensors})
    if not units:
        raise CheckpointError(
            f"config.json describes quantised weights ({method}), but none of them is quantised",
            hint="remove quantization_config from config.json if the weights are plain floats",
        )
    stored = frozenset(part.name for unit in units.values() for part in unit.parts)
    _require_no_strays(stored, headers)
    return Quantisation(str(method), section, keys, units, stored)


def is_readable(section: Mapping[str, Any]) -> bool:
    """Return whether a quantization_config describes a supported format."""
    method = section.get("quant_method")
    if method == "modelopt":
        return section.get("quant_algo") in formats.READABLE_ALGORITHMS
    if method != "compressed-tensors":
        return method in ("fp8", "mxfp4")
    changed = section.get("sparsity_config") or section.get("transform_config")
    return section.get("format") in formats.READABLE_COMPRESSED and not changed


def without_sections(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the same model in plain floats."""
    return {
        key: without_sections(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in SECTIONS
    }


def _keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the path of the quantisation section, which may be in a nested text config."""
    for key in SECTIONS:
        if isinstance(config.get(key), Mapping):
            return (key,)
    for name, value in config.items():
        inner = _keys(value) if isinstance(value, Mapping) else ()
        if inner:
            return (name, *inner)
    return ()


def _dtype(config: Mapping[str, Any]) -> Dtype:
    """Return the dtype that quantised tensors are read in: the config's dtype."""
    for section in (config, *(v for v in config.values() if isinstance(v, Mapping))):
        for key in _DTYPE_KEYS:
            name = str(section.get(key)).removeprefix("torch.")
            if name in FLOAT_NAMES:
                return parse_dtype(name)
    return Dtype.BFLOAT16


def _require_no_strays(used: frozenset[str], headers: Iterable[str]) -> None:
    """Refuse a scale without a weight: a weight is missing."""
    for name in headers:
        if name not in used and name.endswith(_SCALES):
            raise CheckpointError(
                f"there is {name!r}, but no quantised weight that it belongs to",
                hint="its download is incomplete, or weights of two models were mixed",
            )


# --- experts that are stored separately but stacked in the model ----------------------------------

# compressed-tensors quantises only matrices, so it stores three per expert of Llama-4. transformers
# has stacks (experts, in, out) with gate and up concatenated.
_STACKING: Final = ("llama4", "llama4_text")  # no set: a config's value may not be hashable
_EXPERT: Final = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_STACKS: Final = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}


@dataclass(unsafe_hash=True)
class QuantisedExperts(QuantisedInfo):
    """A stack (experts, in, out) of matrices that are stored separately."""

    members: tuple[tuple[QuantisedInfo, ...], ...] = ()  # the matrices of each expert

    @property
    def parts(self) -> tuple[TensorInfo, ...]:
        return tuple(part for expert in self.members for one in expert for part in one.parts)

    @property
    def kept(self) -> tuple[TensorInfo, ...]:
        return tuple(part for expert in self.members for one in expert for part in one.kept)

    def read(
        self,
        fetch: FetchStored,
        rows: RowRange | None,
        out: Tensor | None = None,
        codes: FetchStored | None = None,
    ) -> Tensor:
        shape = self.block_shape(rows)
        if out is None:
            out = torch.empty(shape, dtype=self.dtype.torch)
        for one, view in self._views(out, 0 if rows is None else rows[0]):
            matrix = torch.empty(one.shape, dtype=one.dtype.torch, device=out.device)
            view.copy_(one.read(fetch, None, matrix, codes))
        return out

    def encode(
        self, fetch: FetchStored, block: Tensor, row: int, rounding: Rounding
    ) -> Iterator[Written]:
        for one, view in self._views(block, row):
            yield from one.encode(fetch, view, 0, rounding)

    def _views(self, block: Tensor, row: int) -> Iterator[tuple[QuantisedInfo, Tensor]]:
        """Yield every stored matrix of these experts, and its (out, in) view of the block."""
        for stacked, expert in zip(block, self.members[row:], strict=False):
            widths = [one.shape[0] for one in expert]
            for one, part in zip(expert, stacked.split(widths, dim=1), strict=True):
                yield one, part.T


def stack_experts(
    config: Mapping[str, Any], units: Mapping[str, QuantisedInfo]
) -> dict[str, QuantisedInfo]:
    """Return the units, with experts stacked if the model stacks them."""
    text = config.get("text_config")
    sections = (config, text) if isinstance(text, Mapping) else (config,)
    if not any(section.get("model_type") in _STACKING for section in sections):
        return dict(units)
    experts: dict[tuple[str, str], dict[int, QuantisedInfo]] = {}
    rest = {}
    for name, unit in units.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            rest[name] = unit
        else:
            experts.setdefault((match[1], match[3]), {})[int(match[2])] = unit
    for owner in dict.fromkeys(owner for owner, _ in experts):
        for name, projections in _STACKS.items():
            stacks = [experts.get((owner, projection), {}) for projection in projections]
            stack = _stack(f"{owner}.{name}", stacks)
            rest[stack.name] = stack
    return rest


def _stack(name: str, stacks: list[dict[int, QuantisedInfo]]) -> QuantisedExperts:
    count = len(stacks[0])
    shapes = {unit.shape for stack in stacks for unit in stack.values()}
    if not count or any(set(stack) != set(range(count)) for stack in stacks) or len(shapes) != 1:
        raise CheckpointError(
            f"the experts of {name!r} are {[len(stack) for stack in stacks]} matrices of shapes "
            f"{sorted(map(list, shapes))}, expected the same of each",
            hint="an expert is missing: its download is incomplete",
        )
    members = tuple(tuple(stack[expert] for stack in stacks) for expert in range(count))
    first = members[0][0]
    rows, columns = first.shape
    plain = TensorInfo.of(name, first.dtype, (count, columns, rows * len(stacks)))
    return QuantisedExperts(
        name,
        first.dtype,
        plain.shape,
        plain.nbytes,
        first.scheme,
        first.codes,
        first.scales,
        stacked=True,
        transposed=True,
        members=members,
    )
