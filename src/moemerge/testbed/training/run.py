"""From settings to a folder with a base, its specialists and their text."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from moemerge.checkpoint.output import OutputFolder, check_output
from moemerge.errors import UsageError
from moemerge.registry import did_you_mean
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.journals import saved_path
from moemerge.runtime.progress import Progress, Silent
from moemerge.testbed.accuracy import accuracy_many
from moemerge.testbed.network.layout import ARCHITECTURES, Shape, router_mask
from moemerge.testbed.tasks import DOMAINS, problems
from moemerge.testbed.training.data import PRESETS, REGIMES
from moemerge.testbed.training.sets import (
    BASE,
    MANIFEST,
    TrainedSet,
    open_set,
    write_data,
    write_manifest,
    write_model,
)
from moemerge.testbed.training.stacks import (
    Job,
    Results,
    Saved,
    TrainedWeights,
    total_steps,
    train_jobs,
)
from moemerge.version import __version__

TEST_PROBLEMS = 300  # of each domain, on which a finished set is told its own accuracy
TEST_SEED = 0


def train(
    job: Job, *, device: str = "auto", progress: Progress | None = None, resume: bool = False
) -> TrainedSet:
    """Train a base and one specialist a domain, and write them to the job's folder, whole or not.

    On a CPU the same settings give the same bytes. With `resume` a killed training goes on.
    """
    return train_many([job], device=device, progress=progress, resume=resume)[0]


def train_many(
    jobs: Sequence[Job],
    *,
    device: str = "auto",
    progress: Progress | None = None,
    resume: bool = False,
    test_problems: int | None = None,
) -> list[TrainedSet]:
    """Train several sets: a base that two of them share only once, and on a GPU many at a time.

    A set is written as soon as its models are done. With `resume`, sets that a killed call has
    finished are left as they are. `test_problems` of each domain tell a set its own accuracy.
    """
    if not jobs or len({job.out.absolute() for job in jobs}) != len(jobs):
        raise UsageError(f"{len(jobs)} sets to train, expected some, each with a folder of its own")
    on = resolve_device(device)
    finished = {job: _finished(job, on.type) if resume else None for job in jobs}
    for job in jobs:
        _check(job, finished=finished[job] is not None)
    if all(finished.values()):
        # Killed between its last word and its last file.
        shutil.rmtree(saved_path(jobs[0].out), ignore_errors=True)
        return [open_set(job.out) for job in jobs]
    progress = Silent() if progress is None else progress
    saved = Saved(jobs[0].out, _key(jobs, on), resume=resume)
    try:
        progress.start("training", total_steps(jobs), unit="steps")
        count = TEST_PROBLEMS if test_problems is None else test_problems
        sets = {
            job: finished[job] or _write(job, results, on.type, count)
            for job, results in train_jobs(jobs, on, saved, progress)
        }
        progress.finish()
    except BaseException:
        saved.close()
        raise
    saved.remove()
    return [sets[job] for job in jobs]


def _finished(job: Job, device: str) -> TrainedSet | None:
    """The set of a job that was done before, if it was this very job."""
    if not (job.out / MANIFEST).exists():
        return None
    trained = open_set(job.out)
    return trained if trained.manifest.get("command") == _command(job, device) else None


def _check(job: Job, *, finished: bool) -> None:
    choices: list[tuple[str, str, Collection[str]]] = [
        ("preset", job.preset, PRESETS),
        ("regime", job.regime, REGIMES),
        ("architecture", job.arch, ARCHITECTURES),
        *(("domain", domain, DOMAINS) for domain in job.domains),
    ]
    for what, name, known in choices:
        if name not in known:
            raise UsageError(
                f"unknown {what} {name!r}{did_you_mean(name, known)}",
                hint=f"known: {', '.join(known)}",
            )
    if not job.domains or len(set(job.domains)) != len(job.domains):
        raise UsageError(f"domains are {list(job.domains)}, expected at least one, each once")
    if job.seed < 0:
        raise UsageError(f"seed is {job.seed}, expected at least 0")
    check_steps_scale(job.steps_scale)
    if not finished:
        check_output(job.out, overwrite=None)


def check_steps_scale(scale: float) -> None:
    if not 0.0 < scale < float("inf"):
        raise UsageError(f"`steps_scale` is {scale:g}, expected a number above 0")


def _key(jobs: Sequence[Job], device: torch.device) -> dict[str, Any]:
    settings = [{**asdict(job), "out": job.out.name} for job in jobs]
    return {"jobs": settings, "device": device.type, "torch": torch.__version__, "us": __version__}


def _write(job: Job, results: Results, device: str, test_problems: int) -> TrainedSet:
    preset = PRESETS[job.preset]
    shape = preset.shape(job.arch)
    base = results.base(job)
    specialists = {domain: results.specialists[job, domain] for domain in job.domains}
    output = OutputFolder(job.out, overwrite=None)
    try:
        folder = output.path
        for name, trained in {BASE: base, **specialists}.items():
            write_model(folder / name, trained.flat, shape, preset.dtype)
        write_data(folder, job.domains, job.seed)
        manifest = {
            **_description(job, device),
            "final_loss": {BASE: base.loss, **{n: t.loss for n, t in specialists.items()}},
            "moved": {name: _moved(t, base, shape) for name, t in specialists.items()},
            "accuracy": _accuracy(folder, job.domains, device, test_problems),
        }
        write_manifest(folder, manifest)
        output.commit()
    except BaseException:
        output.abort()
        raise
    return open_set(job.out)


def _command(job: Job, device: str) -> str:
    scale = "" if job.steps_scale == 1.0 else f" --steps-scale {job.steps_scale}"
    chosen = "" if job.domains == DOMAINS else "".join(f" --domain {d}" for d in job.domains)
    return (
        f"moemerge testbed train --preset {job.preset} --regime {job.regime} --arch {job.arch} "
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
    """How far a specialist went from the base, as a share of the base's norm."""
    routers = router_mask(shape)
    rest = slice(0, routers.start)
    change = trained.flat - base.flat
    return {
        name: float(change[part].norm() / base.flat[part].norm())
        for name, part in (("routers", routers), ("weights", rest))
    }


def _accuracy(
    folder: Path, domains: Sequence[str], device: str, count: int
) -> Mapping[str, Mapping[str, float]]:
    """Every model on every domain's test problems."""
    models = [BASE, *domains]
    shares: dict[str, dict[str, float]] = {model: {} for model in models}
    for domain in domains:
        asked = problems(domain, split="test", count=count, seed=TEST_SEED)
        right = accuracy_many([folder / model for model in models], asked, device=device)
        for model, own in zip(models, right, strict=True):
            shares[model][domain] = sum(own) / len(own)
    return shares
