"""Routing compared by running both models whole in transformers: nothing of moemerge is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass(frozen=True)
class Agreement:
    mismatch: float
    any_mismatch: float
    kl: float
    mismatch_layers: list[float]
    kl_layers: list[float]
    tokens: int


def router_logits(folder: Path, rows: Sequence[str]) -> tuple[int, list[Tensor]]:
    """Top-k, and of each router (tokens, experts), a row of text at a time."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    seen: list[list[Tensor]] = []
    for layer in model.model.layers:
        seen.append(into := [])
        layer.mlp.gate.register_forward_hook(
            lambda module, args, _, into=into: into.append(
                args[0].reshape(-1, args[0].shape[-1]) @ module.weight.T
            )
        )
    with torch.inference_mode():
        for row in rows:
            model(input_ids=torch.tensor([tokenizer(row)["input_ids"]]), use_cache=False)
    return model.config.num_experts_per_tok, [torch.cat(own) for own in seen]


def compare(model: Path, reference: Path, rows: Sequence[str]) -> Agreement:
    """Every choice of both models on the same rows."""
    (top_k, model_logits), (_, wanted_logits) = (router_logits(m, rows) for m in (model, reference))
    kl, missed = [], []
    for mine, wanted in zip(model_logits, wanted_logits, strict=True):
        z, r = mine.double().log_softmax(-1), wanted.double().log_softmax(-1)
        kl.append((r.exp() * (r - z)).sum(-1))  # (tokens,)
        chosen = (logits.topk(top_k).indices.tolist() for logits in (mine, wanted))
        lost = [len({*theirs} - {*ours}) for ours, theirs in zip(*chosen, strict=True)]
        missed.append(torch.tensor(lost) / top_k)
    divergence, mismatch = torch.stack(kl), torch.stack(missed)  # (routers, tokens)
    return Agreement(
        mismatch=float(mismatch.mean()),
        any_mismatch=float((mismatch > 0).any(0).double().mean()),
        kl=float(divergence.mean()),
        mismatch_layers=mismatch.mean(-1).tolist(),
        kl_layers=divergence.mean(-1).tolist(),
        tokens=mismatch.shape[1],
    )
