"""Run a distillation, from the merged folder to the distilled folder."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final

import torch

from moemerge.checkpoint import format_size
from moemerge.checkpoint.output import writing
from moemerge.config.repair_settings import DistillSettings
from moemerge.errors import ArchitectureError, DataError, ResourceError
from moemerge.families.opened import OpenModel
from moemerge.forward.settings import HEADROOM, vocabulary_size
from moemerge.forward.trainable import TrainedLayout
from moemerge.repairs.distilling.job import DistillJob, DistillRequest
from moemerge.repairs.distilling.report import DistillReport
from moemerge.repairs.distilling.student import Student, StudentOptions
from moemerge.repairs.distilling.teachers import positions, run_teacher
from moemerge.repairs.distilling.training import Progressed, Trainer
from moemerge.repairs.lockstep.inputs import base_notices, check_source_text, read_text
from moemerge.repairs.lockstep.job import OpenedRepair, RepairRun, RepairSteps, run_repair
from moemerge.repairs.lockstep.journal import Entry, SavedStates, mark_complete
from moemerge.repairs.lockstep.output import Output, RefusedResultError
from moemerge.repairs.lockstep.report import RepairReport
from moemerge.repairs.lockstep.request import errors_of
from moemerge.runtime.devices import available_memory, deterministic, release_cached
from moemerge.runtime.progress import Progress
from moemerge.runtime.timing import Stopwatch

SAVE_MEMORY: Final = (
    'train adapters (`lora=16`), use `optimiser="adafactor"`, or give shorter rows (`max_length`)'
)
# A state is stored if that takes at most this share of the time since the last one.
SAVING_SHARE: Final = 0.1
DISK_RATE: Final = 1e9  # bytes per second, assumed
STUDENT: Final = "student"  # the only entry of the output


def run_distillation(request: DistillRequest, progress: Progress) -> DistillReport:
    """Distil into `request.out`. Stored distributions and training states allow a resume."""
    steps = RepairSteps(require=_require, prepare=_prepare, compute=_compute)
    return run_repair(request, progress, steps)


def _require(merged: OpenModel) -> None:
    if merged.checkpoint.quantisation is not None or merged.architecture.quantised:
        raise ArchitectureError(
            f"{merged.label} is quantised, and training needs floats",
            hint="write it in floats first: `moemerge merge` with passthrough does",
        )


def _prepare(opened: OpenedRepair[DistillSettings]) -> DistillJob:
    request, merged, sources = opened.request, opened.merged, opened.sources
    settings = request.settings
    text = request.text or read_text(merged, sources, request.data, settings)
    notices = base_notices(request, merged, sources)
    notices += text.notices
    size = vocabulary_size(merged)
    hint = "a source is a model that was merged"
    notices += check_source_text(merged, sources, text, hint)
    for source in sources.values():
        if vocabulary_size(source) != size:
            raise ArchitectureError(
                f"source {source.name!r} predicts {vocabulary_size(source)} tokens, "
                f"{merged.label} {size}",
                hint="a teacher needs the student's vocabulary",
            )
    job = DistillJob(
        request=request,
        merged=merged,
        sources=sources,
        stream=opened.stream,
        ranks=opened.ranks,
        text=text,
        notices=tuple(notices),
        layout=_layout(merged, settings),
        vocabulary=size,
    )
    _check_text(job)
    _check_memory(job)
    return job


def _compute(job: DistillJob, run: RepairRun) -> DistillReport:
    output, settings = run.output, job.request.settings
    output.begin(job.key, job.layout.stored, replace=job.request.replaces_unfinished)
    stopwatch = Stopwatch(job.stream.device)
    stopwatch.count("prepare", time.perf_counter() - run.start - job.text.seconds)
    stopwatch.count("text", job.text.seconds)
    run.progress.note(_estimate(job))
    states = TrainingStates(job, output)
    row, student = _distil(job, states, stopwatch, run.progress)
    state = student.state_dict()  # every rank takes part, and rank 0 gets it
    output.hold(Entry(STUDENT, {}, row), job.layout.written(state) if job.ranks.leads else ())
    report = _report(job, output, states, stopwatch, time.perf_counter() - run.start)
    if settings.strict and report.kept_step == 0:
        raise RefusedResultError(report.notices[-1], hint="give more text, or leave `strict` out")
    return report


def _distil(
    job: DistillJob, states: TrainingStates, stopwatch: Stopwatch, progress: Progress
) -> tuple[dict[str, Any], Student]:
    """Return the row of the report, and the student with the weights that are kept."""
    settings, stream = job.request.settings, job.stream
    _ = job.snapshot_device  # by the memory that is free before the student is loaded
    with stopwatch.span("teachers"):
        teachers = {
            domain.name: run_teacher(
                job.sources[domain.name],
                domain,
                states.targets / f"{number}-rank{job.ranks.rank}",
                stream,
                k=settings.top_tokens,
                vocabulary=job.vocabulary,
                progress=progress,
            )
            for number, domain in enumerate(job.text.domains)
        }
    states.keep_teachers()
    release_cached(stream.device)  # what the teachers took
    with stopwatch.span("load"):
        loading = StudentOptions(job.optimiser, job.size.recompute, settings.lora, settings.seed)
        student = Student(
            job.merged,
            job.layout,
            stream.device,
            stream.dtype,
            options=loading,
            ranks=job.ranks,
        )
    trainer = Trainer(job, student, teachers, stopwatch, progress)
    rate = settings.learning_rate
    tried: dict[float, float] = {}
    state, optimiser = states.load(trainer)
    if state is not None:
        progress.note(f"resuming a killed run after step {state.step}")
    out_of_memory = errors_of("distillation", f"on {stream.device}", SAVE_MEMORY)
    with deterministic(stream.device), out_of_memory:
        if state is None and rate == "auto":
            with stopwatch.span("search for the rate"):
                rate, tried = trainer.choose_rate()
        if state is None:
            state = Progressed(float(rate), tried)
            optimiser = trainer.optimiser(state.rate)
        trainer.train(state, optimiser, states.save)
    return state.to_json(), student


class TrainingStates:
    """The folder next to OUT with the teachers' distributions and the last training state."""

    def __init__(self, job: DistillJob, output: Output) -> None:
        """Open the folder. It stays after an interrupt, and goes with `output`'s journal."""
        self._ranks = job.ranks
        # Writing a state of a large model takes a minute. A resumed run that starts from an older
        # state takes the same steps again.
        size, name = job.size, job.optimiser
        stored = 2 * size.optimised_bytes(name) + size.state_bytes(name)
        self._pause = stored / DISK_RATE / SAVING_SHARE  # seconds between two states
        self._last = time.perf_counter()
        self.resumed = 0  # steps of the killed run that are not repeated
        self._saved: SavedStates | None = None
        if job.ranks.leads:
            self._saved = SavedStates(
                job.request.out, job.key, replace=job.request.replaces_unfinished
            )
            output.states = self._saved
        folder = job.ranks.broadcast_object(self._saved.folder if self._saved is not None else None)
        assert folder is not None
        self.folder: Path = folder

    @property
    def targets(self) -> Path:
        return self.folder / "teachers"

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
        self.resumed = state.step
        trainer.student.load(stored["weights"])
        optimiser = trainer.optimiser(state.rate)
        optimiser.load_state_dict(stored["optimiser"])
        return state, optimiser


