"""Further training of a finished model, such as a merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.output import check_output
from moemerge.errors import UsageError
from moemerge.runtime.devices import resolve_device
from moemerge.testbed.accuracy import LONGEST_ANSWER, continue_texts, load_flat
from moemerge.testbed.network.layout import Shape
from moemerge.testbed.tasks import Problem, check_all
from moemerge.testbed.training.data import BALANCE, make_pool, plan
from moemerge.testbed.training.optimise import Course, State, train_stack
from moemerge.testbed.training.sets import write_model
from moemerge.testbed.training.stacks import chunks

FINETUNING_BATCH = 128
_SEED = 0  # of the rows that a step takes


@dataclass(frozen=True)
class FineTuned:
    """A model that was trained further, not yet on disk."""

    flat: Tensor  # (parameters,)
    shape: Shape
    dtype: torch.dtype  # of the checkpoint it came from

    def write(self, out: Path) -> Path:
        check_output(out, overwrite=None)
        write_model(out, self.flat, self.shape, self.dtype)
        return out

    def accuracy(self, problems: Sequence[Problem]) -> float:
        """The share of problems that it solves."""
        prompts = [problem.prompt for problem in problems]
        (written,) = continue_texts(self.flat[None], self.shape, prompts, LONGEST_ANSWER)
        solved = check_all(problems, written)
        return sum(solved) / len(solved)


def finetune_many(
    model: Path,
    problems: Sequence[Problem],
    rates: Sequence[float],
    *,
    steps: int,
    device: str = "auto",
    batch: int = FINETUNING_BATCH,
) -> list[FineTuned]:
    """Train a model on the answers to `problems` at each learning rate, on a GPU all at once."""
    if not problems:
        raise UsageError("a model has no problems to be trained on; give at least one")
    flat, shape = load_flat(model)
    with Checkpoint.open(model) as checkpoint:
        dtype = checkpoint.tensors["model.norm.weight"].dtype.torch
    pool = make_pool(problems)
    rows = plan(pool, dict.fromkeys(pool.kinds, 1.0), steps=steps, batch=batch, seed=_SEED)
    on = resolve_device(device)
    tuned: list[FineTuned] = []
    for some in chunks(rates, on):
        courses = [Course(rows, lr, lr, BALANCE, prompt_steps=0) for lr in some]
        state = State.start(flat.expand(len(some), -1).to(on), steps)
        train_stack(state, courses, pool, shape, lambda _: None)
        tuned += [FineTuned(one, shape, dtype) for one in state.flat]
    return tuned


def finetune(
    model: Path,
    out: Path,
    problems: Sequence[Problem],
    *,
    steps: int,
    lr: float,
    device: str = "auto",
    batch: int = FINETUNING_BATCH,
) -> Path:
    """Train a model on the answers to `problems` into `out`."""
    check_output(out, overwrite=None)
    (tuned,) = finetune_many(model, problems, [lr], steps=steps, device=device, batch=batch)
    return tuned.write(out)
