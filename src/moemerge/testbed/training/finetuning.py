"""Further training of a finished model, such as a merge, on problems."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.output import check_output
from moemerge.errors import UsageError
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
    if not problems:
        raise UsageError("a model has no problems to be trained on; give at least one")
    check_output(out, overwrite=False)
    flat, shape = load_flat(model)
    with Checkpoint.open(model) as checkpoint:
        dtype = checkpoint.tensors["model.norm.weight"].dtype
    pool = make_pool(problems)
    mixture = dict.fromkeys(pool.kinds, 1.0)
    course = Course(
        plan(pool, mixture, steps=steps, batch=batch, seed=seed), lr, lr, BALANCE, prompt_steps=0
    )
    state = State.start(flat[None].to(resolve_device(device)), steps)
    train_stack(state, [course], pool, shape, lambda _: None)
    write_model(out, state.flat[0], shape, dtype)
    return out
