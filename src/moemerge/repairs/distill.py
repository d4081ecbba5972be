"""Distil: train the merged model on the next-token distributions of its sources.

Each source p teaches on its own text. With q the student's distribution and a share s of the
next-token loss, a step lowers the weighted mean over domains of

    (1 − s) · KL(p ‖ q) − s · log q(next token),

each averaged over the domain's positions in the step. Held-out rows choose the learning rate, the
step whose weights are kept, and when to stop, by the loss that is trained. They are evaluated with
the weights that are written.
"""

from __future__ import annotations

import functools
import math
import os
import random
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor

from moemerge.checkpoint import format_size
from moemerge.checkpoint.output import writing
from moemerge.config.repair_settings import DistillSettings
from moemerge.errors import ArchitectureError, DataError, NumericalError, ResourceError
from moemerge.forward.settings import HEADROOM, vocabulary_size
from moemerge.forward.trainable import TrainedLayout
from moemerge.repairs.adafactor import OptimiserName, make_optimiser
from moemerge.repairs.distill_memory import TrainingSize
from moemerge.repairs.distill_report import DistillReport
from moemerge.repairs.distill_student import Student
from moemerge.repairs.distill_teachers import (
    TeacherRows,
    TopTokens,
    divergence,
    next_token_loss,
    positions,
    run_teacher,
)
from moemerge.repairs.inputs import base_notices, check_source_text
from moemerge.repairs.layer import Job, repair
from moemerge.repairs.output import RefusedResultError
from moemerge.repairs.states import SavedStates, mark_complete
from moemerge.routing.search import lowest
from moemerge.runtime.devices import (
    available_memory,
    deterministic,
    is_out_of_memory,
    release_cached,
)

LEAST_STEPS: Final = 100
EPOCHS: Final = 2
MOST_EPOCHS: Final = 16
WARMUP: Final = 0.1  # share of the steps in which the rate rises
LAST_RATE: Final = 0.1  # of the highest rate, at the last step
CLIP: Final = 1.0  # largest norm of a gradient
EVALUATIONS: Final = 5  # of a training, evenly spread
PATIENCE: Final = 2  # evaluations without a gain after which a training stops
# Learning rates that `auto` chooses from, and where the search begins.
RATES: Final = tuple(10.0 ** (exponent / 2) for exponent in range(-12, -3))
FIRST_RATE: Final[Mapping[OptimiserName, float]] = {"adamw": 1e-4, "adafactor": 1e-3}
LORA_RATE: Final = 1e-3
TRIAL: Final = 0.25  # of the steps: how long a rate is tried
SAVE_MEMORY: Final = (
    'train adapters (`lora=16`), use `optimiser="adafactor"`, or give shorter rows (`max_length`)'
)
# A state is stored if that takes at most this share of the time since the last one.
SAVING_SHARE: Final = 0.1
DISK_RATE: Final = 1e9  # bytes per second, assumed


@dataclass(frozen=True)
class Plan:
    """What is trained, how, and the memory that it takes."""

    layout: TrainedLayout
    vocabulary: int
    optimiser: OptimiserName
    size: TrainingSize
    steps: int

    @property
    def needed_bytes(self) -> int:
        """Return the estimated peak memory of the training on its device."""
        return self.size.needed_bytes(self.optimiser)


