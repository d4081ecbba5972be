"""A run: experiments to cells, cells to work, and what comes of them."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from moemerge.errors import CheckpointError, UsageError
from moemerge.experiments.cells import Failure, SetCells, run_cells
from moemerge.experiments.journal import CellJournal
from moemerge.experiments.plots import require_matplotlib
from moemerge.experiments.report import write_report
from moemerge.experiments.summary import Summary, summarise
from moemerge.experiments.tables import Row
from moemerge.experiments.work import Workers
from moemerge.registry import did_you_mean
from moemerge.runtime.devices import cpu_count, resolve_device
from moemerge.runtime.journals import saved_path
from moemerge.runtime.progress import Progress
from moemerge.testbed.experiments.ablations import Scope
from moemerge.testbed.experiments.bench import Bench, Scale, set_digest
from moemerge.testbed.experiments.catalogue import (
    EXPERIMENTS,
    Experiment,
    experiment,
)
from moemerge.testbed.experiments.merges import EVERY, chosen
from moemerge.testbed.experiments.recipes import Cell, SetKey
from moemerge.testbed.tasks import DOMAINS
from moemerge.testbed.training import (
    ARCHITECTURES,
    PRESETS,
    REGIMES,
    Job,
    bundled_set,
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
    rows: tuple[Row[Cell], ...]
    sets: tuple[SetKey, ...]

    def summary(self, journal: CellJournal) -> Summary:
        """Its numbers, as far as they are known."""
        return summarise(self.experiment.form(self.sets[0]), self.rows, self.sets, journal)


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
    scope = Scope(
        chosen(request.methods),
        PRESETS[request.preset].layers,
        chosen(request.methods, EVERY),
    )
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
    journal = CellJournal(request.out, asdict(request.scale))
    train_missing(plan, journal, progress)
    failures = measure_missing(plan, journal, progress)
    summaries = tuple(table.summary(journal) for table in plan.tables)
    written = write_report(request.out, summaries, figures=figures)
    return TablesResult(summaries, tuple(failures), tuple(written))


# --- training -----------------------------------------------------------------------------------


def set_folder(request: TableRequest, key: SetKey) -> Path:
    """Where a set is, or will be; the one that comes with the package need not be trained."""
    folder = (request.sets or request.out / SETS) / key.name
    if folder.exists() or saved_path(folder).exists() or request.steps_scale != 1:
        return folder
    return bundled_set().folder if _is_bundled(key) else folder


@cache
def _is_bundled(key: SetKey) -> bool:
    manifest = bundled_set().manifest
    return all(manifest[word] == value for word, value in key.to_json().items())


def train_missing(plan: Plan, journal: CellJournal, progress: Progress) -> None:
    """Train the sets that are needed and not there, all at once."""
    request = plan.request
    needed = left_to_measure(plan, journal)
    missing = [key for key in needed if not set_folder(request, key).exists()]
    if missing and any(saved_path(set_folder(request, key)).exists() for key in needed):
        missing = list(needed)  # killed when some were finished: it goes on with all of them
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
            jobs = [job for job in jobs if not job.out.exists()]
            train_many(jobs, device=request.device, progress=progress, resume=False)


def left_to_measure(plan: Plan, journal: CellJournal) -> dict[SetKey, list[Cell]]:
    """The cells that the journal lacks, or has of a set that was trained anew since."""
    missing: dict[SetKey, list[Cell]] = {}
    for key, cells in plan.cells().items():
        folder = set_folder(plan.request, key)
        digest = set_digest(folder) if folder.exists() else None
        left = [
            cell
            for cell in cells.values()
            if not journal.has(key, cell, trained=digest)
            or (digest is not None and _lacks_untouched(cell, journal.get(key, cell)))
        ]
        if left:
            missing[key] = left
    return missing


def _lacks_untouched(cell: Cell, entry: Mapping[str, Any] | None) -> bool:
    """Whether a cell was measured before domains without a specialist were asked as well."""
    asked = {} if entry is None else entry.get("untouched", {})
    return any(domain not in asked for domain, _ in cell.untouched)


# --- cells --------------------------------------------------------------------------------------


def measure_missing(plan: Plan, journal: CellJournal, progress: Progress) -> list[Failure]:
    """Make and measure every cell that the journal lacks."""
    request = plan.request
    batches = [
        SetCells(key, bench_of(request, key), cells)
        for key, cells in left_to_measure(plan, journal).items()
    ]
    if not batches:
        return []
    jobs = min(request.jobs or cpu_count(), sum(len(batch.cells) for batch in batches))
    failures = run_cells(batches, journal, Workers(jobs), progress)
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
