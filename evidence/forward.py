"""The forward pass of OLMoE and Qwen3-MoE for S models at once, as batched products.

The results equal those of transformers up to rounding. All experts are computed densely and masked
by the routing weights, which is faster than a sparse path at this size.
Letters in shapes: S models, B sequences, L tokens of each, N = B·L, d hidden, H heads, h head size,
E experts, w their width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from evidence.layout import Shape

Weights = Mapping[str, Tensor]
Rotation = tuple[Tensor, Tensor]  # cosines and sines, each (..., L, 1, h)


@dataclass(frozen=True)
class Routing:
    """The routing of one layer."""

    probabilities: Tensor  # (S, N, E)
    chosen: Tensor  # (S, N, E), one if the expert is selected

    def balance(self, counted: Tensor) -> Tensor:
        """Return the load-balancing loss (S,) over tokens weighted by `counted` (S, N, 1)."""
        tokens = counted.sum(1)  # (S, 1)
        share = (self.chosen * counted).sum(1) / tokens  # (S, E)
        mean = (self.probabilities * counted).sum(1) / tokens
        return self.chosen.shape[-1] * (share * mean).sum(-1)


@dataclass(frozen=True)
class Cache:
    """The KV cache of all layers."""

    keys: list[Tensor]  # each (S, B, H of keys, columns, h)
    values: list[Tensor]

    def add(self, layer: int, column: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the columns of a layer, and return all its columns so far."""
        end = column + k.shape[3]
        keys, values = self.keys[layer], self.values[layer]
        keys[..., column:end, :] = k
        values[..., column:end, :] = v
        return keys[..., :end, :], values[..., :end, :]


def rotation(positions: Tensor, shape: Shape) -> Rotation:
    """Return the rotary embedding of positions (..., L)."""
    steps = torch.arange(0, shape.head, 2, dtype=torch.float32, device=positions.device)
    angles = positions[..., None].float() / shape.theta ** (steps / shape.head)
    angles = torch.cat([angles, angles], dim=-1)[..., None, :]  # (..., L, 1, h)
    return angles.cos(), angles.sin()


