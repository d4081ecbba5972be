"""Which tensors of a checkpoint are quantised, by its config and headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from moemerge.checkpoint.quantised import compressed, fp8, mxfp4
from moemerge.checkpoint.quantised.experts import stack_experts
from moemerge.checkpoint.quantised.tensor import Headers, QuantisedInfo
from moemerge.checkpoint.tensors import TensorInfo
from moemerge.errors import CheckpointError
from moemerge.runtime.dtypes import FLOAT_NAMES, Dtype, parse_dtype

SECTIONS: Final = ("quantization_config", "compression_config")
_DTYPE_KEYS: Final = ("dtype", "torch_dtype")
_SCALES: Final = (
    "_scale_inv",
    ".weight_scale",
    ".weight_zero_point",
    ".weight_g_idx",
    ".weight_shape",
)


@dataclass(frozen=True)
class Quantisation:
    """A checkpoint whose tensors were found to be quantised in a way that is read."""

    method: str
    section: Mapping[str, Any]
    keys: tuple[str, ...]  # where the section stands in the config
    units: Mapping[str, QuantisedInfo]

    @property
    def words(self) -> str:
        """`fp8: float8_e4m3fn in 128 x 128 blocks`."""
        kinds = dict.fromkeys(unit.stored_as for unit in self.units.values())
        return f"{self.method}: {', '.join(kinds)}"


def recognise(
    config: Mapping[str, Any], headers: Headers, read: compressed.ReadShape
) -> Quantisation | None:
    """None for plain floats, and for what is not read: others refuse that by its name."""
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
        tensors = fp8.find(section, headers, dtype)
    elif method == "mxfp4":
        tensors = mxfp4.find(section, headers, dtype)
    else:
        tensors = compressed.find(section, headers, dtype, read)
    units = stack_experts(config, {unit.name: unit for unit in tensors})
    if not units:
        raise CheckpointError(
            f"config.json says that the weights are quantised ({method}), but none of them is",
            hint="remove quantization_config from config.json if the weights are plain floats",
        )
    _require_no_strays(units.values(), headers)
    return Quantisation(str(method), section, keys, units)


def is_readable(section: Mapping[str, Any]) -> bool:
    """Whether a quantization_config is of a kind that is read."""
    method = section.get("quant_method")
    if method != "compressed-tensors":
        return method in ("fp8", "mxfp4")
    changed = section.get("sparsity_config") or section.get("transform_config")
    return section.get("format") in compressed.READABLE and not changed


def without_sections(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as that of a model in plain floats."""
    return {
        key: without_sections(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in SECTIONS
    }


def _keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Where the config says how its weights are quantised, or a nested text config does."""
    for key in SECTIONS:
        if isinstance(config.get(key), Mapping):
            return (key,)
    for name, value in config.items():
        inner = _keys(value) if isinstance(value, Mapping) else ()
        if inner:
            return (name, *inner)
    return ()


def _dtype(config: Mapping[str, Any]) -> Dtype:
    """What quantised tensors are read as: the dtype that the model is to be run in."""
    for section in (config, *(v for v in config.values() if isinstance(v, Mapping))):
        for key in _DTYPE_KEYS:
            name = str(section.get(key)).removeprefix("torch.")
            if name in FLOAT_NAMES:
                return parse_dtype(name)
    return Dtype.BFLOAT16


def _require_no_strays(units: Iterable[QuantisedInfo], headers: Mapping[str, TensorInfo]) -> None:
    """A scale that belongs to no weight means that a weight is missing."""
    used = {part.name for unit in units for part in unit.parts}
    for name in headers:
        if name not in used and name.endswith(_SCALES):
            raise CheckpointError(
                f"there is {name!r}, but no quantised weight that it belongs to",
                hint="its download is incomplete, or weights of two models were mixed",
            )