def prepare(job: Job[DistillSettings]) -> None:
    """Choose what is trained, and refuse models, text and devices that do not suit."""
    merged = job.merged
    if merged.checkpoint.quantisation is not None or merged.architecture.quantised:
        raise ArchitectureError(
            f"{merged.label} is quantised, and training needs floats",
            hint="write it in floats first: `moemerge merge` with passthrough does",
        )
    job.experts = {}  # a teacher may have other experts
    job.notices += [*base_notices(job.request, merged, job.sources), *job.text.notices]
    hint = "a source is a model that was merged"
    job.notices += check_source_text(merged, job.sources, job.text, hint)
    vocabulary = vocabulary_size(merged)
    for source in job.sources.values():
        if vocabulary_size(source) != vocabulary:
            raise ArchitectureError(
                f"source {source.name!r} predicts {vocabulary_size(source)} tokens, "
                f"{merged.label} {vocabulary}",
                hint="a teacher needs the student's vocabulary",
            )
    for domain in job.text.domains:
        for kind, rows in (("rows", domain.rows), ("held-out rows", domain.holdout)):
            if rows and not any(map(positions, rows)):
                raise DataError(
                    f"domain {domain.name!r}: none of its {kind} has two tokens",
                    hint="a next token is predicted from those before it: give longer text",
                )
    job.state = plan = make_plan(job, vocabulary)
    needed, free = plan.needed_bytes, available_memory(job.device)
    if needed > free * HEADROOM:
        raise ResourceError(
            f"distillation needs about {format_size(needed)} on {job.device}, and "
            f"{format_size(int(free * HEADROOM))} are usable",
            hint=SAVE_MEMORY,
        )
    job.key |= {
        "ranks": job.ranks.count,
        "steps": plan.steps,
        "micro_tokens": plan.size.micro_tokens,
        "optimiser": plan.optimiser,
    }
    tokens = {domain.name: domain.tokens for domain in job.text.domains}
    job.fields |= {
        "offload": "device",
        "memory": needed,
        "parameters": plan.size.parameters,
        "optimiser": plan.optimiser,
        "tokens": tokens,
    }
    job.progress.note(
        f"distilling {plan.size.parameters:,} parameters in {plan.steps} steps over "
        f"{sum(tokens.values()):,} tokens; about {format_size(needed)} on {job.device} "
        f"({plan.optimiser})"
    )


def make_plan(job: Job[DistillSettings], vocabulary: int) -> Plan:
    """Choose the optimiser, the number of steps, and whether activations are recomputed."""
    settings, merged = job.settings, job.merged
    # Of some layers only their tensors are trained, of all layers also the others.
    count = merged.architecture.num_layers
    layers = frozenset(settings.layers.resolve(count))
    layout = TrainedLayout(
        merged,
        settings.only,
        adapted=settings.lora is not None,
        layers=layers if len(layers) < count else None,
    )

    def size(*, recompute: bool) -> TrainingSize:
        return TrainingSize.of(
            merged,
            layout,
            job.stream.dtype,
            job.device,
            vocabulary=vocabulary,
            recompute=recompute,
            lora=settings.lora,
            shards=job.ranks.count if job.ranks.can_shard(job.device) else 1,
        )

    optimiser = settings.optimiser
    if optimiser == "auto":
        adamw = fits(job, size(recompute=True).needed_bytes("adamw"))
        optimiser = "adamw" if adamw else "adafactor"
    recompute, kept = settings.recompute, size(recompute=False)
    if recompute is None:  # adapters are for little memory
        needed = kept.needed_bytes(optimiser) + kept.optimised_bytes(optimiser)
        recompute = kept.adapters is not None or not fits(job, needed)
    epoch = max(1.0, sum(len(d.rows) for d in job.text.domains) / settings.batch)
    steps = round(min(max(LEAST_STEPS, EPOCHS * epoch), max(1.0, MOST_EPOCHS * epoch)))
    steps = steps if settings.steps == "auto" else int(settings.steps)
    return Plan(layout, vocabulary, optimiser, size(recompute=recompute), steps)


def fits(job: Job[DistillSettings], nbytes: int) -> bool:
    """Return whether the device of rank 0 has this much memory."""
    return job.ranks.broadcast_object(nbytes <= available_memory(job.device) * HEADROOM)


