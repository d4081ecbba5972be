"""Check a config.json against the tensors next to it, without transformers.

A merge copies the config of one input and never builds a model of it. A wrong value would first be
met by whoever loads the result. Importing transformers to try the config takes longer than many
merges, so the sizes that a config states are compared with the tensors' shapes here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from moemerge.checkpoint.tensors import TensorInfo
from moemerge.errors import ArchitectureError
from moemerge.families.architecture import Architecture
from moemerge.families.config_sizes import (
    ATTENTION,
    QUERY_HEADS,
    first_integer,
    size_faults,
)
from moemerge.families.config_values import names, value_faults
from moemerge.families.families import family_of_class
from moemerge.families.opened import OpenModel
from moemerge.families.roles import Role
from moemerge.families.rules import CONFIG_HINT, look_up

# Dense models with the names and shapes of Llama.
DENSE: Final = names("llama mistral qwen2 qwen3 olmo olmo2 olmo3 granite smollm3")
# Model code or shapes depend on these, so models with the same tensors share them.
_STRUCTURE = re.compile(
    r"(hidden_act|activation|activation_function|_heads|_groups|_rank|head_dim|intermediate_size"
    r"|hidden_size|_bias)$"
)
# Flags that add biases, and what has one then.
_BIASES: Final[Mapping[str, tuple[re.Pattern[str], str]]] = {
    "attention_bias": (
        re.compile(r"\.(?:self_attn|self_attention|attention|attn|mixer)(?:\.\d)?\.\w+\.bias$"),
        "projection of the attention",
    ),
    "use_bias": (re.compile(r"_proj\.bias$"), "projection"),
    "lm_head_bias": (re.compile(r"lm_head\.bias$"), "head"),
    "conv_bias": (re.compile(r"\.conv\.\w+\.bias$"), "convolution"),
}
# Tensors of a layer of multi-token prediction that no other layer has.
_PREDICTION = re.compile(r"(^|\.)(eh_proj|enorm|hnorm|shared_head|embed_tokens|mtp\w*)\.")
_SHARED_DOWN = re.compile(
    r"\.(?:shared?_experts?|shared_mlp)\.(?:down_proj|output_linear|w2)\.weight$"
)
_DENSE_DOWN = re.compile(
    r"\.(?:mlp|mlps\.\d|mixer|feed_forward|block_sparse_moe)\.(?:down_proj|w2)\.weight$"
)
_DEPTH_LISTS = ("layer_types", "mlp_layer_types")
_DEPTH_BY_LIST = ("layers_block_type", "layer_types", "hybrid_override_pattern")
_EXPERT_WIDTHS = (
    "moe_intermediate_size",
    "expert_ffn_hidden_size",
    "ffn_config.ffn_hidden_size",
    "intermediate_size",
)
_SHARED_WIDTHS = (
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "share_expert_dim",
)
_SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_DENSE_WIDTHS = (
    "prefix_dense_intermediate_size",
    "dense_intermediate_size",
    "intermediate_size_mlp",
    "ffn_hidden_size",
    "intermediate_size",
)


def check_config(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    where: str,
    *,
    others: Mapping[str, Mapping[str, Any]] | None = None,
    hint: str = CONFIG_HINT,
    like: Architecture | None = None,
) -> None:
    """Raise ArchitectureError if `config` does not fit `tensors`, or differs from `others`.

    `where` names the file in the message. `others` are configs of models with the same tensors, by
    label. Models outside the family table pass. `like` is used if it describes the same model.
    """
    try:
        same = like is not None and like.describes(config, tensors)
        architecture = like if like and same else Architecture.of(config, tensors)
    except ArchitectureError as error:
        raise ArchitectureError(f"{where}: {error.message}", hint=hint) from error
    if architecture.family is None and architecture.model_type not in DENSE:
        return
    fault = next(_faults(architecture, tensors, others or {}), None)
    if fault is not None:
        raise ArchitectureError(f"{where}: {fault}", hint=hint)


def check_model_config(model: OpenModel) -> None:
    """Raise ArchitectureError if the model's config.json does not fit its tensors."""
    checkpoint = model.checkpoint
    config, where = checkpoint.config, str(checkpoint.path / "config.json")
    check_config(config, checkpoint.tensors, where)
    if not isinstance(config.get("model_type"), str):
        raise ArchitectureError(
            f"{where}: model_type is {config.get('model_type')!r:.80}, expected a name",
            hint=CONFIG_HINT,
        )


