"""Run experiments: train missing sets, measure missing cells, and write the tables."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from evidence.cells import Bench, Cell, Scale, SetKey, set_digest
from evidence.data import PRESETS, REGIMES
from evidence.experiments import EXPERIMENTS, Experiment, Scope
from evidence.journal import CellJournal, Failure, SetCells, run_cells
from evidence.layout import ARCHITECTURES
from evidence.methods import EVERY, chosen
from evidence.seed_tables import write_tables
from evidence.summary import Row, Summary, summarise
from evidence.training import Job, check_choice, train
from moemerge.errors import UsageError
from moemerge.lab.testbed import bundled_set
from moemerge.runtime.devices import cpu_count
from moemerge.runtime.progress import Progress

ALL = "all"


@dataclass(frozen=True)
class TableRequest:
    """The arguments of `python -m evidence table`."""

    experiments: tuple[str, ...]
    out: Path
    preset: str = "small"
    regimes: tuple[str, ...] = ("soft",)
    arch: str = "olmoe"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    sets: Path | None = None  # folder of trained sets; missing ones are trained
    work: Path | None = None  # folder of temporary models
    methods: tuple[str, ...] = ()
    device: str = "auto"
    jobs: int | None = None
    scale: Scale = field(default_factory=Scale)
    steps_scale: float = 1.0


@dataclass(frozen=True)
class Table:
    """One experiment in one regime: its rows, and the sets over which they are repeated."""

    experiment: Experiment
    rows: tuple[Row, ...]
    sets: tuple[SetKey, ...]

    def summary(self, journal: CellJournal) -> Summary:
        """Return the table's numbers, as far as they were measured."""
        return summarise(self.experiment.form(self.sets[0]), self.rows, self.sets, journal.get)


def plan_tables(request: TableRequest) -> list[Table]:
    """Check the request and return its tables."""
    check_choice("preset", request.preset, PRESETS)
    check_choice("architecture", request.arch, ARCHITECTURES)
    for regime in request.regimes:
        check_choice("regime", regime, REGIMES)
    for name in request.experiments:
        check_choice("experiment", name, [*EXPERIMENTS, ALL])
    jobs = 1 if request.jobs is None else request.jobs
    if not request.seeds or min(request.seeds) < 0 or jobs < 1:
        raise UsageError("seeds must be at least 0 and jobs at least 1")
    scope = Scope(
        chosen(request.methods),
        PRESETS[request.preset].layers,
        chosen(request.methods, EVERY),
    )
    names = EXPERIMENTS if ALL in request.experiments else dict.fromkeys(request.experiments)
    tables = []
    for regime in request.regimes:
        for one in (EXPERIMENTS[name] for name in names):
            arch = one.arch or request.arch
            keys = tuple(SetKey(arch, request.preset, regime, seed) for seed in request.seeds)
            tables.append(Table(one, tuple(one.rows(scope)), keys))
    return tables


def run_tables(
    request: TableRequest, progress: Progress
) -> tuple[list[Summary], list[Failure], list[Path]]:
    """Measure all cells that are missing, and write the tables.

    Return the tables, the failures and the files; the Markdown of all tables comes first.
    """
    tables = plan_tables(request)
    request.out.mkdir(parents=True, exist_ok=True)
    journal = CellJournal(request.out, asdict(request.scale))
    left = missing_cells(tables, request, journal)
    jobs = [
        Job(
            out=set_folder(request, key),
            preset=key.preset,
            regime=key.regime,
            arch=key.arch,
            seed=key.seed,
            steps_scale=request.steps_scale,
        )
        for key in left
        if not set_folder(request, key).exists()
    ]
    if jobs:
        train(jobs, device=request.device, progress=progress)
    failures = _measure(left, request, journal, progress)
    summaries = [table.summary(journal) for table in tables]
    return summaries, failures, write_tables(request.out, summaries)


def set_folder(request: TableRequest, key: SetKey) -> Path:
    """Return the folder of a trained set; the bundled set need not be trained."""
    folder = (request.sets or request.out / "sets") / key.name
    if folder.exists() or request.steps_scale != 1 or not _is_bundled(key):
        return folder
    return bundled_set().folder


@cache
def _is_bundled(key: SetKey) -> bool:
    manifest = bundled_set().manifest
    return all(manifest[name] == value for name, value in key.to_json().items())


def missing_cells(
    tables: list[Table], request: TableRequest, journal: CellJournal
) -> dict[SetKey, list[Cell]]:
    """Return the cells that were not measured, or with another training of the set."""
    wanted: dict[SetKey, dict[str, Cell]] = {}
    for table in tables:
        for key in table.sets:
            wanted.setdefault(key, {}).update({row.cell.name: row.cell for row in table.rows})
    missing: dict[SetKey, list[Cell]] = {}
    for key, cells in wanted.items():
        folder = set_folder(request, key)
        digest = set_digest(folder) if folder.exists() else None
        left = [cell for cell in cells.values() if not journal.has(key, cell, trained=digest)]
        if left:
            missing[key] = left
    return missing


def _measure(
    left: dict[SetKey, list[Cell]], request: TableRequest, journal: CellJournal, progress: Progress
) -> list[Failure]:
    if not left:
        return []
    work = request.out / "work"
    if request.work is not None:
        # One folder per OUT, so that two runs do not remove each other's models.
        digest = hashlib.sha256(str(request.out.absolute()).encode()).hexdigest()[:12]
        work = request.work / f"moemerge-{digest}"
    batches = [
        SetCells(
            key,
            Bench(set_folder(request, key), work / key.name, request.scale, request.device),
            own,
        )
        for key, own in left.items()
    ]
    jobs = min(request.jobs or cpu_count(), len(batches))
    failures = run_cells(batches, journal, jobs, progress)
    shutil.rmtree(work, ignore_errors=True)
    return failures