@repair("distill", prepare=prepare, report=DistillReport, whole=True)
def distill(job: Job[DistillSettings], settings: DistillSettings) -> None:
    """Train the merged model, and keep the weights with the lowest loss on held-out rows."""
    plan: Plan = job.state
    # By the memory that is free before the student is loaded.
    room = plan.needed_bytes + plan.size.optimised_bytes(plan.optimiser)
    snapshots = job.device if fits(job, room) else torch.device("cpu")
    states = TrainingStates(job, plan)
    with job.stopwatch.span("teachers"):
        teachers = {
            domain.name: run_teacher(
                job.sources[domain.name],
                domain,
                states.folder / "teachers" / f"{number}-rank{job.ranks.rank}",
                job.stream,
                k=settings.top_tokens,
                vocabulary=plan.vocabulary,
                progress=job.progress,
            )
            for number, domain in enumerate(job.text.domains)
        }
    states.keep_teachers()
    release_cached(job.device)  # what the teachers took
    with job.stopwatch.span("load"):
        student = Student(
            job.merged,
            plan.layout,
            job.device,
            job.stream.dtype,
            optimiser=plan.optimiser,
            recompute=plan.size.recompute,
            lora=settings.lora,
            seed=settings.seed,
            ranks=job.ranks,
        )
    trainer = Trainer(job, plan, student, teachers, snapshots)
    state, optimiser = states.load(trainer)
    try:
        with deterministic(job.device):
            if state is None:
                rate = settings.learning_rate
                tried: dict[float, float] = {}
                if rate == "auto":
                    with job.stopwatch.span("search for the rate"):
                        rate, tried = trainer.choose_rate()
                state = Progressed(float(rate), tried)
                optimiser = trainer.optimiser(state.rate)
            trainer.train(state, optimiser, states)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        message = f"distillation: out of memory on {job.device}"
        raise ResourceError(message, hint=SAVE_MEMORY) from error
    weights = student.state_dict()  # every rank takes part, and rank 0 gets it
    job.output.hold(plan.layout.written(weights) if job.ranks.leads else (), {})
    job.fields |= {
        "learning_rate": state.rate,
        "tried_rates": state.tried_rates,
        "steps": state.step,
        "kept_step": state.best_step,
        "losses": tuple(state.losses),
        "held_out": state.held_out,
        "held_out_losses": state.held_out_losses,
    }
    if state.held_out and state.best_step == 0:
        kept = "no step lowered the loss on held-out rows, so the merged weights are kept"
        job.notices.append(kept)
        if settings.strict:
            raise RefusedResultError(kept, hint="give more text, or leave `strict` out")


# --- training -------------------------------------------------------------------------------------


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
    """A student and its teachers' rows. Every step takes rows of every domain."""

    def __init__(
        self,
        job: Job[DistillSettings],
        plan: Plan,
        student: Student,
        teachers: Mapping[str, TeacherRows],
        snapshots: torch.device,
    ) -> None:
        """`snapshots` is where the best weights so far are kept."""
        self.job = job
        self.plan = plan
        self.settings = job.settings
        self.student = student
        self.teachers = teachers
        total = sum(job.weights.values())
        self.weights = {name: weight / total for name, weight in job.weights.items()}
        self.ranks = job.ranks
        self.snapshots = snapshots
        self.holds_out = all(rows.domain.holdout for rows in teachers.values())

    def train(
        self, state: Progressed, optimiser: torch.optim.Optimizer, states: TrainingStates
    ) -> None:
        """Train from `state.step` on, and leave the student with the best weights."""
        steps, progress, stopwatch = self.plan.steps, self.job.progress, self.job.stopwatch
        due = {round(steps * (n + 1) / EVALUATIONS) for n in range(EVALUATIONS)} | {steps}
        if not state.step and self.holds_out:
            with stopwatch.span("evaluate"):
                state.held_out[0], state.held_out_losses[0] = self.held_out()
            state.best = self.student.snapshot(self.snapshots)
        progress.start("distilling", steps, unit="steps")
        progress.advance(state.step)
        while state.step < steps:
            since = [step for step in state.held_out if step > state.best_step]
            if len(since) >= PATIENCE:  # the last evaluations were all worse than an earlier one
                break
            set_rate(optimiser, self.rate(state.step, state.rate, steps))
            with stopwatch.span("train"):
                state.losses.append(self.step(state.step, optimiser))
            state.step += 1
            progress.advance(1)
            progress.status(f"loss {state.losses[-1]:.4g}")
            if state.step in due:
                with stopwatch.span("evaluate"):
                    self._evaluate(state)
                if state.step < steps:
                    states.save(state, optimiser, self.student)
        progress.finish()
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
            state.best = self.student.snapshot(self.snapshots)

    # --- the rate ---

    def choose_rate(self) -> tuple[float, dict[float, float]]:
        """Return the best rate, and the held-out loss after a short training with each tried.

        A rate at which training diverges counts as infinitely bad.
        """
        start = self.student.snapshot(self.snapshots)
        steps = max(1, round(TRIAL * self.plan.steps))

        def error(rate: float) -> float:
            found = self._trial(rate, steps)
            self.student.load(start)
            return found

        lora = self.settings.lora is not None
        first = LORA_RATE if lora else FIRST_RATE[self.plan.optimiser]
        return lowest(RATES, first, error)

    def _trial(self, rate: float, steps: int) -> float:
        self.job.progress.start(f"trying the rate {rate:.2g}", steps, unit="steps")
        optimiser = self.optimiser(rate)
        try:
            for number in range(steps):
                set_rate(optimiser, self.rate(number, rate, steps))
                self.step(number, optimiser)
                self.job.progress.advance(1)
            result = self.mean(self.held_out()[1])
        except NumericalError:
            result = math.inf
        self.job.progress.finish()
        return result if math.isfinite(result) else math.inf

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
        return make_optimiser(self.plan.optimiser, list(self.student.masters.values()), rate)

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
            if not groups or longest * (len(groups[-1]) + 1) > self.plan.size.micro_tokens:
                groups.append([])
            groups[-1].append(at)
        return groups


