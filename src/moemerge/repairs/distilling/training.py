"""Train a student on its teachers' stored distributions.

Every step takes rows of every domain. A domain's loss is the mean over its positions in the step,
and the step's loss is the weighted mean over domains, as in every other repair. Held-out rows
choose the learning rate, the step whose weights are kept, and when to stop, by the loss that is
trained: the divergence from the teachers, mixed with the next-token loss if that is requested.
"""

from __future__ import annotations

import functools
import math
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import torch
from torch import Tensor

from moemerge.errors import NumericalError
from moemerge.repairs.distilling.job import DistillJob
from moemerge.repairs.distilling.optimisers import make_optimiser
from moemerge.repairs.distilling.student import Student
from moemerge.repairs.distilling.teachers import (
    TeacherRows,
    TopTokens,
    divergence,
    next_token_loss,
    positions,
)
from moemerge.routing.search import lowest
from moemerge.runtime.progress import Progress
from moemerge.runtime.timing import Stopwatch

WARMUP: Final = 0.1  # share of the steps in which the rate rises
LAST_RATE: Final = 0.1  # of the highest rate, at the last step
CLIP: Final = 1.0  # largest norm of a gradient
EVALUATIONS: Final = 5  # of a training, evenly spread
PATIENCE: Final = 2  # evaluations without a gain after which a training stops
# Learning rates that `auto` chooses from.
RATES: Final = tuple(10.0 ** (exponent / 2) for exponent in range(-12, -3))
TRIAL: Final = 0.25  # of the steps: how long a rate is tried


@dataclass
class Progressed:
    """How far a training is: all that is needed to continue it."""

    rate: float
    tried_rates: dict[float, float] = field(default_factory=dict)  # held-out loss of each
    step: int = 0
    # On held-out rows, of each domain by step (step 0 is the model before training): the divergence
    # from the teacher, and the loss that is trained, which chooses.
    held_out: dict[int, dict[str, float]] = field(default_factory=dict)
    held_out_losses: dict[int, dict[str, float]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)  # of every step, on its own rows
    best_step: int = 0
    best: dict[str, Tensor] = field(default_factory=dict)  # weights of the best step

    def to_json(self) -> dict[str, Any]:
        """Return everything but the weights, as plain data."""
        return {
            "rate": self.rate,
            "tried_rates": list(self.tried_rates.items()),
            "step": self.step,
            "held_out": list(self.held_out.items()),
            "held_out_losses": list(self.held_out_losses.items()),
            "losses": self.losses,
            "best_step": self.best_step,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], best: dict[str, Tensor] | None = None) -> Self:
        """Return the state that `to_json` wrote, with the weights of its best step."""
        names = ("tried_rates", "held_out", "held_out_losses")
        pairs = {name: dict(map(tuple, data[name])) for name in names}
        return cls(**{**data, **pairs}, best=best or {})