def prepare(flat: Tensor, shape: Shape, inner: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the weights (S, parameters) in the form that the forward pass needs.

    The weight of a norm is folded into the matrix that follows it. `inner` is the dtype inside
    attention and experts.
    """
    pieces = shape.views(flat)
    weights = {"embedding": pieces["embedding"], "head": pieces["head"] * pieces["norm"][:, None]}
    for layer in range(shape.layers):
        own = {name: pieces[f"{layer}.{name}"] for name in _LAYER}
        before, behind = own["attention_norm"][:, None], own["mlp_norm"][:, None]
        gate, up = (own["gate_up"] * behind).to(inner).chunk(2, dim=1)
        ready = {
            "qkv": own["qkv"] * before,
            "q_norm": own["q_norm"],
            "k_norm": own["k_norm"],
            "out": own["out"],
            "router": own["router"] * behind,
            "gate": gate,
            "up": up,
            "down": own["down"].to(inner),
        }
        weights.update({f"{layer}.{name}": value for name, value in ready.items()})
    # (E, E·w), one if a neuron belongs to an expert. The product with it repeats an expert's weight
    # for its neurons. Forward and backward are faster than broadcasting.
    owners = torch.eye(shape.experts, device=flat.device, dtype=inner)
    weights["owners"] = owners.repeat_interleave(shape.width, dim=1)
    return weights


def hidden_states(
    weights: Weights,
    tokens: Tensor,
    shape: Shape,
    rotated: Rotation,
    mask: Tensor | None = None,
    *,
    cache: Cache | None = None,
    column: int = 0,
    places: Tensor | None = None,
) -> tuple[Tensor, list[Routing]]:
    """Return the final hidden states (S, N, d) of tokens (S, B, L), and every layer's routing.

    `mask` is added to the attention scores (S, B, H, L, columns); the default is causal. With a
    cache, the tokens are its columns from `column` on. With `places`, only these of the N tokens
    are computed and returned, and no token may attend to the others.
    """
    tokens_used = tokens.flatten(1) if places is None else tokens.flatten(1)[:, places]
    # A one-hot product instead of a lookup, because its backward is deterministic on a GPU.
    vocabulary = torch.arange(shape.vocabulary, device=tokens.device)
    hot = (tokens_used[..., None] == vocabulary).to(weights["embedding"].dtype)
    x = hot @ weights["embedding"]  # (S, N, d)
    inner = weights["owners"].dtype
    routings = []
    for layer in range(shape.layers):
        own = {name: weights[f"{layer}.{name}"] for name in _PREPARED}
        qkv = _spread(_unit(x, shape) @ own["qkv"].mT, tokens.shape, places)
        q, k, v = _heads(own, qkv, shape, rotated)
        if cache is not None:
            k, v = cache.add(layer, column, k, v)
        read = _attend(q, k, v, mask, inner)
        read = read if places is None else read[:, places]
        x = x + read @ own["out"].mT
        normed = _unit(x, shape)
        routing, mixture = _route(normed, own["router"], shape)
        active = mixture.to(inner) @ weights["owners"]  # (S, N, E·w)
        x = x + _experts(own, normed.to(inner), active).to(x.dtype)
        routings.append(routing)
    return _unit(x, shape), routings


def logits(weights: Weights, hidden: Tensor) -> Tensor:
    """(S, N, d) -> (S, N, V)."""
    return hidden @ weights["head"].mT


def _unit(x: Tensor, shape: Shape) -> Tensor:
    return rms_norm(x, x.shape[-1:], eps=shape.eps)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis; x is (S, ..., n) and weight (S, n)."""
    between = (1,) * (x.dim() - 2)
    return rms_norm(x, x.shape[-1:], eps=eps) * weight.view(len(weight), *between, -1)


def _spread(x: Tensor, size: torch.Size, places: Tensor | None) -> Tensor:
    """Scatter (S, computed tokens, n) to (S, B, L, n), with zeros elsewhere."""
    if places is not None:
        x = x.new_zeros(size[0], size[1] * size[2], x.shape[-1]).index_copy(1, places, x)
    return x.view(*size, -1)


def _heads(
    own: Weights, qkv: Tensor, shape: Shape, rotated: Rotation
) -> tuple[Tensor, Tensor, Tensor]:
    """Split (S, B, L, ...) into queries, keys and values, each (S, B, heads, L, h)."""
    size, key = qkv.shape[:3], shape.kv_heads * shape.head
    q, k, v = torch.split(qkv, [shape.hidden, key, key], dim=-1)
    if shape.arch == "olmoe":
        q, k = _norm(q, own["q_norm"], shape.eps), _norm(k, own["k_norm"], shape.eps)
    q, k, v = (part.view(*size, -1, shape.head) for part in (q, k, v))  # (S, B, L, heads, h)
    if shape.arch != "olmoe":
        q, k = _norm(q, own["q_norm"], shape.eps), _norm(k, own["k_norm"], shape.eps)
    q, k = _rotate(q, rotated), _rotate(k, rotated)
    return q.transpose(2, 3), k.transpose(2, 3), v.transpose(2, 3)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, inner: torch.dtype) -> Tensor:
    """Return the attention output (S, B·L, d)."""
    shared = q.shape[2] // k.shape[2]
    if shared > 1:
        k, v = k.repeat_interleave(shared, dim=2), v.repeat_interleave(shared, dim=2)
    size = (q.shape[0], q.shape[1] * q.shape[3], -1)
    q, k, v = (part.flatten(0, 1).to(inner) for part in (q, k, v))  # (S·B, H, L, h)
    if mask is not None:
        mask = mask.expand(size[0], *mask.shape[-4:]).flatten(0, 1)
    read = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return read.transpose(1, 2).reshape(size).to(torch.float32)


def _rotate(x: Tensor, rotated: Rotation) -> Tensor:
    one, other = x.chunk(2, dim=-1)
    return x * rotated[0] + torch.cat([-other, one], dim=-1) * rotated[1]


def _route(x: Tensor, router: Tensor, shape: Shape) -> tuple[Routing, Tensor]:
    """Return the routing of x (S, N, d) and the experts' weights (S, N, E), zero if unselected."""
    probabilities = (x @ router.mT).softmax(-1)
    chosen = _largest(probabilities.detach(), shape.top_k)
    mixture = probabilities * chosen
    if shape.normalised:
        mixture = mixture / mixture.sum(-1, keepdim=True)
    return Routing(probabilities, chosen), mixture


def _largest(values: Tensor, count: int) -> Tensor:
    """Return one at the `count` largest values of the last axis, zero elsewhere.

    On a GPU, repeated `argmax` is faster than `topk` for an axis this short.
    """
    chosen = torch.zeros_like(values)
    for _ in range(count):
        best = values.argmax(-1, keepdim=True)
        chosen = chosen.scatter(-1, best, 1.0)
        values = values.scatter(-1, best, -1.0)  # below every probability
    return chosen


def _experts(own: Weights, x: Tensor, active: Tensor) -> Tensor:
    """Return the output of all experts for x (S, N, d), weighted per neuron by `active`."""
    units = silu(x @ own["gate"].mT) * (x @ own["up"].mT) * active
    return units @ own["down"]


_LAYER = (
    "attention_norm",
    "mlp_norm",
    "qkv",
    "q_norm",
    "k_norm",
    "out",
    "gate_up",
    "down",
    "router",
)
_PREPARED = ("qkv", "q_norm", "k_norm", "out", "router", "gate", "up", "down")
