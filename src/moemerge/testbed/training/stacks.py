"""Stacks of models that train together, from jobs to finished weights."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from moemerge.checkpoint.output import writing
from moemerge.errors import CheckpointError, UsageError
from moemerge.runtime.files import lock_folder
from moemerge.runtime.journals import saved_path
from moemerge.runtime.progress import Progress
from moemerge.testbed.network.layout import Shape, initial
from moemerge.testbed.training.data import (
    BALANCE,
    POOL_ROWS,
    PRESETS,
    PROMPT_SHARE,
    REGIMES,
    Mixture,
    Pool,
    Preset,
    base_mixture,
    plan,
    pool_of,
    specialist_mixture,
)
from moemerge.testbed.training.optimise import Course, State, train_stack

KEY_FILE = "key.json"
# Between two savings of a stack that is training: little is lost, and little time spent.
SAVE_SECONDS = 30.0


class Saved:
    """What a killed training leaves behind, so that it can go on and end with the same bytes.

    A hidden folder next to OUT (`.OUT.training`): `key.json` says what was trained, each stack
    of models has a file of tensors, which is replaced as a whole while the stack trains.
    """

    def __init__(self, out: Path, key: Mapping[str, Any], *, resume: bool) -> None:
        self.folder = saved_path(out)
        self._last = time.monotonic()
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.folder, out)
        try:
            stored = _read_key(self.folder)
            if resume and stored is not None:
                _compare(stored, dict(key), out)
                return
            with writing(self.folder):
                for path in self.folder.iterdir():
                    path.unlink()
                (self.folder / KEY_FILE).write_text(json.dumps(key, indent=1))
        except BaseException:
            self.close()
            raise

    def load(self, name: str) -> dict[str, Tensor] | None:
        """The tensors of a stack as they were last saved, if they were."""
        path = self.folder / f"{name}.pt"
        if not path.exists():
            return None
        try:
            tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, OSError, EOFError) as error:
            raise CheckpointError(
                f"{path} cannot be read: {error}", hint="start anew without `resume`"
            ) from error
        return tensors

    def save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        path = self.folder / f"{name}.pt"
        with writing(path):
            torch.save(dict(tensors), path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)
        self._last = time.monotonic()

    def due(self) -> bool:
        """Whether it is time to save again."""
        return time.monotonic() - self._last >= SAVE_SECONDS

    def remove(self) -> None:
        """All is done: nothing needs to be kept."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Leave it for a later run."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _lock(folder: Path, out: Path) -> int | None:
    """Held as long as the training runs; None where the file system knows no locks."""
    try:
        return lock_folder(folder)
    except BlockingIOError:
        raise CheckpointError(
            f"another training is writing {out} ({folder} is in use)",
            hint="wait for it, or choose another output folder",
        ) from None


