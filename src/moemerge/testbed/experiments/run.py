"""A run: experiments to cells, cells to tasks, and what comes of them."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moemerge.errors import CheckpointError, MoeMergeError, UsageError
from moemerge.registry import did_you_mean
from moemerge.runtime.devices import cpu_count, resolve_device
from moemerge.runtime.progress import Progress
from moemerge.testbed.experiments.bench import Bench, Scale
from moemerge.testbed.experiments.catalogue import EXPERIMENTS, Experiment, Row, Scope, experiment
from moemerge.testbed.experiments.graph import CellJournal, Outcome, Task, run_tasks, set_digest
from moemerge.testbed.experiments.plots import require_matplotlib
from moemerge.testbed.experiments.recipes import (
    Calibrated,
    Cell,
    Merged,
    Model,
    SetKey,
    Trained,
    chosen,
)
from moemerge.testbed.experiments.report import write_report
from moemerge.testbed.experiments.summary import Summary, summarise
from moemerge.testbed.tasks import DOMAINS
from moemerge.testbed.training import (
    ARCHITECTURES,
    PRESETS,
    REGIMES,
    Job,
    check_steps_scale,
    open_set,
    train_many,
)

ALL = "all"
WORK = "work"
SETS = "sets"


@dataclass(frozen=True)
class TableRequest:
    """What `moemerge testbed table` is asked for."""

    experiments: tuple[str, ...]
    out: Path
    preset: str = "small"
    regimes: tuple[str, ...] = ("soft",)
    arch: str = "olmoe"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    sets: Path | None = None  # trained sets; missing ones are trained there
    work: Path | None = None  # where models are made that only serve to be measured
    methods: tuple[str, ...] = ()
    device: str = "auto"
    jobs: int | None = None
    scale: Scale = field(default_factory=Scale)
    steps_scale: float = 1.0


@dataclass(frozen=True)
class Table:
    """One experiment in one regime: its rows, and the sets over which they are repeated."""

    experiment: Experiment
    regime: str
    rows: tuple[Row, ...]
    sets: tuple[SetKey, ...]

    def summary(self, journal: CellJournal) -> Summary:
        """Its numbers, as far as they are known."""
        return summarise(self.experiment, self.rows, self.sets, journal)


@dataclass(frozen=True)
class Failure:
    """A cell or a model that could not be made."""

    what: str
    why: str


@dataclass(frozen=True)
class Plan:
    """All tables of a request, and the cells they need of each set."""

    request: TableRequest
    tables: tuple[Table, ...]

    def cells(self) -> dict[SetKey, dict[str, Cell]]:
        by_set: dict[SetKey, dict[str, Cell]] = {}
        for table in self.tables:
            for key in table.sets:
                cells = by_set.setdefault(key, {})
                cells.update({row.cell.name: row.cell for row in table.rows})
        return by_set


def make_plan(request: TableRequest) -> Plan:
    """Check the request, and lay out its tables."""
    _check(request)
    scope = Scope(chosen(request.methods), PRESETS[request.preset].layers)
    names = EXPERIMENTS if ALL in request.experiments else dict.fromkeys(request.experiments)
    tables = []
    for regime in request.regimes:
        for name in names:
            one = experiment(name)
            arch = one.arch or request.arch
            keys = tuple(SetKey(arch, request.preset, regime, seed) for seed in request.seeds)
            tables.append(Table(one, regime, tuple(one.rows(scope)), keys))
    return Plan(request, tuple(tables))


def _check(request: TableRequest) -> None:
    for name, values, known in (
        ("preset", (request.preset,), tuple(PRESETS)),
        ("regime", request.regimes, tuple(REGIMES)),
        ("arch", (request.arch,), tuple(ARCHITECTURES)),
    ):
        for value in values:
            if value not in known:
                raise UsageError(
                    f"unknown {name} {value!r}{did_you_mean(value, known)}",
                    hint=f"known: {', '.join(known)}",
                )
    if not request.seeds or not request.experiments:
        raise UsageError("name at least one experiment and one seed")
    if request.jobs is not None and request.jobs < 1:
        raise UsageError(f"`jobs` is {request.jobs}, expected at least 1")
    if min(request.seeds) < 0:
        raise UsageError(f"`seeds` has {min(request.seeds)}, expected at least 0")
    check_steps_scale(request.steps_scale)
    resolve_device(request.device)


@dataclass(frozen=True)
class TablesResult:
    """What a run found, and the files it wrote (the page first)."""

    summaries: tuple[Summary, ...]
    failures: tuple[Failure, ...]
    written: tuple[Path, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "tables": [summary.to_json() for summary in self.summaries],
            "failures": [asdict(failure) for failure in self.failures],
            "files": [str(path) for path in self.written],
        }


def run_tables(request: TableRequest, progress: Progress, *, figures: bool = True) -> TablesResult:
    """Train what is missing, measure what is missing, and write the tables anew."""
    if figures:
        require_matplotlib()
    plan = make_plan(request)
    try:
        request.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{request.out}: cannot be made: {error.strerror}") from error
    journal = CellJournal(request.out, request.scale)
    train_missing(plan, journal, progress)
    failures = run_cells(plan, journal, progress)
    summaries = tuple(table.summary(journal) for table in plan.tables)
    written = write_report(request.out, summaries, figures=figures)
    return TablesResult(summaries, tuple(failures), tuple(written))


# --- training -----------------------------------------------------------------------------------


def set_folder(request: TableRequest, key: SetKey) -> Path:
    return (request.sets or request.out / SETS) / key.name


def train_missing(plan: Plan, journal: CellJournal, progress: Progress) -> None:
    """Train the sets that are needed and not there, all at once."""
    request = plan.request
    needed = left_to_measure(plan, journal)
    missing = [key for key in needed if not set_folder(request, key).exists()]
    jobs = [
        Job(
            out=set_folder(request, key),
            preset=key.preset,
            regime=key.regime,
            arch=key.arch,
            seed=key.seed,
            domains=DOMAINS,
            steps_scale=request.steps_scale,
        )
        for key in missing
    ]
    if jobs:
        sets = "1 set" if len(jobs) == 1 else f"{len(jobs)} sets"
        progress.note(f"training {sets}: {', '.join(key.name for key in missing)}")
        try:
            train_many(jobs, device=request.device, progress=progress, resume=True)
        except UsageError:  # a killed training of other sets has left its state here
            train_many(jobs, device=request.device, progress=progress, resume=False)


def left_to_measure(plan: Plan, journal: CellJournal) -> dict[SetKey, list[Cell]]:
    """The cells that the journal lacks, or has of a set that was trained anew since."""
    missing: dict[SetKey, list[Cell]] = {}
    for key, cells in plan.cells().items():
        folder = set_folder(plan.request, key)
        digest = set_digest(folder) if folder.exists() else None
        left = [cell for cell in cells.values() if not journal.has(key, cell, digest)]
        if left:
            missing[key] = left
    return missing


# --- cells --------------------------------------------------------------------------------------


def run_cells(plan: Plan, journal: CellJournal, progress: Progress) -> list[Failure]:
    """Make and measure every cell that the journal lacks."""
    request = plan.request
    tasks: list[Task] = []
    for number, (key, cells) in enumerate(left_to_measure(plan, journal).items()):
        tasks += _tasks(bench_of(request, key), key, cells, number)
    measured = sum(task.call is _measure for task in tasks)
    if not measured:
        return []
    failures = []
    progress.start("measuring", measured, unit="cells")
    jobs = request.jobs or cpu_count()
    for outcome in run_tasks(tasks, min(jobs, measured)):
        failures += _note(outcome, journal, progress)
    progress.finish()
    shutil.rmtree(work_folder(request), ignore_errors=True)
    return failures


def work_folder(request: TableRequest) -> Path:
    """One for each OUT, so that two runs do not clear each other's models away."""
    if request.work is None:
        return request.out / WORK
    digest = hashlib.sha256(str(request.out.absolute()).encode()).hexdigest()[:12]
    return request.work / f"moemerge-{digest}"


