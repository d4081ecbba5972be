"""Run a study: from one file to models, measurements and tables. Finished work is kept."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moemerge.config.settings import settings_for, with_keywords
from moemerge.errors import CheckpointError
from moemerge.lab.experiments.cells import CellJournal, Failure, SetCells, run_cells
from moemerge.lab.experiments.estimate import StudyEstimate, estimate, largest_model
from moemerge.lab.experiments.plan import StudyPlan, plan_study
from moemerge.lab.experiments.plots import require_matplotlib
from moemerge.lab.experiments.report import write_report
from moemerge.lab.experiments.settings import StudySettings
from moemerge.lab.experiments.study_bench import StudyBench
from moemerge.lab.experiments.study_file import load_study
from moemerge.lab.experiments.summary import FindEntry, Summary, summarise
from moemerge.lab.experiments.tables import Measurement, Repeat
from moemerge.lab.experiments.tree import StudyCell, StudySet, at_seed
from moemerge.lab.experiments.work import Workers
from moemerge.runtime.devices import available_memory, cpu_count, gpu_ids, resolve_device
from moemerge.runtime.outputs import check_name
from moemerge.runtime.progress import Progress, Silent

MODELS = "models"
ANSWERS = "answers"
SET = StudySet()
# Memory of a worker, in multiples of a model's size on disk: the model in float32 is twice its size
# in bfloat16, and activations take as much again.
IN_MEMORY = 4


@dataclass(frozen=True)
class StudyReport:
    """The tables of a study, and the files it wrote (the page first)."""

    summaries: tuple[Summary, ...]
    failures: tuple[Failure, ...]
    written: tuple[Path, ...]
    measured: int  # measured in this run
    known: int  # measured before

    def to_json(self) -> dict[str, Any]:
        return {
            "tables": [summary.to_json() for summary in self.summaries],
            "failures": [asdict(failure) for failure in self.failures],
            "files": [str(path) for path in self.written],
            "measured": self.measured,
            "known": self.known,
        }


@with_keywords(StudySettings)
def study(
    source: str | Path | Mapping[str, Any],
    out: str | Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    settings: StudySettings | None = None,
    progress: Progress | None = None,
    **keywords: Any,
) -> StudyReport:
    """Make and measure everything in a study file, and write its tables into `out`.

    `overrides` replace values of the file: `{"evaluate": {"limit": 10}}`. Run it again to resume a
    killed study; it measures only what is missing or has changed inputs.
    """
    settings = settings_for(StudySettings, settings, keywords, "study")
    plan = plan_study(load_study(source, overrides))
    return run_study(plan, Path(out), settings, Silent() if progress is None else progress)


def run_study(
    plan: StudyPlan, out: Path, settings: StudySettings, progress: Progress
) -> StudyReport:
    """Measure what is missing, and rewrite the tables."""
    check_name(out)
    if settings.figures:
        require_matplotlib()
    expected = expect(plan, out, settings)
    expected.refuse()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be made: {error.strerror}") from error
    journal = CellJournal(out, {})
    left = left_to_measure(plan, journal)
    failures: list[Failure] = []
    if left:
        progress.note(str(expected))
        bench = bench_of(plan, out, settings)
        workers = workers_for(settings, len(left), largest_model(plan))
        failures = run_cells([SetCells(SET, bench, left)], journal, workers, progress)
        if not bench.keep_models and not failures:
            shutil.rmtree(bench.folder, ignore_errors=True)
    sets = [StudySet(seed=seed) for seed in plan.config.seeds] or [SET]
    known = known_cells(plan, journal)
    summaries = tuple(summarise(t.form, t.rows, sets, known) for t in plan.tables)
    title, about = plan.config.title, plan.config.about
    written = write_report(out, summaries, figures=settings.figures, title=title, about=about)
    measured = len(left) - len(left_to_measure(plan, journal))
    return StudyReport(
        summaries, tuple(failures), tuple(written), measured, len(plan.cells) - len(left)
    )


def expect(plan: StudyPlan, out: Path, settings: StudySettings) -> StudyEstimate:
    """Estimate the remaining cost of a study. Writes and downloads nothing."""
    left = left_to_measure(plan, CellJournal(out, {}))
    bench = bench_of(plan, out, settings)
    jobs = workers_for(settings, max(1, len(left)), largest_model(plan)).count
    return estimate(plan, left, bench.folder, jobs=jobs, keep=bench.keep_models)


def known_cells(plan: StudyPlan, journal: CellJournal) -> FindEntry:
    """Return a function that finds a measured cell, if its inputs match the current study."""
    cells = plan.cells

    def find(key: Repeat, cell: Measurement) -> dict[str, Any] | None:
        current = cells[at_seed(cell.name, key.seed) if plan.seeds else cell.name]
        return journal.get(SET, current) if is_measured(current, journal) else None

    return find


def is_measured(cell: StudyCell, journal: CellJournal) -> bool:
    return journal.has(SET, cell, made_of=cell.made_of)


def left_to_measure(plan: StudyPlan, journal: CellJournal) -> list[StudyCell]:
    """Return the cells that the journal lacks, or has measured with other inputs."""
    return [cell for cell in plan.cells.values() if not is_measured(cell, journal)]


def bench_of(plan: StudyPlan, out: Path, settings: StudySettings) -> StudyBench:
    config = plan.config
    return StudyBench(
        folder=(settings.work or out) / MODELS,
        answers=out / ANSWERS,
        tasks=plan.tasks,
        texts=plan.texts,
        evaluate=config.evaluate,
        diagnose=config.diagnose,
        # A worker sees only its own GPU.
        device="cuda" if settings.device.startswith("cuda:") else settings.device,
        keep_models=(settings.keep or config.keep) == MODELS,
    )


def workers_for(settings: StudySettings, cells: int, largest: int) -> Workers:
    """Return one worker per GPU, or for the named GPU; on a CPU one per core, as far as their
    models fit into memory.
    """
    device = resolve_device(settings.device)
    gpus = gpu_ids() if device.type == "cuda" else ()
    if device.index is not None:
        gpus = gpus[device.index : device.index + 1]
    if gpus:
        count = min(settings.jobs or len(gpus), cells)
        return Workers(count, threads=max(1, cpu_count() // count), gpus=gpus)
    fitting = available_memory(resolve_device("cpu")) // max(1, IN_MEMORY * largest)
    count = min(settings.jobs or max(1, min(cpu_count(), fitting)), cells)
    return Workers(count, threads=max(1, cpu_count() // count))
