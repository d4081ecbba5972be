"""Further training of a finished model, such as a merge, on problems."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.output import check_output
from moemerge.errors import ArchitectureError, UsageError
from moemerge.runtime.devices import resolve_device
from moemerge.testbed.accuracy import load_flat
from moemerge.testbed.tasks import Problem
from moemerge.testbed.training.data import make_pool, plan
from moemerge.testbed.training.optimise import Course, State, train_stack
from moemerge.testbed.training.presets import BALANCE
from moemerge.testbed.training.sets import write_model

BATCH = 128


def finetune(
    model: Path,
    out: Path,
    problems: Sequence[Problem],
    *,
    steps: int,
    lr: float,
    seed: int = 0,
    device: str = "auto",
    batch: int = BATCH,
) -> Path:
    """Train `model` on the answers to `problems` and write it to `out`."""
    return finetune_many(
        [model], [out], [problems], steps=steps, lr=lr, seed=seed, device=device, batch=batch
    )[0]


def finetune_many(
    models: Sequence[Path],
    outs: Sequence[Path],
    problems: Sequence[Sequence[Problem]],
    *,
    steps: int,
    lr: float,
    seed: int = 0,
    device: str = "auto",
    batch: int = BATCH,
) -> list[Path]:
    """`finetune` for several models of one shape at once, each on its own problems."""
    if not len(models) == len(outs) == len(problems):
        raise UsageError(
            f"{len(models)} models, {len(outs)} outputs and {len(problems)} lists of problems: "
            "expected as many of each"
        )
    if not all(problems):
        raise UsageError("a model has no problems to be trained on; give at least one")
    for out in outs:
        check_output(Path(out), overwrite=False)
    loaded = [load_flat(Path(model)) for model in models]
    shape = loaded[0][1]
    if any(other != shape for _, other in loaded):
        raise ArchitectureError("models of unlike shapes cannot be trained together")
    on = resolve_device(device)
    # On a CPU one model at a time, as everywhere: the same bytes in any company.
    groups = [range(len(models))] if on.type == "cuda" else [[n] for n in range(len(models))]
    for group in groups:
        everything = [problem for number in group for problem in problems[number]]
        kinds, start = {}, 0
        for number in group:
            kinds[str(number), ""] = range(start, start + len(problems[number]))
            start += len(problems[number])
        pool = make_pool(everything, kinds)
        courses = [
            Course(
                plan(pool, {(str(n), ""): 1.0}, steps=steps, batch=batch, seed=seed),
                lr, lr, BALANCE, 0,
            )
            for n in group
        ]  # fmt: skip
        state = State.start(torch.stack([loaded[n][0] for n in group]).to(on), steps)
        train_stack(state, courses, pool, shape, lambda _: None)
        for place, number in enumerate(group):
            dtype = _stored_dtype(Path(models[number]))
            write_model(Path(outs[number]), state.flat[place], shape, dtype)
    return [Path(out) for out in outs]


def _stored_dtype(model: Path) -> torch.dtype:
    with Checkpoint.open(model) as checkpoint:
        return checkpoint.tensors["model.norm.weight"].dtype
