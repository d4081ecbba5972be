"""What share of problems a model solves, by letting it write its answers.

Models run in float32 whatever their checkpoints store, as rounding is not what is to be measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from moemerge.checkpoint import Checkpoint
from moemerge.errors import ArchitectureError
from moemerge.runtime.devices import resolve_device
from moemerge.testbed.network.generation import continue_texts
from moemerge.testbed.network.layout import Shape, from_tensors, shape_of_config
from moemerge.testbed.tasks import Problem, check_all

LONGEST_ANSWER = 24  # tokens after which a model is stopped; no right answer is longer


def load_flat(folder: Path) -> tuple[Tensor, Shape]:
    """A checkpoint's weights (parameters,) in float32, and its shape."""
    with Checkpoint.open(folder) as checkpoint:
        shape = shape_of_config(checkpoint.config, str(folder))
        return from_tensors(checkpoint, shape, str(folder)), shape


def generate(
    model_folder: Path,
    prompts: Sequence[str],
    *,
    device: str = "auto",
    max_new_tokens: int = LONGEST_ANSWER,
) -> list[str]:
    """What a model writes after each prompt, taking the likeliest token each time."""
    return generate_many([model_folder], prompts, device=device, max_new_tokens=max_new_tokens)[0]


def generate_many(
    model_folders: Sequence[Path],
    prompts: Sequence[str],
    *,
    device: str = "auto",
    max_new_tokens: int = LONGEST_ANSWER,
) -> list[list[str]]:
    """`generate` for several models of one shape, at about the cost of one on a GPU."""
    loaded = [load_flat(Path(folder)) for folder in model_folders]
    shapes = {shape for _, shape in loaded}
    if len(shapes) != 1:
        raise ArchitectureError(
            f"{len(model_folders)} models of {len(shapes)} unlike shapes cannot run together",
            hint="give models of one base",
        )
    on = resolve_device(device)
    flats = [flat for flat, _ in loaded]
    # On a CPU models gain nothing from each other's company.
    stacks = [torch.stack(flats)] if on.type == "cuda" else [flat[None] for flat in flats]
    return [
        texts
        for stack in stacks
        for texts in continue_texts(stack.to(on), shapes.copy().pop(), prompts, max_new_tokens)
    ]


def accuracy(
    model_folder: Path, problems: Sequence[Problem], *, device: str = "auto"
) -> list[bool]:
    """Which problems a model solves."""
    return accuracy_many([model_folder], problems, device=device)[0]


def accuracy_many(
    model_folders: Sequence[Path], problems: Sequence[Problem], *, device: str = "auto"
) -> list[list[bool]]:
    """`accuracy` for several models of one shape."""
    written = generate_many(model_folders, [p.prompt for p in problems], device=device)
    return [check_all(problems, texts) for texts in written]
