"""Train a base and its specialists, and write them as a set of models.

An interrupted training resumes when it is repeated: the state of the models in training is saved in
a hidden folder next to OUT, under a digest of all settings.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor

from evidence.data import (
    BALANCE,
    POOL_ROWS,
    PRESETS,
    PROMPT_SHARE,
    REGIMES,
    Mixture,
    base_mixture,
    plan,
    pool_of,
    specialist_mixture,
)
from evidence.layout import (
    ARCHITECTURES,
    Shape,
    character_tokenizer,
    config_of,
    initial,
    router_slice,
    to_tensors,
)
from evidence.optimise import Course, State, train_stack
from evidence.scoring import accuracy_many
from moemerge.checkpoint import CheckpointWriter, TensorInfo
from moemerge.checkpoint.output import OutputFolder, check_output
from moemerge.errors import UsageError
from moemerge.lab.testbed import BASE, DATA, MANIFEST, TrainedSet, open_set
from moemerge.lab.testbed.tasks import DOMAINS, problems
from moemerge.registry import did_you_mean
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.dtypes import dtype_name
from moemerge.runtime.progress import Progress, Silent
from moemerge.text.rows import write_rows
from moemerge.version import __version__

# Models that train together. A GPU trains several at nearly the cost of one. A CPU gains nothing,
# and one at a time gives the same bytes whatever else is trained.
STACKED = {"cuda": 16, "cpu": 1}
SAVE_SECONDS = 30.0  # between two saved states
TEST_PROBLEMS = 300  # per domain, for the accuracies in the manifest
TEST_SEED = 0
CALIBRATION_ROWS = 1000  # per domain
_LAST_STEPS = 50  # over which the final loss is averaged
_CLASSES = {"olmoe": "OlmoeForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
_ONE_SHARD = 2**62
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Job:
    """One set of models to train."""

    out: Path
    preset: str
    regime: str = "soft"
    arch: str = "olmoe"
    seed: int = 0
    domains: tuple[str, ...] = DOMAINS
    steps_scale: float = 1.0

    @property
    def kind(self) -> tuple[str, str, tuple[str, ...], float]:
        """Jobs of one kind have the same shape and number of steps."""
        return self.preset, self.arch, self.domains, self.steps_scale

    @property
    def shape(self) -> Shape:
        return PRESETS[self.preset].shape(self.arch)

    @property
    def base_steps(self) -> int:
        return max(1, round(PRESETS[self.preset].base_steps * self.steps_scale))

    @property
    def specialist_steps(self) -> int:
        return max(1, round(PRESETS[self.preset].specialist_steps * self.steps_scale))

    def check(self) -> None:
        choices: list[tuple[str, str, Collection[str]]] = [
            ("preset", self.preset, PRESETS),
            ("regime", self.regime, REGIMES),
            ("architecture", self.arch, ARCHITECTURES),
            *(("domain", domain, DOMAINS) for domain in self.domains),
        ]
        for what, name, known in choices:
            check_choice(what, name, known)
        if not self.domains or len(set(self.domains)) != len(self.domains):
            raise UsageError(f"domains are {list(self.domains)}, expected at least one, each once")
        if self.seed < 0 or not 0.0 < self.steps_scale < float("inf"):
            raise UsageError(
                f"seed is {self.seed} and steps scale {self.steps_scale:g}, expected a seed of at "
                "least 0 and a scale above 0"
            )


@dataclass(frozen=True)
class TrainedWeights:
    """A model's weights and its final loss."""

    flat: Tensor  # (parameters,), on the CPU
    loss: float


def check_choice(what: str, name: str, known: Collection[str]) -> None:
    """Refuse an unknown name."""
    if name not in known:
        raise UsageError(
            f"unknown {what} {name!r}{did_you_mean(name, known)}",
            hint=f"known: {', '.join(known)}",
        )


def train(
    jobs: Sequence[Job], *, device: str = "auto", progress: Progress | None = None
) -> list[TrainedSet]:
    """Train sets of models; a base that several sets share is trained once.

    Each set is written as soon as its models are finished. On a CPU, the same settings give the
    same bytes. Sets that exist and come from the same job are not trained again.
    """
    on = resolve_device(device)
    left = []
    for job in jobs:
        job.check()
        if not _is_finished(job, on.type):
            check_output(job.out, overwrite=None)
            left.append(job)
    if left:
        trainer = _Trainer(on, Silent() if progress is None else progress, left)
        for kind in dict.fromkeys(job.kind for job in left):
            trainer.run([job for job in left if job.kind == kind])
        trainer.finish()
    return [open_set(job.out) for job in jobs]