def _faults(
    architecture: Architecture,
    tensors: Mapping[str, TensorInfo],
    others: Mapping[str, Mapping[str, Any]],
) -> Iterator[str]:
    yield from value_faults(architecture.config, architecture.text_config)
    yield from _class_faults(architecture)
    yield from _dense_faults(architecture, tensors)
    yield from _vocabulary_faults(architecture, tensors)
    yield from _layer_faults(architecture, tensors)
    yield from _expert_faults(architecture)
    yield from _sparsity_faults(architecture)
    yield from _missing_heads(architecture, tensors)
    yield from _bias_faults(architecture, tensors)
    yield from size_faults(architecture, tensors)
    yield from _width_faults(architecture, tensors)
    for label, other in others.items():
        yield from _differences(architecture.config, label, other)


def _vocabulary_faults(
    architecture: Architecture, tensors: Mapping[str, TensorInfo]
) -> Iterator[str]:
    found_names = architecture.embedding_names()
    text, nested = architecture.text_config, architecture.text_config is not architecture.config
    for name in filter(None, (found_names.input, found_names.head)):
        shape = tuple(tensors[name].shape)
        if len(shape) != 2:
            yield f"{name} has the shape {shape}, expected (vocab_size, hidden_size)"
            return
        for key, stated, found in (
            ("vocab_size", text.get("vocab_size"), shape[0]),
            ("hidden_size", architecture.hidden_size, shape[1]),
        ):
            if stated is None and not nested:
                yield f"{key} is missing; {name} makes it {found}"
            elif stated is not None and stated != found:
                yield f"{key} is {stated}, but {name} makes it {found}"


def _expert_faults(architecture: Architecture) -> Iterator[str]:
    """Yield a fault if a model with routers states no number of experts."""
    routers = [router for router in architecture.routers() if router.gate is not None]
    nested = architecture.text_config is not architecture.config
    if routers and architecture.num_experts is None and not nested:
        keys = ", ".join(architecture.family.expert_counts[:3]) if architecture.family else ""
        first = routers[0]
        yield f"the number of experts ({keys}) is missing; {first.weight} has {first.rows}"


def _sparsity_faults(architecture: Architecture) -> Iterator[str]:
    """Compare which layers have experts by the config with those that have a router."""
    text, key = architecture.text_config, architecture.family and architecture.family.dense
    stated = text.get(key) if key else None
    step, dense = 1, stated or ()
    if key == "mlp_only_layers":
        step = text.get("decoder_sparse_step") or 1
        words = f"decoder_sparse_step is {step!r:.80} and {key} is {dense!r:.80}"
    elif key in ("first_k_dense_replace", "num_dense_layers") and key in text:
        if text.get("mlp_layer_types") is not None:
            return
        if stated is None:
            yield f"{key} is null, expected a whole number"
            return
        dense, words = range(stated), f"{key} is {stated}"
        if text.get("moe_layer_freq", 1) != 1:
            return
    else:
        return
    routed = {router.layer for router in architecture.routers()}
    for layer in range(architecture.num_layers):
        expected = (layer + 1) % step == 0 and layer not in dense
        if expected != (layer in routed):
            yield f"{words}, but layer {layer} has {'no' if expected else 'a'} router"
            return


def _class_faults(architecture: Architecture) -> Iterator[str]:
    """Yield a fault if `architectures` names a class of another family."""
    for name in architecture.config.get("architectures") or ():
        family = family_of_class(str(name))
        if family is not None and architecture.family not in (None, family):
            yield f"model_type is {architecture.model_type!r}, but architectures has {name!r:.80}"


