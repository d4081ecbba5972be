"""Round a model's matrices to INT4 by GPTQ, on the inputs that each matrix has after earlier ones.

Columns are rounded one after the other. The error of each is compensated in the later columns, by
their correlation in the inputs (Frantar et al., 2022).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

LARGEST = 8  # codes are -8 to 7
DAMPING = 0.01  # of the Gram matrix's mean diagonal
PARTS = ("q_proj", "k_proj", "v_proj")


@torch.no_grad()
def round_by_gptq(model: Path, texts: Sequence[str], group: int | None) -> dict[str, Tensor]:
    """Return the rounded matrices of a model's layers as floats, under their stored names."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    batches = [torch.tensor([tokenizer(text)["input_ids"]]) for text in texts]
    found: dict[str, Tensor] = {}
    for number, layer in enumerate(network.model.layers):
        stem = f"model.layers.{number}"
        attention, experts = layer.self_attn, layer.mlp.experts

        def seen(module: Any) -> list[tuple[Tensor, ...]]:
            return inputs_of(network, module, batches)

        (x,) = joined(seen(attention.q_proj))
        for name in PARTS:
            linear = getattr(attention, name)
            linear.weight.copy_(gptq(linear.weight, x, group))
            found[f"{stem}.self_attn.{name}.weight"] = linear.weight.clone()
        (x,) = joined(seen(attention.o_proj))
        attention.o_proj.weight.copy_(gptq(attention.o_proj.weight, x, group))
        found[f"{stem}.self_attn.o_proj.weight"] = attention.o_proj.weight.clone()
        x, chosen, _ = joined(seen(experts))
        for expert in range(experts.num_experts):
            own = x[(chosen == expert).any(dim=1)]
            gate_up, down = experts.gate_up_proj[expert], experts.down_proj[expert]
            gate_up.copy_(gptq(gate_up, own, group))
            gate, up = (own @ gate_up.T).chunk(2, dim=-1)
            down.copy_(gptq(down, torch.nn.functional.silu(gate) * up, group))
            parts = (*gate_up.chunk(2), down)
            for name, part in zip(("gate_proj", "up_proj", "down_proj"), parts, strict=True):
                found[f"{stem}.mlp.experts.{expert}.{name}.weight"] = part.clone()
    return found


def inputs_of(network: Any, module: Any, batches: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Return the positional inputs of a module for every batch."""
    calls: list[tuple[Tensor, ...]] = []
    hook = module.register_forward_pre_hook(lambda _, given: calls.append(given))
    for batch in batches:
        network(input_ids=batch)
    hook.remove()
    return calls


def joined(calls: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return each input of all calls as rows."""
    return tuple(
        torch.cat([a.reshape(-1, a.shape[-1]) for a in some]) for some in zip(*calls, strict=True)
    )


def gptq(matrix: Tensor, inputs: Tensor, group: int | None) -> Tensor:
    """Return a matrix (out, in) rounded to INT4, given rows of its inputs (n, in)."""
    left = matrix.double().clone()
    columns = left.shape[1]
    gram = inputs.double().T @ inputs.double()
    damped = gram + (DAMPING * gram.diagonal().mean() + 1e-12) * torch.eye(columns).double()
    # Row j of the inverse's upper Cholesky factor states how column j's error moves later columns.
    factor = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    out = torch.empty_like(left)
    width = group or columns
    for column in range(columns):
        if column % width == 0:
            largest = left[:, column : column + width].abs().amax(1)
            scale = (largest / (LARGEST - 0.5)).clamp_min(1e-12).float().double()
        codes = (left[:, column] / scale).round().clamp(-LARGEST, LARGEST - 1)
        out[:, column] = codes * scale
        error = (left[:, column] - out[:, column]) / factor[column, column]
        left[:, column:] -= error[:, None] * factor[column, column:]
    return out.to(matrix.dtype)


def write_rounded(model: Path, out: Path, matrices: dict[str, Tensor]) -> None:
    """Write a copy of a model with other values of some tensors, in float32."""
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = load_file(model / "model.safetensors")
    assert set(matrices) <= set(tensors), set(matrices) - set(tensors)
    floats = {name: matrices.get(name, value).float() for name, value in tensors.items()}
    save_file(floats, out / "model.safetensors", metadata={"format": "pt"})
