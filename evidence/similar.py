"""Assign every removed expert to the kept expert whose output is most similar on its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

SUFFIX = ".mlp.experts"
TOKENS = 256  # of each removed expert


@torch.no_grad()
def groups_of_experts(
    model: Path, kept: Mapping[str, Sequence[int]], texts: Sequence[str]
) -> dict[str, list[list[int]]]:
    """Return, for every kept expert of a layer, itself and the removed experts most similar to it.

    Outputs are compared on the tokens that the model sends to the removed expert.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for path, module in network.named_modules():
        if path.endswith(SUFFIX):
            calls = seen.setdefault(path, [])
            module.register_forward_pre_hook(
                lambda _, given, calls=calls: calls.append((given[0], given[1]))
            )
    for text in texts:
        network(input_ids=torch.tensor([tokenizer(text)["input_ids"]]))
    groups = {}
    for path, calls in seen.items():
        layer = path.split(".")[-3]
        x, chosen = (torch.cat([call[at] for call in calls]) for at in range(2))
        groups[layer] = _groups(network.get_submodule(path), kept[layer], x, chosen)
    return groups


def _groups(module: Any, kept: Sequence[int], x: Tensor, chosen: Tensor) -> list[list[int]]:
    members = {expert: [expert] for expert in kept}
    for removed in set(range(module.num_experts)) - set(kept):
        own = x[(chosen == removed).any(dim=1)][:TOKENS]
        wanted = _output(module, removed, own)
        distance = {e: float((_output(module, e, own) - wanted).norm()) for e in kept}
        members[min(kept, key=distance.__getitem__)].append(removed)
    return [members[expert] for expert in kept]


def _output(module: Any, expert: int, x: Tensor) -> Tensor:
    gate, up = (x @ module.gate_up_proj[expert].T).chunk(2, dim=-1)
    out: Tensor = (torch.nn.functional.silu(gate) * up) @ module.down_proj[expert].T
    return out