def _dense_faults(architecture: Architecture, tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Yield a fault if a family of dense models has experts."""
    expert = next((name for name in tensors if ".experts." in name), None)
    if architecture.family is None and expert is not None:
        yield f"model_type is {architecture.model_type!r}, a dense model, but there is {expert}"


def _layer_faults(architecture: Architecture, tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Check the depth. Only layers of multi-token prediction may follow the last one."""
    text, layers = architecture.text_config, architecture.num_layers
    found = 1 + max((n for n in map(architecture.layer_of, tensors) if n is not None), default=-1)
    counted = architecture.layer_key.count or any(text.get(key) for key in _DEPTH_BY_LIST)
    if not counted and text is architecture.config:
        yield f"the number of layers (num_hidden_layers) is missing; the tensors make it {found}"
    for key in _DEPTH_LISTS:
        if isinstance(text.get(key), list) and len(text[key]) != layers:
            yield f"{key} has {len(text[key])} entries for {layers} layers"
    stated = text.get("num_nextn_predict_layers")
    known = layers + (stated if isinstance(stated, int) else 0)
    parts: dict[int, set[str]] = {}
    for name in tensors if counted and found > known else ():
        if (layer := architecture.layer_of(name)) is not None:
            parts.setdefault(layer, set()).add(name.partition(f".{layer}.")[2])
    for layer, own in sorted(parts.items()):
        predicts = any(map(_PREDICTION.search, own))
        alike = any(own == others for other, others in parts.items() if other != layer)
        if layer >= known and alike and not predicts:
            yield f"the config has {layers} layers, but the tensors have a layer {layer}"


def _bias_faults(architecture: Architecture, tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Yield a fault if the config states biases that are not stored."""
    for key, (pattern, what) in _BIASES.items():
        if architecture.text_config.get(key) is True and not any(map(pattern.search, tensors)):
            yield f"{key} is true, but no {what} has a bias"


def _missing_heads(architecture: Architecture, tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Yield a fault if a model with attention states no number of heads."""
    text = architecture.text_config
    unknown = text is architecture.config and not first_integer(text, QUERY_HEADS)
    if unknown and any(map(ATTENTION.search, tensors)):
        yield f"the number of attention heads ({QUERY_HEADS[0]}) is missing"


def _width_faults(architecture: Architecture, tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Compare the widths of experts and dense layers with the tensors."""
    for name, header in tensors.items():
        if architecture.expert_of(name):
            continue  # the first expert of a layer is enough: all have the same shapes
        layer = architecture.layer_of(name)
        if layer is None or layer >= architecture.num_layers or len(header.shape) < 2:
            continue
        if architecture.role(name) is Role.EXPERT:
            unit = architecture.units(name)[0]
            first = not unit.expert and ".self_attention." not in unit.key
            if first and unit.projection == "down" and len(unit.shape) == 2:
                yield from _width_fault(architecture, _EXPERT_WIDTHS, name, unit.shape[1])
        elif _SHARED_DOWN.search(architecture.key(name)) and len(header.shape) == 2:
            yield from _shared_fault(architecture, name, header.shape[1])
        elif _DENSE_DOWN.search(architecture.key(name)) and len(header.shape) == 2:
            yield from _width_fault(architecture, _DENSE_WIDTHS, name, header.shape[1])


def _width_fault(
    architecture: Architecture, keys: Sequence[str], name: str, found: int
) -> Iterator[str]:
    text = architecture.text_config
    for key in keys:
        stated = look_up(text, key)
        if stated is not None:
            if found not in (stated if isinstance(stated, list) else [stated]):
                yield f"{key} is {stated!r:.80}, but {name} makes it {found}"
            return
    if text is architecture.config:
        yield f"{keys[-1]} is missing; {name} makes it {found}"


def _shared_fault(architecture: Architecture, name: str, found: int) -> Iterator[str]:
    """Compare the width of the shared experts with their stated width or number."""
    text = architecture.text_config
    if "moe_shared_expert_intermediate_size" in text:
        return  # families differ in whether the number of experts multiplies it
    key = next((key for key in (*_SHARED_WIDTHS, *_SHARED_COUNTS) if key in text), None)
    each = first_integer(text, ("moe_intermediate_size", "intermediate_size"))
    stated = text[key] if key else None
    if key is None or isinstance(stated, list) or (key in _SHARED_COUNTS and each is None):
        return
    width = (stated or 0) * (each or 0) if key in _SHARED_COUNTS else stated
    if width != found:
        yield f"{key} is {stated!r:.80}, which makes {width} columns, but {name} has {found}"


def _differences(config: Mapping[str, Any], label: str, other: Mapping[str, Any]) -> Iterator[str]:
    """Yield structural values that differ between models of one type."""
    if config.get("model_type") != other.get("model_type"):
        return
    theirs = dict(_structure(other))
    for name, value in _structure(config):
        if name in theirs and value != theirs[name]:
            yield f"{name} is {value!r:.80}, but {theirs[name]!r:.80} in {label}"


def _structure(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _structure(value, f"{before}{name}.")
        elif value is not None and not isinstance(value, list) and _STRUCTURE.search(name):
            yield before + name, value
