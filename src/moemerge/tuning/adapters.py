"""Add a LoRA to every linear map of a model, and merge it into the base's layout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn

from moemerge.architectures.roles import Role
from moemerge.checkpoint.adapter import MISTAKEN
from moemerge.checkpoint.output import temporary_sibling
from moemerge.checkpoint.reader import AdaptedCheckpoint, as_ref
from moemerge.errors import ArchitectureError, CheckpointError
from moemerge.tuning.job import TuningJob

_LAYER = re.compile(r".*?\.\d+\.(.+)")
_STACKS = frozenset({Role.ROUTER, Role.EXPERT})


def lora_config(job: TuningJob, model: nn.Module) -> Any:
    """Return the config of a LoRA on every linear map of the layers; routers and expert stacks are
    parameters.
    """
    modules: set[str] = set()
    parameters: set[str] = set()
    for name, value in model.named_parameters():
        inner = _LAYER.fullmatch(name)
        if inner is None or name not in job.layout.trained or value.dim() < 2:
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        module = inner[1].removesuffix(".weight")
        if isinstance(owner, nn.Linear) and module.rpartition(".")[2] in MISTAKEN:
            parameters.add(inner[1])
        elif isinstance(owner, nn.Linear):
            modules.add(module)
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
        # With an empty list, peft would choose modules itself.
        target_modules=sorted(modules) or r"(?!)",
        target_parameters=sorted(parameters) or None,
        task_type="CAUSAL_LM",
    )


def adapted_tensors(job: TuningJob, adapter: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the base's stored tensors that the adapter changes, with the adapter merged."""
    merged = AdaptedCheckpoint(job.model.checkpoint.path, adapter)
    with merged:
        for name in merged.changed:
            yield name, merged.read(name)


def check_adapter(model: Any, job: TuningJob) -> None:
    """Refuse, before training, an adapter that cannot be merged into the base's layout."""
    with temporary_sibling(job.request.out) as folder:
        save_adapter(model, None, folder, job)
        try:
            AdaptedCheckpoint(job.model.checkpoint.path, folder).close()
        except CheckpointError as error:
            raise ArchitectureError(
                f"{job.model.label}: a LoRA of this model cannot be merged into it "
                f"({error.message})",
                hint="train its weights themselves: leave out `lora`",
            ) from error


def save_adapter(model: Any, state: Any, folder: Path, job: TuningJob) -> None:
    """Save the adapter of a trained model as peft does, with the name of its base."""
    model.peft_config["default"].base_model_name_or_path = str(as_ref(job.request.model).absolute())
    # The search for added tokens would contact the hub.
    model.save_pretrained(str(folder), state_dict=state, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # replaced by our own
