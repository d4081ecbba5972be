"""A LoRA on every linear map of a model, and what came of it in the base's own layout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn

from moemerge.architectures.roles import Role
from moemerge.checkpoint.reader import AdaptedCheckpoint, as_ref
from moemerge.errors import ArchitectureError
from moemerge.tuning.job import TuningJob

_LAYER = re.compile(r".*?\.\d+\.(.+)")
_STACKS = frozenset({Role.ROUTER, Role.EXPERT})


def lora_config(job: TuningJob, model: nn.Module) -> Any:
    """Every linear map of the layers; routers and stacks of experts, which are parameters."""
    modules: set[str] = set()
    parameters: set[str] = set()
    for name, value in model.named_parameters():
        inner = _LAYER.fullmatch(name)
        if inner is None or name not in job.layout.trained or value.dim() < 2:
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, nn.Linear):
            modules.add(inner[1].removesuffix(".weight"))
        elif job.layout.in_memory.role(name) in _STACKS and not name.endswith("bias"):
            parameters.add(inner[1])
    if not modules and not parameters:
        raise ArchitectureError(f"{job.model.label} has no linear map that a LoRA can be put on")
    rank, alpha = job.settings.lora, job.settings.lora_alpha
    assert rank is not None
    assert alpha is not None
    return peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # a fraction is as good
        lora_dropout=0.0,
        # An empty list would mean: whatever peft thinks fit for this kind of model.
        target_modules=sorted(modules) or r"(?!)",
        target_parameters=sorted(parameters) or None,
        task_type="CAUSAL_LM",
    )


def adapted_tensors(job: TuningJob, adapter: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Stored tensors of the base that the adapter changes, with it in them."""
    merged = AdaptedCheckpoint(job.model.checkpoint.path, adapter)
    with merged:
        for name in merged.changed:
            yield name, merged.read(name)


def save_adapter(model: Any, state: Any, folder: Path, job: TuningJob) -> None:
    """The adapter of a trained model, as peft writes it, under the name of its base."""
    model.peft_config["default"].base_model_name_or_path = str(as_ref(job.request.model).absolute())
    # Looking for added tokens would ask the hub.
    model.save_pretrained(str(folder), state_dict=state, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # ours comes in its place
