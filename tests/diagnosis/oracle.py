"""The figures of a diagnosis from whole models in plain transformers, with hooks and loops.

Nothing of moemerge is used: the choices are what the experts are called with, the logits what the
routers give, one row of text at a time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import zoo


@dataclass
class Seen:
    """What one router did: every token's input, logits, chosen experts and their weights."""

    inputs: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    chosen: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)

    def of(self, name: str) -> Tensor:
        return torch.cat(getattr(self, name))


class Whole:
    """A model in memory whose routers are watched."""

    def __init__(self, folder: Path) -> None:
        with zoo._quiet():
            self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32
            ).eval()
        self.blocks: dict[int, Any] = {
            number: layer.mlp
            for number, layer in enumerate(self.model.model.layers)
            if hasattr(layer.mlp, "experts")
        }
        self.sigmoid = "deepseek" in self.model.config.model_type
        self._into: dict[int, Seen] = {}
        for number, block in self.blocks.items():
            router = block.gate if hasattr(block, "gate") else block.router
            router.register_forward_hook(self._router_hook(number))
            block.experts.register_forward_pre_hook(self._experts_hook(number), with_kwargs=True)

    def _router_hook(self, number: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            x = args[0].reshape(-1, args[0].shape[-1])
            logits = output[0] if isinstance(output, tuple) else output
            self._into[number].inputs.append(x.detach().clone())
            self._into[number].logits.append(logits.detach().double())

        return hook

    def _experts_hook(self, number: int) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            _, chosen, weights = (*args, *kwargs.values())
            if weights.shape[-1] != chosen.shape[-1]:  # given for all experts
                weights = weights.gather(-1, chosen)
            self._into[number].chosen.append(chosen)
            self._into[number].weights.append(weights.double())

        return hook

    def run(self, rows: list[Tensor]) -> tuple[dict[int, Seen], float]:
        """What every router did over the rows, and the mean next-token loss."""
        self._into = {number: Seen() for number in self.blocks}
        total, count = 0.0, 0
        with torch.no_grad():
            for row in rows:
                logits = self.model(input_ids=row.unsqueeze(0), use_cache=False).logits[0]
                gold = torch.log_softmax(logits[:-1].double(), -1)[range(len(row) - 1), row[1:]]
                total, count = total - float(gold.sum()), count + len(row) - 1
        return self._into, total / count

    def route(self, number: int, features: Tensor) -> Seen:
        """One router alone on features from elsewhere: its block is fed with them."""
        self._into = {number: Seen()}
        with torch.no_grad():
            self.blocks[number](features.unsqueeze(0))
        return self._into[number]

    def log_probabilities(self, logits: Tensor) -> Tensor:
        if not self.sigmoid:
            return torch.log_softmax(logits, -1)
        scores = torch.sigmoid(logits)
        return (scores / scores.sum(-1, keepdim=True)).log()


def kl(model: Whole, wanted: Tensor, got: Tensor) -> float:
    r, p = model.log_probabilities(wanted), model.log_probabilities(got)
    return float((r.exp() * (r - p)).sum(-1).mean())


def figures(model: Whole, source: Whole, mine: Seen, theirs: Seen, number: int) -> dict[str, Any]:
    """The row of one router, figure by figure."""
    wanted, made = theirs.of("chosen").tolist(), mine.of("chosen").tolist()
    moved = source.route(number, mine.of("inputs"))
    swapped = moved.of("chosen").tolist()
    tokens, top_k = len(wanted), len(wanted[0])
    z, z_moved = mine.of("logits"), moved.of("logits")
    shift = (z - z_moved).norm(dim=-1) / z_moved.norm(dim=-1)
    x, y = mine.of("inputs").double(), theirs.of("inputs").double()
    lost = [set(w) - set(m) for w, m in zip(wanted, made, strict=True)]
    return {
        "tokens": tokens,
        "mismatch": sum(map(len, lost)) / tokens / top_k,
        "any_mismatch": sum(map(bool, lost)) / tokens,
        "mismatch_on_features": sum(
            len(set(w) - set(m)) for w, m in zip(swapped, made, strict=True)
        )
        / tokens
        / top_k,
        "top1_agreement": float((theirs.of("logits").argmax(-1) == z.argmax(-1)).double().mean()),
        "weighted_overlap": weighted_overlap(theirs, mine),
        "kl": kl(model, theirs.of("logits"), z),
        "kl_on_features": kl(model, z_moved, z),
        "quadratic": quadratic(model, z_moved, z),
        "logit_shift": float(shift.mean()),
        "shift_small": float((shift < 0.1).double().mean()),
        "shift_moderate": float((shift < 0.2).double().mean()),
        "drift": float(((x - y).norm(dim=-1) / y.norm(dim=-1)).mean()),
        "load_source": load(wanted, z.shape[1]),
        "load": load(made, z.shape[1]),
        "flow": flow(wanted, made),
        "lost": [bool(experts) for experts in lost],
    }


def load(chosen: list[list[int]], experts: int) -> list[float]:
    counts = Counter(expert for row in chosen for expert in row)
    return [counts[expert] / sum(counts.values()) for expert in range(experts)]


def weighted_overlap(theirs: Seen, mine: Seen) -> float:
    total = 0.0
    rows = zip(
        theirs.of("chosen").tolist(),
        theirs.of("weights").tolist(),
        mine.of("chosen").tolist(),
        mine.of("weights").tolist(),
        strict=True,
    )
    count = 0
    for wanted, w, made, v in rows:
        ours = {expert: weight / sum(w) for expert, weight in zip(wanted, w, strict=True)}
        others = {expert: weight / sum(v) for expert, weight in zip(made, v, strict=True)}
        total += sum(min(ours[e], others[e]) for e in ours.keys() & others.keys())
        count += 1
    return total / count


def quadratic(model: Whole, wanted: Tensor, got: Tensor) -> float:
    """½ δᵀ H δ with H from automatic differentiation of the KL, token by token."""

    r = model.log_probabilities(wanted).exp()
    z = wanted.clone().requires_grad_()
    divergence = (r * (r.log() - model.log_probabilities(z))).sum()
    slope = torch.autograd.grad(divergence, z, create_graph=True)[0]  # (tokens, K)
    rows = [torch.autograd.grad(s.sum(), z, retain_graph=True)[0] for s in slope.unbind(-1)]
    hessian = torch.stack(rows, dim=-1)  # (tokens, K, K): tokens do not mix
    gap = got - wanted
    return float(0.5 * torch.einsum("tk,tkl,tl->t", gap, hessian, gap).mean())


def flow(wanted: list[list[int]], made: list[list[int]]) -> dict[tuple[int, int], float]:
    found: Counter[tuple[int, int]] = Counter()
    for w, m in zip(wanted, made, strict=True):
        lost, taken = set(w) - set(m), set(m) - set(w)
        for a in lost:
            for b in taken:
                found[a, b] += 1 / len(taken) / len(wanted) / len(wanted[0])
    return dict(found)