class Trainer:
    """A student and its teachers' rows."""

    def __init__(
        self,
        job: DistillJob,
        student: Student,
        teachers: Mapping[str, TeacherRows],
        stopwatch: Stopwatch,
        progress: Progress,
    ) -> None:
        self.job = job
        self.settings = job.request.settings
        self.student = student
        self.teachers = teachers
        total = sum(job.weights.values())
        self.weights = {name: weight / total for name, weight in job.weights.items()}
        self.ranks = job.ranks
        self.stopwatch = stopwatch
        self.progress = progress
        self.holds_out = all(rows.domain.holdout for rows in teachers.values())

    # --- the loss ---

    def held_out(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return each domain's mean divergence on its held-out rows, and its mean loss."""
        share = self.settings.next_token
        divergences, losses = {}, {}
        with self.student.evaluating():
            for name, rows in self.teachers.items():
                places = list(range(len(rows.domain.holdout)))
                sums = torch.zeros(2, dtype=torch.float64, device=self.student.device)
                for part, weight in self._micro_batches(rows, places, holdout=True):
                    sums += weight * torch.stack(
                        self._losses(rows, part, holdout=True, next_token=share > 0)
                    )
                self.ranks.all_reduce(sums)
                found, following = (sums / sum(map(positions, rows.domain.holdout))).tolist()
                divergences[name] = found
                losses[name] = (1.0 - share) * found + share * following
        return divergences, losses

    def mean(self, by_domain: Mapping[str, float]) -> float:
        """Return the weighted mean over domains."""
        return sum(self.weights[name] * value for name, value in by_domain.items())

    def _losses(
        self, rows: TeacherRows, places: Sequence[int], *, holdout: bool, next_token: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the divergence and the next-token loss (0 unless requested), summed over all
        positions of these rows."""
        own = rows.domain.holdout if holdout else rows.domain.rows
        device = self.student.device
        ids = torch.nn.utils.rnn.pad_sequence([own[at] for at in places], batch_first=True)
        lengths = torch.tensor([len(own[at]) for at in places])
        mask = torch.arange(ids.shape[1]) < lengths[:, None]  # (rows, length)
        taught = [rows.row(at, holdout=holdout) for at in places]
        teacher = TopTokens(
            torch.cat([top.tokens for top in taught]), torch.cat([top.log_probs for top in taught])
        ).to(device)
        following = mask.roll(-1, 1)
        following[:, -1] = False
        predicted = following.flatten().nonzero().flatten().to(device)  # tokens with a next one
        ids = ids.to(device)
        # The gradient of a selection by indices takes less time than that of one by a mask.
        logits = self.student.logits(ids).flatten(0, 1).index_select(0, predicted)
        found = divergence(logits, teacher).sum()
        if not next_token:
            return found, torch.zeros_like(found)
        return found, next_token_loss(logits, ids.flatten()[predicted + 1]).sum()

    def _micro_batches(
        self, rows: TeacherRows, places: Sequence[int], *, holdout: bool
    ) -> Iterator[tuple[list[int], float]]:
        """Yield this rank's rows in groups of at most `micro_tokens` padded tokens, with weight 1.

        All ranks run the same number of groups, since they gather weights from each other. A rank
        with fewer groups runs a short row with weight 0.
        """
        own = rows.domain.holdout if holdout else rows.domain.rows
        usable = [at for at in places if len(own[at]) > 1]
        groups = [self._groups(own, usable, rank) for rank in range(self.ranks.count)]
        mine = groups[self.ranks.rank]
        yield from ((group, 1.0) for group in mine)
        for _ in range(max(map(len, groups)) - len(mine)):
            yield [min(usable, key=lambda at: len(own[at]))], 0.0

    def _groups(self, own: Sequence[Tensor], places: Sequence[int], rank: int) -> list[list[int]]:
        groups: list[list[int]] = []
        mine = (at for at in places if at % self.ranks.count == rank)
        for at in sorted(mine, key=lambda at: -len(own[at])):
            longest = len(own[groups[-1][0]]) if groups else 0
            if not groups or longest * (len(groups[-1]) + 1) > self.job.size.micro_tokens:
                groups.append([])
            groups[-1].append(at)
        return groups

    # --- steps ---

    def step(self, number: int, optimiser: torch.optim.Optimizer) -> float:
        """Take step `number` (from 0); return its loss."""
        torch.manual_seed(self.settings.seed + number)
        total = torch.zeros((), dtype=torch.float64, device=self.student.device)
        factor = self.ranks.count if self.student.shares_weights else 1
        share = self.settings.next_token
        for name, rows in self.teachers.items():
            places = self._places(name, rows, number)
            count = sum(positions(rows.domain.rows[at]) for at in places)
            scale = self.weights[name] / max(1, count)
            for part, weight in self._micro_batches(rows, places, holdout=False):
                found, following = self._losses(rows, part, holdout=False, next_token=share > 0)
                loss = (1.0 - share) * found
                if share:
                    loss = loss + share * following
                loss = weight * scale * loss
                (factor * loss).backward()  # type: ignore[no-untyped-call]
                total += loss.detach().double()
        self.ranks.all_reduce(total, *self.student.gradients())
        loss_value = float(total)
        if not math.isfinite(loss_value):
            raise NumericalError(
                f"the loss of step {number + 1} is {loss_value}", hint="lower `learning_rate`"
            )
        self.student.update(optimiser, CLIP)
        return loss_value

    def _places(self, name: str, rows: TeacherRows, step: int) -> list[int]:
        """Return which rows of a domain step `step` reads: each epoch in another order."""
        total = sum(len(one.domain.rows) for one in self.teachers.values())
        count = len(rows.domain.rows)
        share = min(count, max(1, round(self.settings.batch * count / total)))
        taken = []
        for at in range(step * share, (step + 1) * share):
            epoch, place = divmod(at, count)
            taken.append(_order(self.settings.seed, name, epoch, count)[place])
        return taken

    def rate(self, number: int, highest: float, steps: int) -> float:
        """Return the learning rate of step `number`: a linear warm-up, then a linear decay."""
        rising = (number + 1) / max(1.0, WARMUP * steps)
        return highest * min(1.0, rising) * (1.0 - (1.0 - LAST_RATE) * number / steps)

    def optimiser(self, rate: float) -> torch.optim.Optimizer:
        return make_optimiser(self.job.optimiser, list(self.student.masters.values()), rate)

    # --- a whole training ---

    def train(
        self,
        state: Progressed,
        optimiser: torch.optim.Optimizer,
        save: Callable[[Progressed, torch.optim.Optimizer, Student], None],
    ) -> None:
        """Train from `state.step` on, and leave the student with the best weights."""
        steps = self.job.steps
        due = {round(steps * (n + 1) / EVALUATIONS) for n in range(EVALUATIONS)} | {steps}
        if not state.step and self.holds_out:
            with self.stopwatch.span("evaluate"):
                state.held_out[0], state.held_out_losses[0] = self.held_out()
            state.best = self.student.snapshot(self.job.snapshot_device)
        self.progress.start("distilling", steps, unit="steps")
        self.progress.advance(state.step)
        while state.step < steps and not self._gained_nothing(state):
            set_rate(optimiser, self.rate(state.step, state.rate, steps))
            with self.stopwatch.span("train"):
                state.losses.append(self.step(state.step, optimiser))
            state.step += 1
            self.progress.advance(1)
            self.progress.status(f"loss {state.losses[-1]:.4g}")
            if state.step in due:
                with self.stopwatch.span("evaluate"):
                    self._evaluate(state)
                if state.step < steps:
                    save(state, optimiser, self.student)
        self.progress.finish()
        if self.holds_out and state.best_step != state.step:
            self.student.load(state.best)

    def _evaluate(self, state: Progressed) -> None:
        if not self.holds_out:
            state.best_step = state.step
            return
        state.held_out[state.step], losses = self.held_out()
        state.held_out_losses[state.step] = losses
        if self.mean(losses) < self.mean(state.held_out_losses[state.best_step]):
            state.best_step = state.step
            state.best = self.student.snapshot(self.job.snapshot_device)

    def _gained_nothing(self, state: Progressed) -> bool:
        """Return whether the last evaluations were all worse than an earlier one."""
        since = [step for step in state.held_out if step > state.best_step]
        return len(since) >= PATIENCE

    # --- the rate ---

    def choose_rate(self) -> tuple[float, dict[float, float]]:
        """Return the best rate, and the held-out loss after a short training with each tried.

        A rate at which training diverges counts as infinitely bad.
        """
        start = self.student.snapshot(self.job.snapshot_device)
        steps = max(1, round(TRIAL * self.job.steps))

        def error(rate: float) -> float:
            found = self._trial(rate, steps)
            self.student.load(start)
            return found

        return lowest(RATES, self.job.first_rate, error)

    def _trial(self, rate: float, steps: int) -> float:
        self.progress.start(f"trying the rate {rate:.2g}", steps, unit="steps")
        optimiser = self.optimiser(rate)
        try:
            for number in range(steps):
                set_rate(optimiser, self.rate(number, rate, steps))
                self.step(number, optimiser)
                self.progress.advance(1)
            result = self.mean(self.held_out()[1])
        except NumericalError:
            result = math.inf
        self.progress.finish()
        return result if math.isfinite(result) else math.inf


@functools.lru_cache(maxsize=64)  # a step asks for every row's place
def _order(seed: int, name: str, epoch: int, count: int) -> list[int]:
    """Return the order in which an epoch reads a domain's rows."""
    order = list(range(count))
    random.Random(f"{seed} {zlib.crc32(name.encode())} {epoch}").shuffle(order)
    return order


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate
