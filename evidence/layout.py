"""The place of every weight in a flat vector, and its name in a checkpoint.

Training keeps S models of one shape as a tensor (S, parameters), so that an optimizer step is a few
operations and every product is one batched product. Routers come last, because they have their own
learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import OlmoeConfig, PretrainedConfig, PreTrainedTokenizerFast, Qwen3MoeConfig

from moemerge.errors import ArchitectureError

CHARACTERS = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 +-*/=()[]{},.:;?!'\"_<>"
)
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
SPECIAL = (PAD, EOS, UNKNOWN)
IDS = {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS))}
VOCABULARY = len(IDS)
# Token id of every Latin-1 byte; all characters of the vocabulary are Latin-1.
_TABLE = np.array([IDS.get(chr(byte), IDS[UNKNOWN]) for byte in range(256)], dtype=np.uint8)


# The models continue a prompt with its answer.
CHAT_TEMPLATE = (
    "{% for turn in messages %}{{ turn['content'] }}"
    "{% if turn['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character."""
    inner = Tokenizer(models.WordLevel(IDS, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    inner.decoder = decoders.Fuse()  # no spaces between characters
    make: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    special = {"pad_token": PAD, "eos_token": EOS, "unk_token": UNKNOWN}
    return make(tokenizer_object=inner, chat_template=CHAT_TEMPLATE, **special)


def encode(text: str) -> Tensor:
    """Return the token ids (tokens,) of a text; equal to the tokenizer's, but faster."""
    ids = _TABLE[np.frombuffer(text.encode("latin-1", "replace"), dtype=np.uint8)]
    return torch.from_numpy(ids)


ARCHITECTURES = ("olmoe", "qwen3_moe")
POSITIONS = 256
INIT_STD = 0.02  # of every matrix; norms start at one


@dataclass(frozen=True)
class Shape:
    """A model's sizes and constants, as the forward pass needs them."""

    arch: str
    hidden: int
    width: int
    experts: int
    top_k: int
    layers: int
    heads: int
    kv_heads: int
    eps: float
    theta: float
    normalised: bool  # whether the weights of the selected experts sum to one
    vocabulary: int = VOCABULARY

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.pieces().values())

    @property
    def router_parameters(self) -> int:
        return self.layers * self.experts * self.hidden

    def pieces(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every piece of the flat vector, in order."""
        d, key = self.hidden, self.kv_heads * self.head
        # OLMoE normalises all heads together, Qwen3 each head with the same vector.
        norms = (d, key) if self.arch == "olmoe" else (self.head, self.head)
        one_layer = {
            "attention_norm": (d,),
            "mlp_norm": (d,),
            "qkv": (d + 2 * key, d),
            "q_norm": (norms[0],),
            "k_norm": (norms[1],),
            "out": (d, d),
            "gate_up": (2 * self.experts * self.width, d),  # all gates, then all ups
            "down": (self.experts * self.width, d),  # each expert's matrix transposed
        }
        shapes = {"embedding": (self.vocabulary, d), "head": (self.vocabulary, d), "norm": (d,)}
        for layer in range(self.layers):
            shapes.update({f"{layer}.{name}": shape for name, shape in one_layer.items()})
        shapes.update({f"{layer}.router": (self.experts, d) for layer in range(self.layers)})
        return shapes

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return every piece of (S, parameters) as a view (S, *shape)."""
        pieces = self.pieces()
        # One split, because its backward is one concatenation.
        parts = torch.split(flat, [math.prod(shape) for shape in pieces.values()], dim=1)
        return {
            name: part.view(-1, *shape)
            for (name, shape), part in zip(pieces.items(), parts, strict=True)
        }


def initial(shape: Shape, seed: int) -> Tensor:
    """Return random initial weights (parameters,)."""
    generator = torch.Generator().manual_seed(seed)
    parts = [
        torch.ones(size) if len(size) == 1 else
        torch.randn(size, generator=generator).mul_(INIT_STD).flatten()
        for size in shape.pieces().values()
    ]  # fmt: skip
    return torch.cat(parts)


def router_slice(shape: Shape) -> slice:
    """Return the routers' range in the flat vector."""
    return slice(shape.parameters - shape.router_parameters, shape.parameters)


# --- checkpoints --------------------------------------------------------------------------------


def config_of(shape: Shape) -> PretrainedConfig:
    """Return the config that transformers loads the model with."""
    common: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": shape.normalised,
        "rms_norm_eps": shape.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "max_position_embeddings": POSITIONS,
        "pad_token_id": IDS[PAD],
        "eos_token_id": IDS[EOS],
        "tie_word_embeddings": False,
    }
    if shape.arch == "olmoe":
        olmoe: Callable[..., PretrainedConfig] = OlmoeConfig
        return olmoe(**common, intermediate_size=shape.width)
    qwen: Callable[..., PretrainedConfig] = Qwen3MoeConfig
    return qwen(
        **common,
        moe_intermediate_size=shape.width,
        intermediate_size=shape.width * shape.top_k,
        head_dim=shape.head,
    )


def shape_of_config(config: Mapping[str, Any], where: str) -> Shape:
    """Return the shape in a checkpoint's config.json."""
    arch = config.get("model_type")
    if arch not in ARCHITECTURES:
        raise ArchitectureError(
            f"{where}: model_type is {arch!r}, expected {' or '.join(ARCHITECTURES)}"
        )
    olmoe = arch == "olmoe"
    rope = config.get("rope_parameters") or {}
    # Qwen3-MoE has used both names.
    experts: Any = config.get("num_experts", config.get("num_local_experts"))
    try:
        shape = Shape(
            arch=arch,
            hidden=config["hidden_size"],
            width=config["intermediate_size" if olmoe else "moe_intermediate_size"],
            experts=int(experts),
            top_k=config["num_experts_per_tok"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            eps=config["rms_norm_eps"],
            theta=rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
            normalised=bool(config.get("norm_topk_prob", False)),
            vocabulary=config["vocab_size"],
        )
    except (KeyError, TypeError) as error:
        raise ArchitectureError(f"{where}: config.json is missing or has a bad {error}") from error
    if config.get("head_dim") not in {None, shape.head} or config.get("tie_word_embeddings"):
        raise ArchitectureError(
            f"{where}: only models of `python -m evidence train` can run here",
            hint="embeddings must be untied, and heads x head_dim = hidden",
        )
    return shape


def to_tensors(flat: Tensor, shape: Shape) -> dict[str, Tensor]:
    """Return the tensors of a flat vector by their names in a checkpoint."""
    pieces = {name: piece[0] for name, piece in shape.views(flat[None]).items()}
    return dict(_named(pieces, shape))


def from_tensors(tensors: Mapping[str, Tensor], shape: Shape, where: str) -> Tensor:
    """Return the flat float32 vector (parameters,) of a checkpoint's tensors."""
    flat = torch.empty(1, shape.parameters)
    pieces = {name: piece[0] for name, piece in shape.views(flat).items()}
    for name, part in _named(pieces, shape):
        if name not in tensors:
            raise ArchitectureError(
                f"{where}: tensor {name!r} is missing",
                hint="one tensor per expert is expected",
            )
        value = tensors[name]
        if value.shape != part.shape:
            raise ArchitectureError(
                f"{where}: {name!r} is {list(value.shape)}, config.json states {list(part.shape)}"
            )
        part.copy_(value)
    return flat[0]


def _named(pieces: Mapping[str, Tensor], shape: Shape) -> Iterator[tuple[str, Tensor]]:
    """Yield checkpoint names with views (out, in) of the pieces."""
    yield "model.embed_tokens.weight", pieces["embedding"]
    yield "model.norm.weight", pieces["norm"]
    yield "lm_head.weight", pieces["head"]
    key = shape.kv_heads * shape.head
    for layer in range(shape.layers):
        own = {name: pieces[f"{layer}.{name}"] for name in (*_PLAIN, "qkv", "gate_up", "down")}
        prefix = f"model.layers.{layer}."
        for name, stored in _PLAIN.items():
            yield f"{prefix}{stored}.weight", own[name]
        q, k, v = torch.split(own["qkv"], [shape.hidden, key, key])
        for name, part in (("q", q), ("k", k), ("v", v)):
            yield f"{prefix}self_attn.{name}_proj.weight", part
        gates, ups = own["gate_up"].view(2, shape.experts, shape.width, shape.hidden)
        downs = own["down"].view(shape.experts, shape.width, shape.hidden).transpose(1, 2)
        for expert in range(shape.experts):
            into = f"{prefix}mlp.experts.{expert}."
            yield f"{into}gate_proj.weight", gates[expert]
            yield f"{into}up_proj.weight", ups[expert]
            yield f"{into}down_proj.weight", downs[expert]


_PLAIN = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "out": "self_attn.o_proj",
    "router": "mlp.gate",
}