def _read_key(folder: Path) -> dict[str, Any] | None:
    try:
        key: dict[str, Any] = json.loads((folder / KEY_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return key


def _compare(stored: dict[str, Any], now: dict[str, Any], out: Path) -> None:
    now = json.loads(json.dumps(now))
    unlike = [
        f"{name}: {stored.get(name)} then, {now.get(name)} now"
        for name in dict.fromkeys([*stored, *now])
        if stored.get(name) != now.get(name)
    ]
    if unlike:
        raise UsageError(
            f"{out} cannot be resumed: the killed training was another one\n  "
            + "\n  ".join(unlike),
            hint="repeat its settings, or start anew without `resume`",
        )


# Models of one stack. A GPU trains several at nearly the price of one; a CPU gains nothing, and
# one at a time gives the same bytes whatever else is being trained.
STACKED = {"cuda": 16, "cpu": 1}
_LAST_STEPS = 50  # whose mean loss is told
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Job:
    """One set to train."""

    out: Path
    preset: str
    regime: str
    arch: str
    seed: int
    domains: tuple[str, ...]
    steps_scale: float = 1.0

    @property
    def kind(self) -> tuple[str, str, tuple[str, ...], float]:
        """Jobs of one kind have models of one shape and length of training."""
        return self.preset, self.arch, self.domains, self.steps_scale

    @property
    def base_steps(self) -> int:
        return _scaled(PRESETS[self.preset].base_steps, self.steps_scale)

    @property
    def specialist_steps(self) -> int:
        return _scaled(PRESETS[self.preset].specialist_steps, self.steps_scale)


@dataclass(frozen=True)
class TrainedWeights:
    """A model's weights and its loss at the end."""

    flat: Tensor  # (parameters,), on the CPU
    loss: float


@dataclass
class Results:
    """Bases by kind and seed, shared by jobs; specialists by job and domain."""

    bases: dict[tuple[object, int], TrainedWeights] = field(default_factory=dict)
    specialists: dict[tuple[Job, str], TrainedWeights] = field(default_factory=dict)

    def base(self, job: Job) -> TrainedWeights:
        return self.bases[job.kind, job.seed]


def total_steps(jobs: Sequence[Job]) -> int:
    """Steps of all models, each base once."""
    bases = {(job.kind, job.seed): job.base_steps for job in jobs}
    return sum(bases.values()) + sum(job.specialist_steps * len(job.domains) for job in jobs)


def train_jobs(
    jobs: Sequence[Job], device: torch.device, saved: Saved, progress: Progress
) -> Iterator[tuple[Job, Results]]:
    """Train all bases, then all specialists, as many at once as the device likes.

    A job is told as soon as its models are done, with all results so far.
    """
    results = Results()
    for number, kind in enumerate(dict.fromkeys(job.kind for job in jobs)):
        own = [job for job in jobs if job.kind == kind]
        trainer = _Trainer(own[0], device, saved, progress, f"{number}")
        trainer.bases(own, results)
        for job in trainer.specialists(own, results):
            yield job, results


class _Trainer:
    """Trains jobs of one kind."""

    def __init__(
        self, job: Job, device: torch.device, saved: Saved, progress: Progress, name: str
    ) -> None:
        self._preset: Preset = PRESETS[job.preset]
        self._shape: Shape = self._preset.shape(job.arch)
        self._device, self._saved, self._progress, self._name = device, saved, progress, name
        # A short run needs no large pool.
        draws = job.base_steps * self._preset.batch
        self._pool: Pool = pool_of(min(POOL_ROWS, draws))

    def bases(self, jobs: Sequence[Job], results: Results) -> None:
        seeds = dict.fromkeys(job.seed for job in jobs)
        for number, some in enumerate(chunks(list(seeds), self._device)):
            steps = jobs[0].base_steps
            courses = [
                self._course(
                    base_mixture(jobs[0].domains), steps, derived_seed(seed, "base"),
                    lr=self._preset.base_lr, prompt_steps=int(steps * PROMPT_SHARE),
                )
                for seed in some
            ]  # fmt: skip
            start = torch.stack([initial(self._shape, derived_seed(s, "start")) for s in some])
            trained = self._train(f"base-{number}", start, courses)
            results.bases.update({(jobs[0].kind, s): t for s, t in zip(some, trained, strict=True)})

    def specialists(self, jobs: Sequence[Job], results: Results) -> Iterator[Job]:
        """Jobs as they are done."""
        wanted = [(job, domain) for job in jobs for domain in job.domains]
        for number, some in enumerate(chunks(wanted, self._device)):
            courses = [self._specialist(job, domain) for job, domain in some]
            start = torch.stack([results.base(job).flat for job, _ in some])
            trained = self._train(f"specialists-{number}", start, courses)
            results.specialists.update(zip(some, trained, strict=True))
            # The last of its specialists was in this stack.
            yield from (job for job, domain in some if domain == job.domains[-1])

    def _specialist(self, job: Job, domain: str) -> Course:
        regime = REGIMES[job.regime]
        return self._course(
            specialist_mixture(domain),
            job.specialist_steps,
            derived_seed(job.seed, domain),
            lr=self._preset.specialist_lr * regime.weights,
            routers=regime.routers,
            balance=regime.balance,
        )

    def _course(
        self, mixture: Mixture, steps: int, seed: int, *, lr: float,
        routers: float = 1.0, balance: float = 1.0, prompt_steps: int = 0,
    ) -> Course:  # fmt: skip
        rows = plan(self._pool, mixture, steps=steps, batch=self._preset.batch, seed=seed)
        return Course(rows, lr, lr * routers, BALANCE * balance, prompt_steps)

    def _train(self, name: str, start: Tensor, courses: Sequence[Course]) -> list[TrainedWeights]:
        name = f"{self._name}-{name}"
        steps, models = len(courses[0].rows), len(courses)
        stored = self._saved.load(name)
        if stored is None:
            state = State.start(start.to(self._device), steps)
        else:
            state = State(**{key: value.to(self._device) for key, value in stored.items()})
            self._progress.advance(int(state.step) * models)
        first, began = int(state.step), time.monotonic()
        train_stack(state, courses, self._pool, self._shape, self._reporter(name, state, models))
        if first < steps:
            self._saved.save(name, state.tensors())
            rate = (steps - first) / (time.monotonic() - began)
            last = state.losses[-_LAST_STEPS:].mean().item()
            self._progress.note(
                f"{name}: {models} model(s), {steps} steps, {rate:.0f} steps/s, loss {last:.3f}"
            )
        losses = state.losses[-_LAST_STEPS:].mean(0).tolist()
        flats = state.flat.cpu()
        return [TrainedWeights(flat, loss) for flat, loss in zip(flats, losses, strict=True)]

    def _reporter(self, name: str, state: State, models: int) -> Callable[[int], None]:
        def report(steps: int) -> None:
            self._progress.advance(steps * models)
            if self._saved.due():
                self._saved.save(name, state.tensors())

        return report


def derived_seed(seed: int, what: str) -> int:
    """A seed of its own for each purpose."""
    digest = blake2b(f"{seed}/{what}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def _scaled(steps: int, scale: float) -> int:
    return max(1, round(steps * scale))


def chunks(items: Sequence[_Item], device: torch.device) -> Iterator[Sequence[_Item]]:
    size = STACKED[device.type]
    for start in range(0, len(items), size):
        yield items[start : start + size]
