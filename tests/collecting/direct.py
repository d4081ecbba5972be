"""Grams and Fisher values straight from plain transformers: float64, whole model, one row at a
time, hooks and autograd. Nothing of moemerge is used."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import zoo

Grams = dict[str, tuple[Tensor, int]]  # unit key -> (mean of x xᵀ, tokens)


def whole_model(folder: Path) -> Any:
    name = zoo.read_config(folder)["architectures"][0]
    with zoo._quiet():
        model = getattr(transformers, name).from_pretrained(
            folder, dtype=torch.float64, experts_implementation="eager"
        )
    return model.eval().requires_grad_(False)


def grams(folder: Path, rows: Sequence[Tensor]) -> Grams:
    """Of every linear map, router and expert."""
    return {key: (x.T @ x / max(1, len(x)), len(x)) for key, x in inputs(folder, rows).items()}


def activations(folder: Path, rows: Sequence[Tensor]) -> Grams:
    """Mean |x| of the same inputs."""
    found = inputs(folder, rows)
    return {key: (x.abs().sum(0) / max(1, len(x)), len(x)) for key, x in found.items()}


def inputs(folder: Path, rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """What every linear map, router and expert reads: (tokens, in)."""
    model = whole_model(folder)
    seen: dict[str, list[Tensor]] = {}

    def linear(key: str) -> Any:
        def see(module: Any, args: Any) -> None:
            seen.setdefault(key, []).append(args[0].reshape(-1, args[0].shape[-1]))

        return see

    def experts(path: str) -> Any:
        def see(module: Any, args: Any) -> None:
            for expert in range(module.num_experts):
                mine, inner = _one_expert(module, expert, *args)
                seen.setdefault(f"{path}.{expert}.in", []).append(mine)
                seen.setdefault(f"{path}.{expert}.inner", []).append(inner)

        return see

    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) or path.endswith("mlp.gate"):
            module.register_forward_pre_hook(linear(f"{path}.weight"))
        if path.endswith("mlp.experts"):
            module.register_forward_pre_hook(experts(path))
    with torch.no_grad():
        for row in rows:
            model(input_ids=row[None], use_cache=False)
    joined = {key: torch.cat(parts) for key, parts in seen.items()}
    return {name: x for key, x in joined.items() for name in _names(folder, key)}


def _one_expert(
    module: Any, expert: int, x: Tensor, chosen: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    mine = x[(chosen == expert).any(dim=1)]
    gate, up = (mine @ module.gate_up_proj[expert].T).chunk(2, dim=1)
    return mine, torch.nn.functional.silu(gate) * up


def squared_gradients(folder: Path, rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """Mean over rows of the squared gradient of the row's summed next-token loss, by parameter."""
    model = whole_model(folder).requires_grad_(True)
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    rows = [row for row in rows if len(row) > 1]
    for row in rows:
        model.zero_grad()
        logits = model(input_ids=row[None], use_cache=False).logits[0]
        torch.nn.functional.cross_entropy(logits[:-1], row[1:], reduction="sum").backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                total[name] += parameter.grad.square() / len(rows)
    return total


def sensitivities(folder: Path, rows: Sequence[Tensor]) -> dict[str, float]:
    """Σ |W · d loss / d W| with the loss of all rows together, by the original layout's names."""
    model = whole_model(folder).requires_grad_(True)
    for row in rows:
        logits = model(input_ids=row[None], use_cache=False).logits[0]
        torch.nn.functional.cross_entropy(logits[:-1], row[1:], reduction="sum").backward()
    products = {
        name: torch.zeros_like(p) if p.grad is None else (p * p.grad).detach().abs()
        for name, p in model.named_parameters()
    }
    return {name: float(values.sum()) for name, values in by_unit(folder, products).items()}


def fishers(folder: Path, rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """The same by the names of the original layout."""
    return by_unit(folder, squared_gradients(folder, rows))


def by_unit(folder: Path, total: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values of parameters in memory, taken apart into the original layout's tensors."""
    found: dict[str, Tensor] = {}
    for name, values in total.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(values):
                gate, up = both.chunk(2)
                place = name.removesuffix(".gate_up_proj")
                found[_names(folder, f"{place}.{expert}.in")[0]] = gate
                found[_names(folder, f"{place}.{expert}.in")[1]] = up
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(values):
                place = name.removesuffix(".down_proj")
                found[_names(folder, f"{place}.{expert}.inner")[0]] = down
        else:
            found[_names(folder, name)[0]] = values
    return found


def _names(folder: Path, key: str) -> list[str]:
    """Names of the tensors in the family's original layout that read this input."""
    mixtral = zoo.read_config(folder)["model_type"] == "mixtral"
    if mixtral:
        key = key.replace(".mlp.", ".block_sparse_moe.")
    expert = re.fullmatch(r"(.*\.\d+)\.(in|inner)", key)
    if expert is None:
        return [key]
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    names = (gate, up) if expert[2] == "in" else (down,)
    return [f"{expert[1]}.{name}.weight" for name in names]
