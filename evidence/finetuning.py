"""Fine-tune a checkpoint, such as a merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from evidence.data import BALANCE, make_pool, plan
from evidence.layout import Shape
from evidence.optimise import Course, State, train_stack
from evidence.scoring import continue_texts, load_flat
from evidence.training import chunks, write_model
from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.output import check_output
from moemerge.errors import UsageError
from moemerge.lab.testbed.demo import LONGEST_ANSWER
from moemerge.lab.testbed.tasks import Problem, check_all
from moemerge.runtime.devices import resolve_device

FINETUNING_BATCH = 128
_SEED = 0  # of the order of the rows


@dataclass(frozen=True)
class FineTuned:
    """A fine-tuned model in memory."""

    flat: Tensor  # (parameters,)
    shape: Shape
    dtype: torch.dtype  # of the original checkpoint

    def write(self, out: Path) -> Path:
        check_output(out, overwrite=None)
        write_model(out, self.flat, self.shape, self.dtype)
        return out

    def accuracy(self, problems: Sequence[Problem]) -> float:
        """Return the share of problems that it solves."""
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
    """Fine-tune a model on the answers to `problems`, once per learning rate."""
    if not problems:
        raise UsageError("there are no problems to train on")
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
    """Fine-tune a model on the answers to `problems` and write it to `out`."""
    check_output(out, overwrite=None)
    (tuned,) = finetune_many(model, problems, [lr], steps=steps, device=device, batch=batch)
    return tuned.write(out)
