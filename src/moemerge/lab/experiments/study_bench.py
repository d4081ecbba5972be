"""Make the models of a study through the public API, and measure them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from moemerge import api
from moemerge.checkpoint.locate import locate_data
from moemerge.config.faults import parse_settings
from moemerge.config.fields import Strict
from moemerge.config.job_settings import DiagnosisSettings
from moemerge.config.repairs import RepairSettings
from moemerge.config.text_settings import DataRecipe
from moemerge.lab import api as lab_api
from moemerge.lab.evaluation.answers import file_name
from moemerge.lab.evaluation.job import BenchmarkTask
from moemerge.lab.evaluation.report import EvaluationReport
from moemerge.lab.evaluation.settings import PERPLEXITY
from moemerge.lab.experiments.settings import BY_VERB, DiagnoseBlock, EvaluateBlock
from moemerge.lab.experiments.summary import packed
from moemerge.lab.experiments.tree import StudyCell, StudyNode
from moemerge.lab.tuning.settings import TuningSettings
from moemerge.text.rows import stream_rows

AUTO = "auto"
S = TypeVar("S", bound=Strict)


@dataclass(frozen=True)
class StudyBench:
    """Makes and measures the models of a study. Small enough to be sent to a worker process."""

    folder: Path  # folder of models
    answers: Path  # folder of their answers
    tasks: tuple[BenchmarkTask, ...]
    texts: Mapping[str, tuple[str, ...]]  # texts of the task perplexity
    evaluate: EvaluateBlock
    diagnose: DiagnoseBlock | None
    device: str
    keep_models: bool

    # --- nodes ---

    def prepare(self) -> None:
        """Do nothing."""

    def path(self, node: StudyNode) -> str:
        """Return the model's folder or hub id, or the text's file."""
        if node.kind == "given":
            return str(node.values["model"])
        if node.kind == "text":
            return str(node.values["file"])
        return str(self.folder / node.slug)

    def make(self, node: StudyNode) -> None:
        """Make a node whose parents exist, unless it exists too."""
        out = Path(self.path(node))
        if os.path.exists(out):
            return
        out.parent.mkdir(parents=True, exist_ok=True)
        makers: dict[str, Callable[[StudyNode, Path], None]] = {
            "text": self._write,
            "merge": self._merge,
            "routers": self._swap,
            "tune": self._tune,
            **dict.fromkeys(BY_VERB, self._repair),
        }
        makers[node.kind](node, out)

    def remove(self, node: StudyNode) -> None:
        """Delete a model. Texts stay, because the study file names them."""
        if node.is_model and not node.is_given and not self.keep_models:
            shutil.rmtree(self.path(node), ignore_errors=True)

    def _write(self, node: StudyNode, out: Path) -> None:
        recipe = DataRecipe.model_validate(node.values["recipe"])
        model, settings = self.path(node.parents[0]), self._here(recipe.settings)
        lab_api.make_data(model, out, prompts=recipe.prompts, text=recipe.text, settings=settings)

    def _merge(self, node: StudyNode, out: Path) -> None:
        paths = {parent.name: self.path(parent) for parent in node.parents if parent.is_model}
        api.merge(with_paths(node.values, paths), out, device=self.device)

    def _swap(self, node: StudyNode, out: Path) -> None:
        model, donor = map(self.path, node.parents)
        api.swap_routers(model, donor, out, link=not self.keep_models)

    def _tune(self, node: StudyNode, out: Path) -> None:
        model, *texts = node.parents
        settings = parse_settings(TuningSettings, node.values["settings"], f"study, {node.name}")
        files = [self._files(text) for text in texts]
        limit = _rows(node.values["share"], files, len(texts))
        lab_api.tune(
            self.path(model),
            out,
            data=[file for own in files for file in own],
            # A copy keeps which settings were given: a preset fills in the others.
            settings=self._here(settings, **limit),
        )

    def _repair(self, node: StudyNode, out: Path) -> None:
        merged, *others = node.parents
        names = node.values["sources"]
        models, texts = others[: len(names)], others[len(names) :]
        files = [self._files(text) for text in texts]
        settings = BY_VERB[node.kind].settings.model_validate(node.values["settings"])
        # The study itself measures all of its models.
        measure = {"measure": False} if isinstance(settings, RepairSettings) else {}
        # A share of the rows is that share of the smallest domain's, in every domain.
        settings = self._here(settings, **measure, **_rows(node.values["share"], files))
        getattr(api, node.kind)(
            self.path(merged),
            out,
            sources={n: self.path(model) for n, model in zip(names, models, strict=True)},
            data=dict(zip(names, files, strict=True)),
            **{n: node.values[n] for n in ("weights", "experts") if node.values.get(n)},
            settings=settings,
        )

    def _files(self, text: StudyNode) -> list[Path]:
        """Return the files of a text; missing ones are downloaded from the hub."""
        if text.kind == "text":
            return [Path(self.path(text))]
        return [file for name in text.values["files"] for file in locate_data(name)]

    def _here(self, settings: S, **update: Any) -> S:
        """Return settings with updates, and with the device of this study unless they name one."""
        if getattr(settings, "device", None) == AUTO:
            update["device"] = self.device
        return settings.model_copy(update=update)

    # --- measurements ---

    def measure(self, cell: StudyCell) -> dict[str, Any]:
        """Return the scores and the routing of a cell, by domain."""
        begin = time.perf_counter()
        domains: dict[str, dict[str, Any]] = {}
        notices: list[str] = []
        for node, own in cell.models.items():
            scores, said = self._scores(node, own)
            domains |= scores
            notices += said
        for domain, routing in self._routing(cell).items():
            if domain in domains:
                domains[domain] |= routing
        losses, said = self._losses(cell)
        notices += said
        return {
            "made_of": cell.made_of,
            "domains": {domain: domains[domain] for domain in cell.domains},
            **losses,
            "notices": notices,
            "seconds": round(time.perf_counter() - begin, 2),
        }

    def _scores(
        self, node: StudyNode, domains: Sequence[str]
    ) -> tuple[dict[str, dict[str, Any]], list[str]]:
        asked = {t.name: t.file for d in domains for t in self.tasks if t.settings.domain == d}
        data = {n: files for n, files in self.evaluate.data.items() if n in asked}
        report = self._evaluated(node, [str(file) for file in asked.values()], data)
        by_task: dict[str, dict[str, Any]] = {}
        for task in report.tasks:
            scores = task.scores[0].tolist()
            one = {"problems": len(scores), "accuracy": sum(scores) / len(scores), **packed(scores)}
            by_task.setdefault(task.domain, {})[task.name] = one
        by_domain = {}
        for domain, tasks in by_task.items():
            values = [task["accuracy"] for task in tasks.values()]
            problems = sum(task["problems"] for task in tasks.values())
            accuracy = sum(values) / len(values)
            by_domain[domain] = {"problems": problems, "accuracy": accuracy, "tasks": tasks}
        return by_domain, list(report.notices)

    def _evaluated(
        self, node: StudyNode, tasks: Sequence[str], data: Mapping[str, tuple[str, ...]]
    ) -> EvaluationReport:
        settings, out = self._here(self.evaluate.settings), self.answers / file_name(node.slug)
        return lab_api.evaluate(self.path(node), tasks, data=data, settings=settings, out=out)

    def _losses(self, cell: StudyCell) -> tuple[dict[str, Any], list[str]]:
        """Return the losses on plain texts by document, for a cell of one model."""
        if not self.texts or len(cell.models) != 1:
            return {}, []
        (node,) = cell.models
        report = self._evaluated(node, [PERPLEXITY], self.texts)
        by_text = {
            text.name: {"sums": list(own.sums), "tokens": list(own.tokens)}
            for text in report.perplexity
            for own in text.documents.values()
        }
        return {"perplexity": by_text}, list(report.notices)

    def _routing(self, cell: StudyCell) -> dict[str, dict[str, Any]]:
        if self.diagnose is None or not cell.beside:
            return {}
        (node,) = cell.models
        sources, texts = cell.beside[::2], cell.beside[1::2]
        update = {}
        if self.diagnose.data is None and "holdout" not in self.diagnose.model_fields_set:
            update["holdout"] = AUTO  # rows that repairs have not used, if there are enough
        diagnosis = api.diagnose(
            self.path(node),
            sources={source.name: self.path(source) for source in sources},
            data={s.name: self._files(text) for s, text in zip(sources, texts, strict=True)},
            settings=self._here(self.diagnose.narrowed(DiagnosisSettings), **update),
        )
        by_source = {}
        for source in sources:
            total, rows = diagnosis.total(source.name), diagnosis.layers_of(domain=source.name)
            by_source[source.name] = {
                "mismatch": total.mismatch,
                "any_mismatch": total.any_mismatch,
                "kl": total.kl,
                "kl_layers": [row.kl for row in rows],
                "tokens": total.tokens,
            }
        return by_source


def _rows(share: float | None, texts: Sequence[list[Path]], times: int = 1) -> dict[str, int]:
    """Return the limit for this share of the rows: `times` those of the smallest text."""
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
