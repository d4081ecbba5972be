"""The structure of a checkpoint: role, layer and merge units of each stored tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from moemerge.checkpoint.tensors import TensorInfo
from moemerge.errors import ArchitectureError
from moemerge.families import names
from moemerge.families.families import family_of, family_of_class
from moemerge.families.layout import ExpertLayout, Piece, equal_parts
from moemerge.families.reading import Named, NameReader, find_quantised
from moemerge.families.roles import WHOLE, Role, Unit
from moemerge.families.rules import (
    CONFIG_HINT,
    DEPTH,
    EXPERT_COUNTS,
    MAX_COUNT,
    Family,
    Gate,
    Router,
    key,
    look_up,
)


@dataclass(frozen=True)
class RouterInfo:
    """One router of a checkpoint, by its names on disk."""

    layer: int
    weight: str
    bias: str | None
    selection_bias: str | None
    rows: int  # leading rows that belong to experts
    gate: Gate | None
    served: bool
    reason: str | None  # why it is not calibrated


@dataclass(frozen=True)
class LayerKey:
    """Config keys that depend on the layers; a merge of slices rearranges them."""

    section: tuple[str, ...]  # path in the config: () or ("text_config",)
    count: Mapping[str, int]  # keys of the number of layers, and the count per layer
    lists: tuple[str, ...]  # keys whose value has one entry for each layer
    numbers: tuple[str, ...] = ()  # keys whose value lists layers by number
    leading: tuple[str, ...] = ()  # keys that count leading layers of another kind
    periods: tuple[str, ...] = ()  # keys by which kinds of layers repeat


@dataclass(frozen=True)
class Embeddings:
    """The names on disk of the input embedding and the output head."""

    input: str | None
    head: str | None


_TEXT_SECTIONS = (
    ("text_config",),
    ("thinker_config", "text_config"),
    ("llm_config",),
    ("language_config",),
)
_ZERO_EXPERTS = key("zero_expert_num")  # experts that do nothing but have a logit
_WIDTHS = ("hidden_size", "d_model", "n_embd")
# Lists of layer numbers. Even one with as many entries as the model has layers is not indexed by
# layer.
_INDEX_LISTS = frozenset({"moe_layers", "mlp_only_layers", "ple_layer_ids", "full_attn_idxs"})
_LEADING = ("first_k_dense_replace", "num_dense_layers")
_PERIODS = (
    "decoder_sparse_step",
    "expert_layer_period",
    "attn_layer_period",
    "moe_layer_interval",
    "moe_layer_freq",
    "interleave_moe_layer_step",
)
_BEYOND = "a layer beyond the config's number of layers (multi-token prediction), never run here"


class Architecture:
    """A checkpoint's structure, derived from its config and tensor headers."""

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, TensorInfo],
        *,
        family: Family | None,
        section: tuple[str, ...],
        model_type: str | None,
    ) -> None:
        self.config = config
        self.family = family
        self.model_type = model_type
        self._tensors = tensors
        self._section = section
        self._layout = ExpertLayout.of(family, self.hidden_size, self.num_experts)
        self._reader = NameReader(family, self._layout)
        self._named = self._reader.read_all(tensors)
        if family is not None:
            self._check_against_tensors()

    @classmethod
    def of(cls, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Architecture:
        """Recognise a checkpoint by `model_type` (also in a nested text config) or by class."""
        section, text = _text_section(config)
        outer, inner = (_name(part.get("model_type")) for part in (config, text))
        family = family_of(inner) or family_of(outer) or _family_by_class(config)
        _check_counts(text, family)
        model_type = inner or outer or (family.model_type if family else None)
        return cls(config, tensors, family=family, section=section, model_type=model_type)

    def describes(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> bool:
        """Return whether this is the structure of another model's config and headers."""
        own = self._tensors
        if self.config != config or own.keys() != tensors.keys():
            return False
        return all(own[name].shape == header.shape for name, header in tensors.items())

    def _check_against_tensors(self) -> None:
        """Refuse a config that counts more layers or experts than there are tensors."""
        layers = {named.layer for named in self._named.values() if named.layer is not None}
        if layers and self.num_layers > 1 + max(layers):
            raise ArchitectureError(
                f"config.json counts {self.num_layers} layers, the tensors make {1 + max(layers)}",
                hint=CONFIG_HINT,
            )
        for router in self.routers():
            rows, gate = router.rows, router.gate
            if gate is not None and not 1 <= gate.top_k <= rows:
                raise ArchitectureError(
                    f"config.json: each token goes to {gate.top_k} experts, but "
                    f"{router.weight} has {rows}",
                    hint=CONFIG_HINT,
                )
            counted = self.num_experts
            known = gate is not None and counted is not None and not self._counts_differ
            more = _ZERO_EXPERTS.count(self.text_config)
            if known and counted is not None and not counted <= rows <= counted + more:
                raise ArchitectureError(
                    f"config.json counts {counted} experts, {router.weight} {rows}",
                    hint=CONFIG_HINT,
                )

    @property
    def _counts_differ(self) -> bool:
        """Return whether layers may have different numbers of experts."""
        return any(
            isinstance(look_up(self.text_config, path), list)
            for path in _expert_counts(self.family)
        )

    # --- the model as a whole -----------------------------------------------------------------
    @property
    def text_config(self) -> Mapping[str, Any]:
        """Return the config of the decoder, nested in a multimodal model's config."""
        text: Mapping[str, Any] = self.config
        for part in self._section:
            text = text[part]
        return text

    @property
    def hidden_size(self) -> int | None:
        """Return the width of the hidden states, or None if the config does not state it."""
        for name in _WIDTHS:
            if isinstance(self.text_config.get(name), int):
                return int(self.text_config[name])
        return None

    @cached_property
    def _depth(self) -> dict[str, int]:
        keys = DEPTH if self.family is None else self.family.depth
        return {name: each for name, each in keys if isinstance(self.text_config.get(name), int)}

    @cached_property
    def num_layers(self) -> int:
        """Return the number of decoder layers without multi-token-prediction layers."""
        if self._depth:
            name, each = next(iter(self._depth.items()))
            return int(self.text_config[name]) // each
        for name in ("layers_block_type", "layer_types", "hybrid_override_pattern"):
            kinds = self.text_config.get(name)
            if kinds and isinstance(kinds, list | str):
                return len(kinds)
        return 1 + max((n.layer for n in self._named.values() if n.layer is not None), default=-1)

    @cached_property
    def num_experts(self) -> int | None:
        """Return the (largest) number of routed experts in a layer; None for a dense model."""
        if self.family is None:
            return None
        for path in self.family.expert_counts:
            value = look_up(self.text_config, path)
            if isinstance(value, list) and value:
                return max(int(v) for v in value)
            if isinstance(value, int) and value > 0:
                return value
        return None

    @cached_property
    def layer_key(self) -> LayerKey:
        """Return the config keys that depend on the layers."""
        text = self.text_config
        lists = tuple(
            name
            for name, value in text.items()
            if isinstance(value, (list, str))
            and len(value) == self.num_layers
            and name not in _INDEX_LISTS
            and (isinstance(value, list) or name == "hybrid_override_pattern")
        )
        return LayerKey(
            self._section,
            self._depth,
            lists,
            numbers=tuple(n for n in sorted(_INDEX_LISTS) if isinstance(text.get(n), list)),
            leading=tuple(name for name in _LEADING if isinstance(text.get(name), int)),
            periods=tuple(name for name in _PERIODS if isinstance(text.get(name), int)),
        )

    @cached_property
    def is_moe(self) -> bool:
        """Return whether the checkpoint has experts."""
        return any(n.role is Role.EXPERT for n in self._named.values())

    @cached_property
    def notice(self) -> str | None:
        """Return a notice about an unknown MoE, which is merged tensor by tensor, or None."""
        if self.family is not None or not self.is_moe:
            return None
        return (
            f"unknown MoE architecture {self.model_type!r}: tensors are merged one by one, stacked "
            "experts as one tensor, and its routers cannot be calibrated"
        )

    @cached_property
    def quantised(self) -> str | None:
        """Describe quantised weights of an unsupported format; None for plain floats."""
        return find_quantised((self.config, self.text_config), self._tensors)

    @cached_property
    def tied(self) -> bool:
        """Return whether the output head is the input embedding."""
        for section in (self.text_config, self.config):
            if isinstance(section.get("tie_word_embeddings"), bool):
                return bool(section["tie_word_embeddings"])
        names_ = self.embedding_names()
        return names_.input is not None and names_.head is None

    def embedding_names(self) -> Embeddings:
        """Return the names of the input embedding and the output head."""
        by_role: dict[Role, str] = {}
        for name, named in self._named.items():
            if named.layer is None and named.role in (Role.EMBEDDING, Role.HEAD):
                plain = not any(part in named.rest for part in ("per_layer", "ngram", "wpe"))
                if plain and name.endswith("weight"):
                    by_role.setdefault(named.role, name)
        return Embeddings(by_role.get(Role.EMBEDDING), by_role.get(Role.HEAD))

    # --- one tensor ---------------------------------------------------------------------------
    def units(self, name: str) -> tuple[Unit, ...]:
        """Return the merge units of this tensor. Together they cover it exactly once."""
        named = self._of(name)
        shape = tuple(self._tensors[name].shape)
        pieces: tuple[Piece, ...] | None = None
        if named.layer is not None and named.expert is None:
            pieces = self._layout.pieces(named.rest, shape)
            if pieces is None:
                pieces = equal_parts(self.family, named.rest, shape)
        if pieces is None:
            place = (named.role, named.layer, named.expert, named.projection)
            return (Unit(named.key, name, WHOLE, shape, *place),)
        return tuple(
            Unit(
                self._reader.key(named.layer, piece.rest),
                name,
                piece.slot,
                piece.shape,
                named.role,
                named.layer,
                piece.expert,
                piece.projection,
            )
            for piece in pieces
        )

    @cached_property
    def units_by_tensor(self) -> Mapping[str, tuple[Unit, ...]]:
        return {name: self.units(name) for name in self._tensors}

    @cached_property
    def units_by_key(self) -> Mapping[str, Unit]:
        return {unit.key: unit for units in self.units_by_tensor.values() for unit in units}

    def role(self, name: str) -> Role:
        """Return the tensor's role in the model."""
        return self._of(name).role

    def key(self, name: str) -> str:
        """Return the tensor's name in the family's original spelling, the same in every layout."""
        return self._of(name).key

    def expert_of(self, name: str) -> int | None:
        """Return the expert of a tensor that belongs to one expert alone, or None."""
        return self._of(name).expert

    def layer_of(self, name: str) -> int | None:
        """Return the decoder layer of a tensor, or None."""
        return self._of(name).layer

    def at_layer(self, name: str, layer: int) -> str:
        """Return the tensor's name in another decoder layer; unchanged outside the layers."""
        return name if self._of(name).layer in (layer, None) else names.with_layer(name, layer)

    def is_stack(self, name: str) -> bool:
        """Return whether the tensor holds the projections of several experts."""
        named = self._of(name)
        return named.expert is None and self._layout.is_stack(named.rest)

    def _of(self, name: str) -> Named:
        try:
            return self._named[name]
        except KeyError:
            raise ArchitectureError(
                f"the checkpoint has no tensor {name!r}",
                hint="use only names in the checkpoint's headers",
            ) from None

    # --- routers ------------------------------------------------------------------------------
    def gate(self, layer: int) -> Gate | None:
        """Return the gate of a layer; None if it has no router."""
        for place in self.routers():
            if place.layer == layer:
                return place.gate
        return None

    def routers(self) -> tuple[RouterInfo, ...]:
        """Return every router in the order in which the model runs them."""
        return self._routers

    @cached_property
    def _routers(self) -> tuple[RouterInfo, ...]:
        if self.family is None:
            return ()
        by_rest = {
            (n.layer, n.rest): name for name, n in self._named.items() if n.layer is not None
        }
        layers = sorted({layer for layer, _ in by_rest})
        return tuple(
            self._place(self.family, router, layer, by_rest)
            for layer in layers
            for router in self.family.routers
            if (layer, "." + router.weight) in by_rest
        )

    def _place(
        self,
        family: Family,
        router: Router,
        layer: int,
        by_rest: Mapping[tuple[int, str], str],
    ) -> RouterInfo:
        def neighbour(rest: str | None) -> str | None:
            return by_rest.get((layer, "." + rest)) if rest else None

        weight = by_rest[layer, "." + router.weight]
        shape = self._tensors[weight].shape
        if len(shape) < 2:
            raise ArchitectureError(
                f"{weight} has the shape {tuple(shape)}, expected a matrix", hint=CONFIG_HINT
            )
        rows = int(shape[0])
        if router.real_rows and self.num_experts:
            rows = min(rows, self.num_experts)
        selection_bias = neighbour(router.selection_bias)
        reason = None if family.served else family.reason
        if layer >= self.num_layers:
            reason = _BEYOND
        elif family.passed_over and neighbour(family.passed_over[0]):
            reason = family.passed_over[1]
        return RouterInfo(
            layer=layer,
            weight=weight,
            bias=neighbour(router.bias),
            selection_bias=selection_bias,
            rows=rows,
            gate=family.gate.gate(self.text_config, layer, biased=selection_bias is not None)
            if family.served
            else None,
            served=reason is None,
            reason=reason,
        )


def _text_section(config: Mapping[str, Any]) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    for section in _TEXT_SECTIONS:
        text = look_up(config, ".".join(section))
        if isinstance(text, Mapping) and text:
            return section, text
    return (), config


def _name(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise ArchitectureError(
        f"config.json: model_type is {value!r:.80}, expected a name", hint=CONFIG_HINT
    )


def _expert_counts(family: Family | None) -> tuple[str, ...]:
    return EXPERT_COUNTS if family is None else family.expert_counts


def _check_counts(text: Mapping[str, Any], family: Family | None) -> None:
    """Refuse widths, depths and expert counts that are not whole numbers."""
    names = (*_WIDTHS, *(name for name, _ in DEPTH), *_expert_counts(family))
    for name in names:
        value = look_up(text, name)
        for count in value if isinstance(value, list) else [value]:
            whole = (
                isinstance(count, int) and not isinstance(count, bool) and 0 <= count < MAX_COUNT
            )
            if not whole and (count is not None or isinstance(value, list)):
                raise ArchitectureError(
                    f"config.json: {name} is {value!r:.80}, expected a whole number",
                    hint=CONFIG_HINT,
                )


def _family_by_class(config: Mapping[str, Any]) -> Family | None:
    """Return the family of the config's `architectures`, if it has no model_type."""
    if config.get("model_type"):
        return None
    classes = config.get("architectures")
    named = classes if isinstance(classes, list) else []
    rows = (family_of_class(str(name)) for name in named)
    return next((family for family in rows if family is not None), None)
