"""The refit straight from its table: whole models in float64, plain transformers, hooks, one row at
a time, everything run anew for every map. Nothing of moemerge is used."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collecting.direct import whole_model

QKV = ("q_proj", "k_proj", "v_proj")
LATENT = (("q_a_proj",), ("q_b_proj",), ("kv_a_proj_with_mqa",), ("kv_b_proj",))
Rows = Mapping[str, Sequence[Tensor]]  # token rows of every domain


@dataclass
class Seen:
    """What one module was given and gave, all rows below each other."""

    given: list[tuple[Tensor, ...]]
    gave: list[Tensor]

    def argument(self, place: int) -> Tensor:
        return torch.cat([args[place] for args in self.given])

    @property
    def output(self) -> Tensor:
        return torch.cat(self.gave)


def run(model: Any, rows: Sequence[Tensor], paths: Sequence[str]) -> dict[str, Seen]:
    """Run the rows one by one and listen to some modules."""
    seen = {path: Seen([], []) for path in paths}

    def flat(value: Tensor) -> Tensor:
        return value.reshape(-1, value.shape[-1]).clone()

    def hook(path: str) -> Any:
        def see(module: Any, args: Any, kwargs: Any, out: Any) -> None:
            given = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
            seen[path].given.append(tuple(flat(value) for value in given if value.dim() > 1))
            seen[path].gave.append(flat(out[0] if isinstance(out, tuple) else out))

        return see

    hooks = [
        model.get_submodule(path).register_forward_hook(hook(path), with_kwargs=True)
        for path in paths
    ]
    with torch.no_grad():
        for row in rows:
            model(input_ids=row[None], use_cache=False)
    for one in hooks:
        one.remove()
    return seen


class Twin:
    """Refit `merged` in place; afterwards `model` holds the new weights."""

    def __init__(
        self,
        merged: Path,
        sources: Mapping[str, Path],
        rows: Rows,
        ridge: float,
        kept: Mapping[int, Sequence[int]] | None = None,
        **weights: float,
    ) -> None:
        self.kept = kept  # the sources' experts behind the model's, by layer
        self.model = whole_model(merged)
        self.sources = {name: whole_model(path) for name, path in sources.items()}
        self.rows = rows
        self.ridge = ridge
        self.weights = {name: weights.get(name, 1.0) for name in sources}
        self.before = {n: p.clone() for n, p in self.model.named_parameters()}
        self.theirs = {
            name: run(source, rows[name], [p for p, _ in source.named_modules() if _heard(p)])
            for name, source in self.sources.items()
        }

    def refit(self, *, head: bool = True) -> Twin:
        for number in range(len(self.model.model.layers)):
            layer = f"model.layers.{number}"
            attention = self.model.get_submodule(f"{layer}.self_attn")
            for names in (QKV, *LATENT):
                if getattr(attention, names[0], None) is not None:
                    self.same_outputs([f"{layer}.self_attn.{name}" for name in names])
            self.last_map(layer, "self_attn.o_proj")
            block = self.model.get_submodule(f"{layer}.mlp")
            if hasattr(block, "experts"):
                # Who writes to the hidden state first is a matter of the model's code.
                if hasattr(block, "shared_expert"):  # Qwen2-MoE: weighed by a gate of its own
                    self.shared_expert(layer, "shared_expert", first=True)
                self.experts_in(layer)
                self.experts_out(layer, last=not hasattr(block, "shared_experts"))
                if hasattr(block, "shared_experts"):  # DeepSeek
                    self.shared_expert(layer, "shared_experts", first=False)
            else:
                self.same_outputs([f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"])
                self.last_map(layer, "mlp.down_proj")
        if head:
            self.same_outputs(["lm_head"])
        return self

    def both(self, paths: Sequence[str]) -> dict[str, tuple[dict[str, Seen], dict[str, Seen]]]:
        """Of every domain: what the merged model's modules saw, and its source's."""
        return {
            name: (run(self.model, self.rows[name], paths), theirs)
            for name, theirs in self.theirs.items()
        }

    def solve(self, old: Tensor, parts: Mapping[str, tuple[Tensor, Tensor, int]]) -> Tensor:
        """W + argmin_Δ Σ_i (ω_i / N_i) Σ ‖Δ x − r‖² + λ mean(diag G) ‖Δ‖², rounded to float32.

        `parts`: x (n, in) and r (n, out), with √c taken in, and N, by domain.
        """
        gram = sum(self.weights[i] / n * x.T @ x for i, (x, _, n) in parts.items())
        cross = sum(self.weights[i] / n * r.T @ x for i, (x, r, n) in parts.items())
        assert isinstance(gram, Tensor)
        assert isinstance(cross, Tensor)
        if not bool(gram.any()):
            return old
        damped = gram + self.ridge * gram.diagonal().mean() * torch.eye(len(gram)).double()
        return (old + torch.linalg.solve(damped, cross.T).T).float().double()

    def same_outputs(self, paths: Sequence[str]) -> None:
        """Maps that are to give what the source gives: q, k, v, gate, up, head."""
        seen = self.both(paths)
        for path in paths:
            module = self.model.get_submodule(path)
            parts = {}
            for name, (ours, theirs) in seen.items():
                x = ours[path].argument(0)
                parts[name] = (x, theirs[path].output - ours[path].output, len(x))
            module.weight.copy_(self.solve(module.weight, parts))

    def last_map(self, layer: str, path: str) -> None:
        """Of attention or of a dense MLP: it brings the hidden state to where the source's is."""
        path, norm = f"{layer}.{path}", f"{layer}.post_attention_layernorm"
        parts = {}
        for name, (ours, theirs) in self.both([layer, path, norm]).items():
            x = ours[path].argument(0)
            if "self_attn" in path:
                wanted = theirs[norm].argument(0) - ours[layer].argument(0)
            else:
                wanted = theirs[layer].output - ours[norm].argument(0)
            parts[name] = (x, wanted - ours[path].output, len(x))
        module = self.model.get_submodule(path)
        module.weight.copy_(self.solve(module.weight, parts))

    def shared_expert(self, layer: str, name: str, *, first: bool) -> None:
        """Its last map brings the hidden state to where the source's is after the same write."""
        whole, before = f"{layer}.mlp.{name}", f"{layer}.post_attention_layernorm"
        down, gate = f"{whole}.down_proj", f"{layer}.mlp.{name}_gate"
        self.same_outputs([f"{whole}.gate_proj", f"{whole}.up_proj"])
        module = self.model.get_submodule(down)
        weighed = hasattr(self.model.get_submodule(f"{layer}.mlp"), f"{name}_gate")
        parts = {}
        for domain, (ours, theirs) in self.both(
            [layer, before, down, *([gate] if weighed else [])]
        ).items():
            mine, its = (torch.sigmoid(s[gate].output) if weighed else 1.0 for s in (ours, theirs))
            if first:
                wanted = theirs[before].argument(0) + its * theirs[down].output
                missing = wanted - ours[before].argument(0) - mine * ours[down].output
            else:
                missing = theirs[layer].output - ours[layer].output
            x = mine * ours[down].argument(0)
            parts[domain] = (x, missing, len(x))
        module.weight.copy_(self.solve(module.weight, parts))

    def experts_in(self, layer: str) -> None:
        path = f"{layer}.mlp.experts"
        seen = self.both([path])
        module = self.model.get_submodule(path)
        for expert in range(module.num_experts):
            parts = {}
            for name, (ours, theirs) in seen.items():
                x, chosen, weights = (ours[path].argument(at) for at in range(3))
                mine, c = sent(chosen, weights, expert)
                source = self.sources[name].get_submodule(path)
                behind = self.kept[int(layer.split(".")[-1])][expert] if self.kept else expert
                wanted = first(source, behind, theirs[path].argument(0)[mine])
                now = first(module, expert, x[mine])
                parts[name] = (c * x[mine], c * (wanted - now), len(x))
            put(module, "gate_up_proj", expert, self.solve, parts)

    def experts_out(self, layer: str, *, last: bool) -> None:
        """`last`: nothing else writes to the hidden state after the experts."""
        path, before = f"{layer}.mlp.experts", f"{layer}.post_attention_layernorm"
        seen = self.both([layer, path, before])
        module = self.model.get_submodule(path)
        for expert in range(module.num_experts):
            parts = {}
            for name, (ours, theirs) in seen.items():
                x, chosen, weights = (ours[path].argument(at) for at in range(3))
                if last:  # (tokens, d)
                    missing = theirs[layer].output - ours[layer].output
                else:
                    missing = theirs[before].argument(0) - ours[before].argument(0)
                    missing += theirs[path].output - ours[path].output
                mine, c = sent(chosen, weights, expert)
                share = c / weights[mine].sum(dim=1, keepdim=True)
                inner = module._apply_gate(first(module, expert, x[mine]))
                parts[name] = (c * inner, share * missing[mine], len(x))
            put(module, "down_proj", expert, self.solve, parts)


def _heard(path: str) -> bool:
    """Whether some map's inputs or target are told by this module."""
    words = r"layers\.\d+|_proj|_with_mqa|experts|_gate|post_attention_layernorm|lm_head"
    return bool(re.search(f"({words})$", path))


def sent(chosen: Tensor, weights: Tensor, expert: int) -> tuple[Tensor, Tensor]:
    """Tokens that go to an expert, and the routing weight of each, (n, 1)."""
    hit = chosen == expert
    mine = hit.any(dim=1).nonzero().squeeze(1)
    return mine, (weights * hit).sum(dim=1, keepdim=True)[mine]


def first(module: Any, expert: int, x: Tensor) -> Tensor:
    weight = module.gate_up_proj[expert]
    if hasattr(module, "gate_up_proj_bias"):  # gpt_oss, stored (in, out)
        return x @ weight + module.gate_up_proj_bias[expert]
    return x @ weight.T


def put(module: Any, name: str, expert: int, solve: Any, parts: Any) -> None:
    weight = getattr(module, name)[expert]
    if hasattr(module, "gate_up_proj_bias"):
        weight.copy_(solve(weight.T, parts).T)
    else:
        weight.copy_(solve(weight, parts))
