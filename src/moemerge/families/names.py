"""Parse tensor names: wrapper, decoder layer, expert and generic role."""

from __future__ import annotations

import re
from typing import NamedTuple

from moemerge.families.roles import Role

# Prefixes of the decoder that some checkpoints have and others do not: a base model saved without
# its head, or a text model extracted from a multimodal one.
_WRAPPER = r"(?:model|language_model|text_model|transformer|backbone|llm|thinker|gpt_neox)\."
_LAYER = re.compile(
    rf"^(?P<wrap>(?:{_WRAPPER})*)(?P<box>(?:decoder\.)?(?:layers|blocks|h))\.(?P<layer>\d+)"
    r"(?P<rest>\..+)$"
)
_WRAPPED = re.compile(rf"^(?:{_WRAPPER})+")
_HEAD = re.compile(r"^(?:lm_head|head|embed_out|output|unembed)\.")
_TOWER = re.compile(
    r"^(?:model\.)?(?=(?:visual|vision_\w+|audio_\w+|multi_modal_projector|mm_\w+)\.)"
)
_EXPERT = re.compile(r"^(?P<root>\..*?experts)\.(?P<expert>\d+)(?P<tail>\..+)$")

_NORM = re.compile(r"\.(?!norm_attn_norm\.)\w*norm\w*\.|\.ln_\w+\.|\.layer_?norm")
_SHARED = re.compile(r"\.shared?_(?:expert|experts|mlp|expert_gate)\.")
_ROUTER = re.compile(
    r"\.(?:mlp|block_sparse_moe|feed_forward|ffn|moe)\.(?:router|gate)(?:\.\w+)?\.weight$"
)
_EXPERTS = re.compile(r"\.experts\.")
_MLP = re.compile(
    r"\.(?:mlp|mlps|feed_forward|ffn|block_sparse_moe|moe|ff|fc1|fc2)\."
    r"|\.mixer\.(?:up|gate|down)_proj\.|latent_proj\."
)
_ATTENTION = re.compile(
    r"\.(?:self_attn|self_attention|attention|attn|linear_attn|mamba|mixer|conv|cross_attn"
    r"|temporal_block|norm_attn_norm|delta_net|gated_delta_net|short_conv)\."
)
_EMBEDDING = re.compile(
    r"^\.(?:embed_tokens|wte|wpe|word_embeddings|tok_embeddings|embeddings|embed_in"
    r"|embed_tokens_per_layer|embed|ngram_embedding)\."
)


class LayerName(NamedTuple):
    """A tensor name in the text model's list of decoder layers."""

    wrap: str
    box: str  # layers, blocks, h
    layer: int
    rest: str  # with its leading dot


def split_layer(name: str) -> LayerName | None:
    """Split a decoder layer's tensor name; None for other names."""
    match = _LAYER.match(name)
    if match is None:
        return None
    wrap, box, layer, rest = match.groups()
    return LayerName(wrap, box, int(layer), rest)


def with_layer(name: str, layer: int) -> str:
    """Return the same name in another decoder layer."""
    match = _LAYER.match(name)
    if match is None:
        return name
    return f"{name[: match.start('layer')]}{layer}{name[match.end('layer') :]}"


def split_expert(rest: str) -> tuple[str, int, str] | None:
    """Split one expert's name to (`.mlp.experts`, 3, `.up_proj.weight`); None for other names."""
    if "experts." not in rest:
        return None
    match = _EXPERT.match(rest)
    return (match["root"], int(match["expert"]), match["tail"]) if match else None


def without_wrapper(name: str) -> str:
    """Return a name outside the layers without the decoder's prefixes."""
    return _WRAPPED.sub("", name)


def is_wrapped(name: str) -> bool:
    """Return whether a name has the decoder's prefix; no name in a base-only checkpoint has it."""
    return _WRAPPED.match(name) is not None


def is_head(name: str) -> bool:
    """Return whether an unwrapped name is the output projection."""
    return _HEAD.match(name) is not None


def tower_name(name: str) -> str | None:
    """Return the full model's name of a tensor in a vision or audio tower, or None."""
    match = _TOWER.match(name)
    return f"model.{name[match.end() :]}" if match else None


def generic_layer_role(rest: str) -> Role:
    """Return the role of a tensor in a decoder layer by its name; a family's row has precedence."""
    for pattern, role in (
        (_SHARED, Role.SHARED_EXPERT),
        (_NORM, Role.NORM),
        (_MLP, Role.MLP),
        (_ATTENTION, Role.ATTENTION),
    ):
        if pattern.search(rest):
            return role
    return Role.OTHER


def generic_root_role(rest: str) -> Role:
    """Return the role of a tensor outside the layers; `rest` has its leading dot."""
    if is_head(rest[1:]):
        return Role.HEAD
    if _NORM.search(rest):
        return Role.NORM
    return Role.EMBEDDING if _EMBEDDING.match(rest) else Role.OTHER


def looks_like_experts(rest: str) -> bool:
    """Return whether an unknown family's tensor belongs to its experts, by name."""
    return _EXPERTS.search(rest) is not None


def looks_like_router(rest: str, shape: tuple[int, ...]) -> bool:
    """Return whether an unknown family's tensor is a router, by name and number of axes."""
    return len(shape) == 2 and _ROUTER.search(rest) is not None