# --- checks and report --------------------------------------------------------------------------


def _layout(merged: OpenModel, settings: DistillSettings) -> TrainedLayout:
    """Return what is trained: of some layers only their tensors, of all layers also the others."""
    layers = frozenset(settings.layers.resolve(merged.architecture.num_layers))
    some = len(layers) < merged.architecture.num_layers
    adapted = settings.lora is not None
    return TrainedLayout(merged, settings.only, adapted=adapted, layers=layers if some else None)


def _check_text(job: DistillJob) -> None:
    for domain in job.text.domains:
        for kind, rows in (("rows", domain.rows), ("held-out rows", domain.holdout)):
            if rows and not any(map(positions, rows)):
                raise DataError(
                    f"domain {domain.name!r}: none of its {kind} has two tokens",
                    hint="a next token is predicted from those before it: give longer text",
                )


def _check_memory(job: DistillJob) -> None:
    device = job.stream.device
    needed, free = job.needed_bytes, available_memory(device)
    if needed > free * HEADROOM:
        raise ResourceError(
            f"distillation needs about {format_size(needed)} on {device}, and "
            f"{format_size(int(free * HEADROOM))} are usable",
            hint=SAVE_MEMORY,
        )


def _estimate(job: DistillJob) -> str:
    tokens = sum(domain.tokens for domain in job.text.domains)
    return (
        f"distilling {job.size.parameters:,} parameters in {job.steps} steps over {tokens:,} "
        f"tokens; about {format_size(job.needed_bytes)} on {job.stream.device} ({job.optimiser})"
    )


def _report(
    job: DistillJob,
    output: Output,
    states: TrainingStates,
    stopwatch: Stopwatch,
    seconds: float,
) -> DistillReport:
    stopwatch.aside("copy", *output.copied)
    state = Progressed.from_json(output.entries[0].row)
    notices = [*job.notices]
    if state.held_out and state.best_step == 0:
        notices.append("no step lowered the loss on held-out rows, so the merged weights are kept")
    return DistillReport(
        **RepairReport.run_fields(job.request, job.stream, stopwatch, seconds),
        offload="device",
        memory=job.needed_bytes,
        resumed=states.resumed,
        layers=(),
        notices=tuple(notices),
        parameters=job.size.parameters,
        optimiser=job.optimiser,
        learning_rate=state.rate,
        tried_rates=state.tried_rates,
        steps=state.step,
        kept_step=state.best_step,
        losses=tuple(state.losses),
        held_out=state.held_out,
        held_out_losses=state.held_out_losses,
        tokens={domain.name: domain.tokens for domain in job.text.domains},
    )
