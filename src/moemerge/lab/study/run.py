"""Run the commands of a study that are missing, and write its tables.

A command's output is a folder, a file, or a JSON file of measurements whose name has its key. What
exists is not made again, so a killed study is resumed by the same command.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from moemerge import api
from moemerge.checkpoint.locate import locate_data
from moemerge.config.faults import parse_settings
from moemerge.config.job_settings import DiagnosisSettings
from moemerge.config.repairs import RepairSettings
from moemerge.config.settings import settings_for, with_keywords
from moemerge.config.text_settings import DataRecipe
from moemerge.errors import MoeMergeError
from moemerge.lab import api as lab_api
from moemerge.lab.settings import PERPLEXITY
from moemerge.lab.study.plan import Command, Study, in_order, plan_study
from moemerge.lab.study.settings import BY_VERB, StudySettings
from moemerge.lab.study.tables import Summary, require_matplotlib, summarise, write_report
from moemerge.lab.tuning.settings import TuningSettings
from moemerge.runtime.devices import cpu_count, share_memory
from moemerge.runtime.files import write_whole
from moemerge.runtime.outputs import check_name
from moemerge.runtime.progress import Progress, Silent
from moemerge.text.rows import stream_rows

MODELS: Final = "models"


@dataclass(frozen=True)
class Failure:
    """A command that failed."""

    what: str
    why: str


@dataclass(frozen=True)
class StudyReport:
    """The tables of a study, and the files it wrote (the page first)."""

    summaries: tuple[Summary, ...]
    failures: tuple[Failure, ...]
    written: tuple[Path, ...]
    measured: int  # in this run
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
    plan = plan_study(source, overrides)
    return run_study(plan, Path(out), settings, Silent() if progress is None else progress)


def run_study(plan: Study, out: Path, settings: StudySettings, progress: Progress) -> StudyReport:
    """Run what is missing, and rewrite the tables."""
    check_name(out)
    if settings.figures:
        require_matplotlib()
    bench = Bench(plan, out, settings)
    left = [cell for cell in plan.cells if not bench.path(cell).exists()]
    progress.start("measuring", len(left), unit="cells")
    failures = run_commands(in_order(left), bench, settings.jobs or 1, progress)
    progress.finish()
    if not bench.keep_models and not failures:
        shutil.rmtree(bench.models, ignore_errors=True)
    summaries = tuple(summarise(table, bench.entry) for table in plan.tables)
    written = write_report(
        out,
        summaries,
        figures=settings.figures,
        title=plan.config.title,
        about=plan.config.about,
    )
    missing = sum(not bench.path(cell).exists() for cell in left)
    known = len(plan.cells) - len(left)
    return StudyReport(summaries, tuple(failures), tuple(written), len(left) - missing, known)


def run_commands(
    commands: Sequence[Command], bench: Bench, jobs: int, progress: Progress
) -> list[Failure]:
    """Run commands that exist after their inputs, `jobs` at a time, in this order if possible.

    After a failure everything runs that does not need it.
    """
    waiting = [one for one in commands if not one.is_given]
    users = Counter(needed for one in waiting for needed in one.inputs)
    done = {one for one in commands if one.is_given}
    failures: list[Failure] = []
    running: dict[Future[str | None], Command] = {}
    spawn = multiprocessing.get_context("spawn")
    pool = None
    if jobs > 1:
        pool = ProcessPoolExecutor(jobs, spawn, initializer=_start_worker, initargs=(jobs,))
    try:
        while waiting or running:
            for one in [one for one in waiting if done.issuperset(one.inputs)]:
                if len(running) < jobs:
                    waiting.remove(one)
                    running[_submitted(pool, bench, one)] = one
            if not running:
                break  # all that waits needs something that failed
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                one = running.pop(future)
                error = future.exception()
                why = future.result() if error is None else f"{type(error).__name__}: {error}"
                if why is not None:
                    progress.note(f"failed: {one.name}: {why}")
                    failures.append(Failure(f"{one.verb} {one.name}", why))
                    continue
                done.add(one)
                progress.advance(int(one.verb == "measure"))
                users.subtract(one.inputs)
                for needed in one.inputs:
                    if not users[needed]:
                        bench.remove(needed)
    finally:
        if pool is not None:
            pool.shutdown(wait=not running, cancel_futures=True)
    return failures


def _submitted(pool: ProcessPoolExecutor | None, bench: Bench, one: Command) -> Future[str | None]:
    if pool is not None:
        return pool.submit(bench.make, one)
    future: Future[str | None] = Future()
    future.set_result(bench.make(one))
    return future


def _start_worker(jobs: int) -> None:
    """Give a worker process its part of the cores and of the memory."""
    import torch

    torch.set_num_threads(max(1, cpu_count() // jobs))
    share_memory(cpu=jobs, cuda=jobs)


class Bench:
    """The folders of a study, and how its commands are run there."""

    def __init__(self, plan: Study, out: Path, settings: StudySettings) -> None:
        # Of commands that are the same, the first gives its name to the output.
        self.slugs = {one.key: one.slug for one in reversed(in_order(plan.cells))}
        self.models = (settings.work or out) / MODELS
        self.cells, self.answers = out / "cells", out / "answers"
        self.tasks, self.texts = plan.tasks, plan.texts
        self.evaluate, self.diagnose = plan.config.evaluate, plan.config.diagnose
        self.device = settings.device
        self.keep_models = (settings.keep or plan.config.keep) == MODELS

    def path(self, one: Command) -> Path:
        """Return where a command's output is."""
        if one.verb == "measure":
            return self.cells / f"{self.slugs[one.key]}.json"
        if one.is_given:
            return Path(one.arguments["model"])
        return (
            Path(one.arguments["file"]) if one.verb == "data" else self.models / self.slugs[one.key]
        )

    def model(self, one: Command) -> str:
        """Return a model's folder or hub id."""
        return str(one.arguments["model"]) if one.is_given else str(self.path(one))

    def files(self, text: Command) -> list[Path]:
        """Return the files of a text; missing ones are downloaded from the hub."""
        if text.verb == "data":
            return [self.path(text)]
        return [file for name in text.arguments["files"] for file in locate_data(name)]

    def entry(self, cell: Command) -> dict[str, Any] | None:
        """Return the measurements of a cell, if they exist."""
        file = self.path(cell)
        return json.loads(file.read_text("utf-8")) if file.exists() else None

    def remove(self, one: Command) -> None:
        """Delete a model that nothing needs. Texts stay, because the study file names them."""
        if one.is_model and not one.is_given and not self.keep_models:
            shutil.rmtree(self.path(one), ignore_errors=True)

    def make(self, one: Command) -> str | None:
        """Run a command whose inputs exist, unless its output exists; return why it failed."""
        out = self.path(one)
        if os.path.exists(out):
            return None
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            if one.verb == "measure":
                write_whole(out, json.dumps(self.measured(one)).encode())
            else:
                self.run(one, out)
        except MoeMergeError as error:
            return str(error)
        except Exception as error:  # the other commands of the study run all the same
            return f"{type(error).__name__}: {error}"
        return None

    def run(self, one: Command, out: Path) -> None:
        """Call the verb of a command."""
        first, *others = one.inputs
        arguments = one.arguments
        if one.verb == "data":
            recipe = DataRecipe.model_validate(arguments["recipe"])
            how = self.here(recipe.settings)
            lab_api.make_data(
                self.model(first), out, prompts=recipe.prompts, text=recipe.text, settings=how
            )
        elif one.verb == "merge":
            paths = {given.name: self.model(given) for given in one.inputs if given.is_model}
            api.merge(with_paths(arguments, paths), out, device=self.device)
        elif one.verb == "swap-routers":
            api.swap_routers(self.model(first), self.model(others[0]), out, link=False)
        elif one.verb == "tune":
            files = [self.files(text) for text in others]
            settings = parse_settings(TuningSettings, arguments["settings"], f"study, {one.name}")
            # A copy keeps which settings were given: a preset fills in the others.
            how = self.here(settings, **_limit(arguments["share"], files, len(files)))
            data = [file for own in files for file in own]
            lab_api.tune(self.model(first), out, data=data, settings=how)
        else:
            names = arguments["sources"]
            models, texts = others[: len(names)], others[len(names) :]
            files = [self.files(text) for text in texts]
            repair: Any = BY_VERB[one.verb].settings.model_validate(arguments["settings"])
            # The study itself measures all of its models.
            measure = {"measure": False} if isinstance(repair, RepairSettings) else {}
            how = self.here(repair, **measure, **_limit(arguments["share"], files))
            getattr(api, one.verb)(
                self.model(first),
                out,
                sources={n: self.model(m) for n, m in zip(names, models, strict=True)},
                data=dict(zip(names, files, strict=True)),
                **{n: arguments[n] for n in ("weights", "experts") if arguments.get(n)},
                settings=how,
            )

    def here(self, settings: Any, **update: Any) -> Any:
        """Return settings with updates, and with the device of this study unless they name one."""
        if getattr(settings, "device", None) == "auto":
            update["device"] = self.device
        return settings.model_copy(update=update)

    # --- measurements ---

    def measured(self, cell: Command) -> dict[str, Any]:
        """Return the scores and the routing of a cell by domain, and its losses by text."""
        begin = time.perf_counter()
        solves = cell.arguments["solves"]
        domains: dict[str, dict[str, Any]] = {}
        for model, own in zip(cell.inputs, solves, strict=False):
            for domain in own:
                domains[domain] = self.scores(model, domain)
        for domain, routing in self.routing(cell, len(solves)):
            domains.setdefault(domain, {}).update(routing)
        losses = {}
        if self.texts and len(solves) == 1:
            report = self.evaluated(cell.inputs[0], [PERPLEXITY], self.texts)
            for text in report.perplexity:
                (own,) = text.documents.values()
                losses[text.name] = {"sums": list(own.sums), "tokens": list(own.tokens)}
        wanted = {domain: domains[domain] for own in solves for domain in own}
        seconds = round(time.perf_counter() - begin, 2)
        return {"cell": cell.name, "domains": wanted, "perplexity": losses, "seconds": seconds}

    def scores(self, model: Command, domain: str) -> dict[str, Any]:
        asked = {t.name: str(t.file) for t in self.tasks if t.settings.domain == domain}
        data = {n: files for n, files in self.evaluate.data.items() if n in asked}
        report = self.evaluated(model, list(asked.values()), data)
        return {"tasks": {task.name: task.scores[0].tolist() for task in report.tasks}}

    def evaluated(
        self, model: Command, tasks: Sequence[str], data: Mapping[str, tuple[str, ...]]
    ) -> Any:
        how = self.here(self.evaluate.settings)
        out = self.answers / self.slugs[model.key]
        return lab_api.evaluate(self.model(model), tasks, data=data, settings=how, out=out)

    def routing(self, cell: Command, models: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield for each source how the routing of the cell's one model differs from it."""
        names = cell.arguments["sources"]
        if self.diagnose is None or not names:
            return
        sources = cell.inputs[models : models + len(names)]
        texts = cell.inputs[models + len(names) :]
        update = {}
        if self.diagnose.data is None and "holdout" not in self.diagnose.model_fields_set:
            update["holdout"] = "auto"  # rows that repairs have not used, if there are enough
        diagnosis = api.diagnose(
            self.model(cell.inputs[0]),
            sources={n: self.model(source) for n, source in zip(names, sources, strict=True)},
            data={n: self.files(text) for n, text in zip(names, texts, strict=True)},
            settings=self.here(self.diagnose.narrowed(DiagnosisSettings), **update),
        )
        for name in names:
            total = diagnosis.total(name)
            layers = [row.kl for row in diagnosis.layers_of(domain=name)]
            yield name, {"mismatch": total.mismatch, "kl": total.kl, "kl_layers": layers}


def _limit(share: float | None, texts: Sequence[list[Path]], times: int = 1) -> dict[str, int]:
    """Return the limit of rows for a share: `times` that share of the smallest text."""
    if share is None:
        return {}
    fewest = min(sum(1 for _ in stream_rows(files)) for files in texts)
    return {"limit": max(1, round(share * times * fewest))}


def with_paths(config: Any, paths: Mapping[str, str]) -> Any:
    """Replace the sources' names in a merge's config by folders."""
    if isinstance(config, list):
        return [with_paths(value, paths) for value in config]
    if not isinstance(config, Mapping):
        return config
    result = {}
    for key, value in config.items():
        named = key in ("model", "base_model") and isinstance(value, str)
        result[key] = paths.get(value, value) if named else with_paths(value, paths)
    return result
