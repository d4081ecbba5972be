"""Read roles, layers and layout-independent keys from stored names, and find quantised weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from moemerge.checkpoint.tensors import TensorInfo
from moemerge.families import names
from moemerge.families.layout import ExpertLayout
from moemerge.families.roles import Role
from moemerge.families.rules import Family
from moemerge.runtime.dtypes import Dtype


class Named(NamedTuple):
    """The parsed name of a stored tensor."""

    key: str
    rest: str  # relative to the layer (or to the decoder), original spelling, with leading dot
    role: Role
    layer: int | None = None
    expert: int | None = None
    projection: str | None = None


class NameReader:
    """Parses the names of one checkpoint by its family's row or by generic patterns."""

    def __init__(self, family: Family | None, layout: ExpertLayout) -> None:
        self.family = family
        self._layout = layout
        self._renamed: dict[tuple[str, bool], str] = {}
        self._experts: dict[str, tuple[str, int, str | None] | None] = {}
        self._base_only = False
        self._spelled = "layers"

    def read_all(self, tensors: Mapping[str, TensorInfo]) -> dict[str, Named]:
        """Parse every tensor's name. Two tensors never share a key."""
        self._base_only = not any(names.is_wrapped(name) for name in tensors)
        self._spelled = next(
            (place.box for place in map(names.split_layer, tensors) if place is not None), "layers"
        )
        read = {name: self._read(name, tuple(header.shape)) for name, header in tensors.items()}
        seen: dict[str, str] = {}
        for name, named in list(read.items()):
            other = seen.setdefault(named.key, name)
            if other != name:  # tensors with one key would overwrite each other: use their names
                for clash in (name, other):
                    old = read[clash]
                    read[clash] = Named(clash, old.rest, old.role, old.layer)
        return read

    def _read(self, name: str, shape: tuple[int, ...]) -> Named:
        place = names.split_layer(name)
        if place is None:
            return self._read_root(name)
        box = self._box(place.box)
        one = self._one_expert(place.rest)
        if one is not None:
            rest, expert, projection = one
            return Named(
                f"{box}.{place.layer}{rest}", rest, Role.EXPERT, place.layer, expert, projection
            )
        rest = self._rename(place.rest)
        role = self._layer_role(rest, shape)
        return Named(f"{box}.{place.layer}{rest}", rest, role, place.layer)

    def _one_expert(self, rest: str) -> tuple[str, int, str | None] | None:
        """Return original spelling, number and projection of one expert's tensor, or None.

        Cached, because every layer has the same hundreds of names.
        """
        if rest not in self._experts:
            one = self._layout.split_expert(rest)
            if one is None:
                self._experts[rest] = None
            else:
                root, expert, tail = one
                spelled, projection = self._layout.one_expert(self._rename(root + tail), expert)
                self._experts[rest] = spelled, expert, projection
        return self._experts[rest]

    def _read_root(self, name: str) -> Named:
        if (tower := names.tower_name(name)) is not None:
            return Named(tower, "." + name, Role.OTHER)
        bare = names.without_wrapper(name)
        rest = self._rename("." + bare, root=True)
        role = names.generic_root_role(rest)
        if names.split_expert(rest) is not None:  # a layer outside the decoder: multi-token heads
            role = Role.EXPERT
        wrapped = bare != name or self._base_only
        if role is Role.HEAD:
            return Named(rest[1:], rest, role)
        prefix = self._box("").rpartition(".")[0]
        return Named(f"{prefix}{rest}" if wrapped and prefix else rest[1:], rest, role)

    def _box(self, spelled: str) -> str:
        """Return the original name of the layer list; `spelled` is this checkpoint's name."""
        if self.family is not None:
            return self.family.container
        if not spelled:
            spelled = self._spelled
        return f"transformer.{spelled}" if spelled in ("h", "blocks") else f"model.{spelled}"

    def key(self, layer: int | None, rest: str) -> str:
        """Return the key of a name relative to a layer."""
        return f"{self._box('')}.{layer}{rest}"

    def _rename(self, rest: str, *, root: bool = False) -> str:
        """Return the original spelling of a name. Cached: few names repeat over all layers."""
        known = self._renamed.get((rest, root))
        if known is not None:
            return known
        renamed = rest
        if self.family is not None:
            rules = self.family.root_renames if root else self.family.renames
            for old, new in rules:
                if new not in renamed or old not in new:
                    renamed = renamed.replace(old, new)
        self._renamed[rest, root] = renamed
        return renamed

    def _layer_role(self, rest: str, shape: tuple[int, ...]) -> Role:
        if self._layout.is_stack(rest) or rest in self._layout.tables:
            return Role.EXPERT
        if self.family is None:
            if names.looks_like_router(rest, shape):
                return Role.ROUTER
            if names.looks_like_experts(rest):
                return Role.EXPERT
            return names.generic_layer_role(rest)
        return self._family_role(self.family, rest[1:]) or names.generic_layer_role(rest)

    @staticmethod
    def _family_role(family: Family, name: str) -> Role | None:
        for router in family.routers:
            if name == router.weight:
                return Role.ROUTER
            if name == router.bias:
                return Role.ROUTER_BIAS
            if name == router.selection_bias:
                return Role.SELECTION_BIAS
            if name.startswith(router.extra):
                return Role.ROUTER
        return Role.SHARED_EXPERT if name.startswith(family.shared) else None