def _is_finished(job: Job, device: str) -> bool:
    if not (job.out / MANIFEST).exists():
        return False
    return bool(open_set(job.out).manifest.get("command") == _command(job, device))


class _Trainer:
    """Trains the bases of all jobs of one kind, then their specialists."""

    def __init__(self, device: torch.device, progress: Progress, jobs: Sequence[Job]) -> None:
        self._device, self._progress = device, progress
        self._saved = jobs[0].out.parent / f".{jobs[0].out.name}.training"
        self._last_save = time.monotonic()
        self._saved.mkdir(parents=True, exist_ok=True)
        bases = {(job.kind, job.seed): job.base_steps for job in jobs}
        steps = sum(bases.values()) + sum(job.specialist_steps * len(job.domains) for job in jobs)
        progress.start("training", steps, unit="steps")

    def finish(self) -> None:
        self._progress.finish()
        shutil.rmtree(self._saved, ignore_errors=True)

    def run(self, jobs: Sequence[Job]) -> None:
        """Train jobs of one kind and write their sets."""
        bases: dict[int, TrainedWeights] = {}
        for seeds in chunks(list(dict.fromkeys(job.seed for job in jobs)), self._device):
            courses = [self._base_course(jobs[0], seed) for seed in seeds]
            shape = jobs[0].shape
            start = torch.stack([initial(shape, derived_seed(s, "start")) for s in seeds])
            key: list[Any] = [jobs[0].kind, seeds]
            bases.update(zip(seeds, self._train(key, jobs[0], start, courses), strict=True))
        specialists: dict[tuple[Job, str], TrainedWeights] = {}
        for some in chunks([(job, d) for job in jobs for d in job.domains], self._device):
            courses = [self._specialist_course(job, domain) for job, domain in some]
            start = torch.stack([bases[job.seed].flat for job, _ in some])
            key = [[job.kind, job.regime, job.seed, domain] for job, domain in some]
            specialists.update(zip(some, self._train(key, jobs[0], start, courses), strict=True))
            for job in (job for job, domain in some if domain == job.domains[-1]):
                own = {domain: specialists[job, domain] for domain in job.domains}
                _write_set(job, bases[job.seed], own, self._device.type)

    def _base_course(self, job: Job, seed: int) -> Course:
        rows = self._rows(job, base_mixture(job.domains), job.base_steps, seed, "base")
        lr = PRESETS[job.preset].base_lr
        return Course(rows, lr, lr, BALANCE, prompt_steps=int(job.base_steps * PROMPT_SHARE))

    def _specialist_course(self, job: Job, domain: str) -> Course:
        regime = REGIMES[job.regime]
        mixture = specialist_mixture(domain)
        rows = self._rows(job, mixture, job.specialist_steps, job.seed, domain)
        lr = PRESETS[job.preset].specialist_lr * regime.weights
        return Course(rows, lr, lr * regime.routers, BALANCE * regime.balance, prompt_steps=0)

    def _rows(self, job: Job, mixture: Mixture, steps: int, seed: int, purpose: str) -> Tensor:
        batch, own_seed = PRESETS[job.preset].batch, derived_seed(seed, purpose)
        return plan(pool_of(pool_rows(job)), mixture, steps=steps, batch=batch, seed=own_seed)

    def _train(
        self, key: object, job: Job, start: Tensor, courses: Sequence[Course]
    ) -> list[TrainedWeights]:
        """Train a stack of models, or resume it from its saved state."""
        settings = json.dumps([key, self._device.type, torch.__version__, __version__])
        file = self._saved / f"{blake2b(settings.encode(), digest_size=12).hexdigest()}.pt"
        steps, models = len(courses[0].rows), len(courses)
        if file.exists():
            stored = torch.load(file, map_location=self._device, weights_only=True)
            state = State(**stored)
            self._progress.advance(int(state.step) * models)
        else:
            state = State.start(start.to(self._device), steps)
        pool = pool_of(pool_rows(job))
        train_stack(state, courses, pool, job.shape, self._reporter(file, state, models))
        _save(file, state)
        losses = state.losses[-_LAST_STEPS:].mean(0).tolist()
        self._progress.note(f"{models} model(s), {steps} steps, loss {losses[0]:.3f}")
        flats = state.flat.cpu()
        return [TrainedWeights(flat, loss) for flat, loss in zip(flats, losses, strict=True)]

    def _reporter(self, file: Path, state: State, models: int) -> Callable[[int], None]:
        def report(steps: int) -> None:
            self._progress.advance(steps * models)
            if time.monotonic() - self._last_save >= SAVE_SECONDS:
                _save(file, state)
                self._last_save = time.monotonic()

        return report


