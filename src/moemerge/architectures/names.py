"""What a tensor name tells by itself: wrapper, decoder layer, expert, and a general role."""

from __future__ import annotations

import re
from typing import NamedTuple

from moemerge.architectures.roles import Role

# Wrappers that stand before the decoder in one checkpoint and not in another: a base model saved
# without its head, a text model taken out of a multimodal one.
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
    """A name inside the text tower's list of decoder layers."""

    wrap: str
    box: str  # layers, blocks, h
    layer: int
    rest: str  # with its leading dot


def split_layer(name: str) -> LayerName | None:
    """The parts of a decoder layer's tensor name, None for other names."""
    match = _LAYER.match(name)
    if match is None:
        return None
    wrap, box, layer, rest = match.groups()
    return LayerName(wrap, box, int(layer), rest)


def with_layer(name: str, layer: int) -> str:
    """The same name in another decoder layer."""
    match = _LAYER.match(name)
    if match is None:
        return name
    return f"{name[: match.start('layer')]}{layer}{name[match.end('layer') :]}"


def split_expert(rest: str) -> tuple[str, int, str] | None:
    """(`.mlp.experts`, 3, `.up_proj.weight`) of one expert's tensor, None for other names."""
    if "experts." not in rest:
        return None
    match = _EXPERT.match(rest)
    return (match["root"], int(match["expert"]), match["tail"]) if match else None


def without_wrapper(name: str) -> str:
    """A name outside the layers, without what wraps the decoder."""
    return _WRAPPED.sub("", name)


def is_wrapped(name: str) -> bool:
    """Whether a name carries the decoder's own prefix: a checkpoint without any is base-only."""
    return _WRAPPED.match(name) is not None


def is_head(name: str) -> bool:
    """Whether an unwrapped name is the output projection."""
    return _HEAD.match(name) is not None


def tower_name(name: str) -> str | None:
    """The name in a vision or audio tower as a whole model spells it, None for other names."""
    match = _TOWER.match(name)
    return f"model.{name[match.end() :]}" if match else None


def generic_layer_role(rest: str) -> Role:
    """The role of a tensor in a decoder layer by its name alone; a family's row comes first."""
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
    """The role of a tensor outside the layers; `rest` has its leading dot."""
    if is_head(rest[1:]):
        return Role.HEAD
    if _NORM.search(rest):
        return Role.NORM
    return Role.EMBEDDING if _EMBEDDING.match(rest) else Role.OTHER


def looks_like_experts(rest: str) -> bool:
    """Whether an unknown family's tensor belongs to its experts, by name."""
    return _EXPERTS.search(rest) is not None


def looks_like_router(rest: str, shape: tuple[int, ...]) -> bool:
    """Whether an unknown family's tensor is a router, by name and rank."""
    return len(shape) == 2 and _ROUTER.search(rest) is not None