_CODES = {dtype for dtype in Dtype if str(dtype).startswith(("float8", "float4"))}
_QUANTISED_ENDS = {
    "_blocks": "MXFP4 blocks",
    "weight_scale_inv": "block-scaled weights",
    "weight_scale": "scaled weights",
    ".qweight": "packed integer weights (GPTQ or AWQ)",
    "weight_packed": "packed weights",
    ".quant_map": "bitsandbytes, four bits",
    ".SCB": "bitsandbytes, int8",
}
_NAMES = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "gguf": "GGUF",
}
# How to get floats, or a format that is read.
_WAYS_OUT = {
    "bitsandbytes": "load it with transformers, call `model.dequantize()` and `save_pretrained`",
    "awq": "convert it with compressed-tensors' `convert_checkpoint`, whose packed INT4 is read",
}


def way_out(description: str) -> str | None:
    """Return how a model with these quantised weights can be used; None if unknown."""
    known = [name for name in _NAMES if name in description.lower()]
    own = [_WAYS_OUT[name] for name in known if name in _WAYS_OUT]
    original = "use the unquantised original, which its model card names as base_model"
    return "; or ".join([original, *own]) if known else None


def find_quantised(
    configs: Iterable[Mapping[str, Any]], tensors: Mapping[str, TensorInfo]
) -> str | None:
    """Describe signs of quantised weights in configs and headers; None for plain floats."""
    for config in configs:
        section = config.get("quantization_config")
        if isinstance(section, Mapping):
            return f"quantization_config: {_describe_method(section)}"
    ends = tuple(_QUANTISED_ENDS)
    for name, header in tensors.items():
        if header.dtype in _CODES:
            return f"{header.dtype} tensors ({name})"
        if name.endswith(ends):
            end = next(end for end in _QUANTISED_ENDS if name.endswith(end))
            return f"{_QUANTISED_ENDS[end]} ({name})"
    return None


def _describe_method(section: Mapping[str, Any]) -> str:
    """Return the method's name, with the formats of a method that has several."""
    sparsity = section.get("sparsity_config")
    named = [
        section.get("format"),
        sparsity.get("format") if isinstance(sparsity, Mapping) else None,
    ]
    method = str(section.get("quant_method", "unnamed method"))
    if section.get("load_in_8bit"):
        method += " int8"
    return ", ".join([method, *(name for name in named if isinstance(name, str))])