def _save(file: Path, state: State) -> None:
    torch.save(state.tensors(), file.with_suffix(".tmp"))
    os.replace(file.with_suffix(".tmp"), file)


def pool_rows(job: Job) -> int:
    """Return the pool's rows per kind; a short training needs no large pool."""
    return min(POOL_ROWS, job.base_steps * PRESETS[job.preset].batch)


def derived_seed(seed: int, purpose: str) -> int:
    """Return a separate seed for each purpose."""
    digest = blake2b(f"{seed}/{purpose}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def chunks(items: Sequence[_Item], device: torch.device) -> Iterator[Sequence[_Item]]:
    """Yield as many items at once as models train together on the device."""
    size = STACKED[device.type]
    for start in range(0, len(items), size):
        yield items[start : start + size]


# --- the set on disk ----------------------------------------------------------------------------


def _write_set(
    job: Job, base: TrainedWeights, specialists: Mapping[str, TrainedWeights], device: str
) -> None:
    models = {BASE: base, **specialists}
    output = OutputFolder(job.out, overwrite=None)
    try:
        folder = output.path
        for name, trained in models.items():
            write_model(folder / name, trained.flat, job.shape, PRESETS[job.preset].dtype)
        (folder / DATA).mkdir()
        for domain in job.domains:
            rows = problems(domain, split="train", count=CALIBRATION_ROWS, seed=job.seed)
            texts = ({"prompt": p.prompt, "response": p.answer} for p in rows)
            write_rows(folder / DATA / f"{domain}.jsonl", texts)
        manifest = {
            **_description(job, device),
            "final_loss": {name: trained.loss for name, trained in models.items()},
            "moved": {name: _moved(t, base, job.shape) for name, t in specialists.items()},
            "accuracy": _accuracy(folder, job.domains, device),
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        output.commit()
    except BaseException:
        output.abort()
        raise


def write_model(folder: Path, flat: Tensor, shape: Shape, dtype: torch.dtype) -> None:
    """Write a checkpoint with its tokenizer."""
    tensors = {
        name: tensor.to(dtype).contiguous()
        for name, tensor in to_tensors(flat.detach().cpu(), shape).items()
    }
    infos = [TensorInfo.of(name, t.dtype, t.shape) for name, t in tensors.items()]
    config = config_of(shape)
    config.architectures = [_CLASSES[shape.arch]]
    config.dtype = dtype_name(dtype)
    with CheckpointWriter(folder, infos, shard_bytes=_ONE_SHARD, overwrite=False) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.add_bytes("config.json", config.to_json_string(use_diff=False).encode())
        with tempfile.TemporaryDirectory() as made:
            character_tokenizer().save_pretrained(made)
            for file in sorted(Path(made).iterdir()):
                writer.add_file(file)
        writer.commit()


def _command(job: Job, device: str) -> str:
    scale = "" if job.steps_scale == 1.0 else f" --steps-scale {job.steps_scale}"
    chosen = "" if job.domains == DOMAINS else "".join(f" --domain {d}" for d in job.domains)
    return (
        f"python -m evidence train --preset {job.preset} --regime {job.regime} --arch {job.arch} "
        f"--seed {job.seed}{scale}{chosen} --device {device} {job.out.name}"
    )


def _description(job: Job, device: str) -> dict[str, Any]:
    return {
        "command": _command(job, device),
        "preset": job.preset,
        "regime": job.regime,
        "arch": job.arch,
        "seed": job.seed,
        "domains": list(job.domains),
        "steps": {BASE: job.base_steps, "specialist": job.specialist_steps},
        "versions": {
            "moemerge": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "date": datetime.now(UTC).date().isoformat(),
    }


def _moved(trained: TrainedWeights, base: TrainedWeights, shape: Shape) -> dict[str, float]:
    """Return the norm of the change from the base, relative to the base's norm."""
    routers = router_slice(shape)
    rest = slice(0, routers.start)
    change = trained.flat - base.flat
    return {
        name: float(change[part].norm() / base.flat[part].norm())
        for name, part in (("routers", routers), ("weights", rest))
    }


def _accuracy(folder: Path, domains: Sequence[str], device: str) -> dict[str, dict[str, float]]:
    """Return the accuracy of every model on every domain's test problems."""
    models = [BASE, *domains]
    shares: dict[str, dict[str, float]] = {model: {} for model in models}
    for domain in domains:
        test = problems(domain, split="test", count=TEST_PROBLEMS, seed=TEST_SEED)
        solved = accuracy_many([folder / model for model in models], test, device=device)
        for model, own in zip(models, solved, strict=True):
            shares[model][domain] = sum(own) / len(own)
    return shares