@functools.lru_cache(maxsize=64)  # a step asks for every row's place
def _order(seed: int, name: str, epoch: int, count: int) -> list[int]:
    """Return the order in which an epoch reads a domain's rows."""
    order = list(range(count))
    random.Random(f"{seed} {zlib.crc32(name.encode())} {epoch}").shuffle(order)
    return order


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate


class TrainingStates:
    """The folder next to OUT with the teachers' distributions and the last training state."""

    def __init__(self, job: Job[DistillSettings], plan: Plan) -> None:
        """Open the folder. It stays after an interrupt, and goes once OUT is complete."""
        self._job = job
        self._ranks = job.ranks
        # Writing a state of a large model takes a minute. A resumed run that starts from an older
        # state takes the same steps again.
        stored = 2 * plan.size.optimised_bytes(plan.optimiser)
        stored += plan.size.state_bytes(plan.optimiser)
        self._pause = stored / DISK_RATE / SAVING_SHARE  # seconds between two states
        self._last = time.perf_counter()
        self._saved: SavedStates | None = None
        if job.ranks.leads:
            replaced = job.request.replaces_unfinished
            self._saved = SavedStates(job.request.out, job.full_key(), replace=replaced)
            job.output.states = self._saved
        folder = job.ranks.broadcast_object(self._saved.folder if self._saved is not None else None)
        assert folder is not None
        self.folder: Path = folder

    def keep_teachers(self) -> None:
        """Mark the stored distributions as step 0, so that a resumed run uses them."""
        self._ranks.barrier()
        if self._saved is not None and self._saved.latest() is None:
            folder = self.folder / "checkpoint-0"
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                mark_complete(folder)

    def save(self, state: Progressed, optimiser: torch.optim.Optimizer, student: Student) -> None:
        """Store a training state. Each rank writes its own share."""
        due = time.perf_counter() - self._last >= self._pause
        if not self._ranks.broadcast_object(due):
            return
        folder = self.folder / f"checkpoint-{state.step}"
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(
                {
                    "state": state.to_json(),
                    "best": {} if state.best_step == state.step else state.best,
                    "weights": student.snapshot(),
                    "optimiser": optimiser.state_dict(),
                },
                folder / self._file,
            )
            self._ranks.barrier()
            if self._saved is not None:
                mark_complete(folder)
                self._saved.prune()
        self._last = time.perf_counter()

    @property
    def _file(self) -> str:
        return f"state-{self._ranks.rank}.pt"

    def load(self, trainer: Trainer) -> tuple[Progressed | None, torch.optim.Optimizer]:
        """Return the last state and its optimiser, and set the student's weights to it."""
        latest = self._ranks.broadcast_object(None if self._saved is None else self._saved.latest())
        if latest is None or not os.path.exists(latest / self._file):
            return None, trainer.optimiser(0.0)
        stored = torch.load(latest / self._file, map_location="cpu", weights_only=True)
        state = Progressed.from_json(stored["state"], stored["best"] or stored["weights"])
        self._job.output.resumed = state.step  # steps that are not repeated
        self._job.progress.note(f"resuming a killed run after step {state.step}")
        trainer.student.load(stored["weights"])
        optimiser = trainer.optimiser(state.rate)
        optimiser.load_state_dict(stored["optimiser"])
        return state, optimiser