def bench_of(request: TableRequest, key: SetKey) -> Bench:
    trained = set_folder(request, key)
    return Bench(
        trained=trained,
        folder=work_folder(request) / key.name,
        domains=tuple(open_set(trained).models),
        scale=request.scale,
        device=request.device,
    )


def _tasks(bench: Bench, key: SetKey, cells: Sequence[Cell], number: int) -> Iterator[Task]:
    """Text first, then models in the order they need each other, and measurements.

    Sets are worked on one after the other, so that what a killed run leaves is of use; within a
    set long tasks go first, so that no worker ends alone.
    """
    text = f"{key.name}: text"
    yield Task(text, bench.write_texts, (), rank=(number, 0))
    made: dict[Model, Task] = {}

    def make(model: Model) -> str:
        """The task that makes a model, and the tasks of what it needs."""
        if isinstance(model, Trained):
            return text
        if model not in made:
            after = tuple(dict.fromkeys([text, *(make(parent) for parent in model.parents)]))
            name, rank = f"{key.name}: make {model.name}", (number, -cost(model))
            made[model] = Task(name, bench.make, (model,), after, _remover(bench, model), rank)
        return made[model].key

    for cell in cells:
        after = tuple(dict.fromkeys(make(model) for model in cell.models))
        name = f"{key.name}: measure {cell.name}"
        yield Task(name, _measure, (bench, key, cell), after, rank=(number, -MEASURING))
    yield from made.values()


# Seconds of one core for the small preset; only their order matters.
MEASURING = 2.0
MERGING = {"fisher": 15.0, "wudi": 9.0, "regmean": 5.0}
CALIBRATING = 5.0


def cost(model: Model) -> float:
    """About how long a model takes to make."""
    if isinstance(model, Merged):
        return MERGING.get(model.method, 1.0)
    if isinstance(model, Calibrated):
        settings = dict(model.settings)
        factor = 2 if settings.get("targets") == "source-features" else 1
        return CALIBRATING * factor * (2 if settings.get("objective") == "exact" else 1)
    return 1.0


def _remover(bench: Bench, model: Model) -> Any:
    return lambda: bench.remove(model)


def _measure(bench: Bench, key: SetKey, cell: Cell) -> tuple[SetKey, Cell, dict[str, Any]]:
    return key, cell, {"trained": set_digest(bench.trained), **bench.measure(cell)}


def _note(outcome: Outcome, journal: CellJournal, progress: Progress) -> list[Failure]:
    task = outcome.task
    is_cell = task.call is _measure
    if is_cell:
        progress.advance(1)
    if outcome.error is None:
        journal.add_task(task.key, outcome.seconds, outcome.cpu_seconds)
        if is_cell:
            journal.add(*outcome.result)
        return []
    error = outcome.error
    if isinstance(error, str):
        return []  # told with the task that it waited for
    why = str(error) if isinstance(error, MoeMergeError) else f"{type(error).__name__}: {error}"
    progress.note(f"failed: {task.key}: {why}")
    return [Failure(task.key, why)]
