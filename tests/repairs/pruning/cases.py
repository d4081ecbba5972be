"""Models whose experts were sliced by hand, and text to repair them with."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import zoo
from repairs.calibration import cases

ONE_EXPERT = re.compile(r"(.*experts\.)(\d+)(\..*)")
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
Kept = Mapping[int, Sequence[int]]


def slice_experts(base: Path, out: Path, kept: Kept, **changes: object) -> Path:
    """Copy a checkpoint with some experts of each layer, in the order of `kept`."""
    shutil.copytree(base, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors: dict[str, Tensor] = {}
    for name, tensor in zoo.tensors(base).items():
        layer = re.search(r"\.(\d+)\.", name)
        chosen = list(kept.get(int(layer[1]), ())) if layer else []
        one = ONE_EXPERT.fullmatch(name)
        if chosen and one and "shared" not in name:
            if int(one[2]) in chosen:
                tensors[f"{one[1]}{chosen.index(int(one[2]))}{one[3]}"] = tensor
        elif chosen and _is_of_experts(name):
            whole = tensor.reshape(-1) if tensor.shape[0] == 1 else tensor
            tensors[name] = (
                whole[chosen].reshape(*tensor.shape[:-1], -1)
                if (tensor.shape[0] == 1)
                else whole[chosen]
            )
        else:
            tensors[name] = tensor
    save_file({n: t.contiguous() for n, t in tensors.items()}, out / "model.safetensors")
    config = json.loads((base / "config.json").read_text())
    (count,) = {len(chosen) for chosen in kept.values()}
    config.update({key: count for key in COUNTS if key in config}, **changes)
    (out / "config.json").write_text(json.dumps(config))
    return out


def _is_of_experts(name: str) -> bool:
    if "shared" in name:
        return False
    router = re.search(r"(mlp|block_sparse_moe)\.(gate|router)\.", name)
    stack = re.search(r"experts\.[a-z_0-9]+$", name) or "_linear.weight" in name
    return bool(router or stack or "moe_statics" in name)


def keep_of(base: Path, count: int, seed: int = 0) -> dict[int, list[int]]:
    """Choose `count` experts of every layer, in ascending order."""
    generator = torch.Generator().manual_seed(seed)
    layers = {
        int(re.search(r"\.(\d+)\.", name)[1])  # type: ignore[index]
        for name in zoo.tensors(base)
        if _is_of_experts(name) or (ONE_EXPERT.fullmatch(name) and "shared" not in name)
    }
    return {
        layer: sorted(torch.randperm(zoo.EXPERTS, generator=generator)[:count].tolist())
        for layer in sorted(layers)
    }


def text_for(folder: Path, *, rows: int = 14) -> Path:
    """Add a tokenizer to a model and write text for it."""
    zoo.tiny_tokenizer(folder)
    return cases.write_text(folder.with_suffix(".jsonl"), seed=1, rows=rows)
