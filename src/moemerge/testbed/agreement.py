"""Whether two small models send the same tokens to the same experts, by running both whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass(frozen=True)
class RoutingAgreement:
    """How a model's routing differs from another's on the same text, over all layers."""

    mismatch: float  # share of the reference's expert choices that the model does not make
    any_mismatch: float  # share of tokens with a mismatch in at least one layer
    kl: float  # mean KL(reference ‖ model) of the routing distributions


def compare_routing(model: Path, reference: Path, text: Path) -> RoutingAgreement:
    """Run both models over `text` (one row at a time, no padding) and compare every choice."""
    rows = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    ours, theirs = _routing(model, rows), _routing(reference, rows)
    top_k = ours.top_k
    kl = torch.stack(
        [
            (r.log_softmax(-1).exp() * (r.log_softmax(-1) - z.log_softmax(-1))).sum(-1)
            for z, r in zip(ours.logits, theirs.logits, strict=True)
        ]
    )  # (layers, tokens)
    missed = torch.stack(
        [
            1 - (_mask(z, top_k) & _mask(r, top_k)).sum(-1) / top_k
            for z, r in zip(ours.logits, theirs.logits, strict=True)
        ]
    )  # (layers, tokens)
    return RoutingAgreement(
        mismatch=float(missed.mean()),
        any_mismatch=float((missed > 0).any(0).double().mean()),
        kl=float(kl.mean()),
    )


@dataclass(frozen=True)
class _Routing:
    top_k: int
    logits: list[Tensor]  # per layer, (tokens, experts)


def _routing(folder: Path, rows: list[str]) -> _Routing:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen: list[list[Tensor]] = []
    gates = [layer.mlp.gate for layer in model.model.layers]
    for gate in gates:
        seen.append([])
        gate.register_forward_hook(_recorder(seen[-1]))
    with torch.inference_mode():
        for row in rows:
            model(**tokenizer(row, return_tensors="pt", return_token_type_ids=False))
    return _Routing(model.config.num_experts_per_tok, [torch.cat(z) for z in seen])


def _recorder(into: list[Tensor]) -> Callable[[Any, Any, Any], None]:
    def record(module: Any, args: tuple[Tensor, ...], output: Any) -> None:
        x = args[0].reshape(-1, args[0].shape[-1])
        into.append(torch.nn.functional.linear(x, module.weight).double())

    return record


def _mask(logits: Tensor, top_k: int) -> Tensor:
    chosen = logits.topk(top_k, dim=-1).indices
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, chosen, True)
