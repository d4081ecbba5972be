"""Plan a study from its file: nodes, cells and tables, all checked, nothing made."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moemerge.api import check_config, method_schemas
from moemerge.checkpoint.locate import is_local
from moemerge.config.dump import plain_settings
from moemerge.config.faults import Fault
from moemerge.config.fields import Strict
from moemerge.config.job_settings import DiagnosisSettings
from moemerge.config.models import ModelRef
from moemerge.config.parameters import BasePolicy
from moemerge.config.repairs import RepairBlock, selected_sources
from moemerge.config.schema import REPAIRS
from moemerge.config.text_settings import DataRecipe, files_of
from moemerge.lab.evaluation.job import BenchmarkTask, find_task
from moemerge.lab.evaluation.settings import PERPLEXITY, EvaluationSettings
from moemerge.lab.experiments.settings import (
    AVERAGE,
    BASE,
    BY_VERB,
    RepairEntry,
    StudyConfig,
    TableEntry,
    TuneBlock,
    TunedSource,
)
from moemerge.lab.experiments.study_file import SOURCES, LoadedStudy, unknown
from moemerge.lab.experiments.tables import AS_MERGED, REFERENCE, Row, TableForm
from moemerge.lab.experiments.tree import (
    StudyCell,
    StudyNode,
    at_seed,
    digest_of,
    given_model,
    recipes,
    task_words,
    text_files,
    with_parents,
)
from moemerge.lab.tuning.settings import TuningSettings

ALL = "table"  # the table of a study without tables
INPUTS = ("prompts", "text")  # keys of a recipe whose local files are parents of the text
# Settings of where and how fast work is done. No result depends on them.
IDLE = ("device", "offload", "workers", "batch_size", "url", "served_model", "measure", "draws")


@dataclass(frozen=True)
class StudyTable:
    """A table's rows and its form."""

    form: TableForm
    rows: tuple[Row[StudyCell], ...]


@dataclass(frozen=True)
class StudyPlan:
    """All nodes, cells and tables of a study."""

    config: StudyConfig
    tasks: tuple[BenchmarkTask, ...]
    tables: tuple[StudyTable, ...]  # nodes of the first seed
    seeds: tuple[StudyPlan, ...] = ()  # the plan of each seed, if the study is repeated
    texts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of `perplexity`

    @property
    def cells(self) -> dict[str, StudyCell]:
        """All cells by name, in the order of seeds and tables."""
        own = {row.cell.name: row.cell for table in self.tables for row in table.rows}
        if not self.seeds:
            return own
        cells: dict[str, StudyCell] = {}
        for seed, plan in zip(self.config.seeds, self.seeds, strict=True):
            for name, cell in plan.cells.items():
                cells[at_seed(name, seed)] = replace(cell, name=at_seed(name, seed))
        return cells

    def nodes(self, cells: Iterable[StudyCell] | None = None) -> list[StudyNode]:
        """All nodes that these cells (by default, all) need, parents first."""
        cells = self.cells.values() if cells is None else cells
        return with_parents(node for cell in cells for node in cell.nodes)


def plan_study(loaded: LoadedStudy) -> StudyPlan:
    """Plan a study, and refuse whatever is wrong with its merges and tasks."""
    plan = _Planner(loaded).plan()
    if not loaded.config.seeds:
        return plan
    others = [_Planner(loaded.at(seed)).plan() for seed in loaded.config.seeds[1:]]
    repeated = replace(plan, seeds=(plan, *others))
    loaded.document.judge(_seed_faults(repeated))
    return repeated


def _seed_faults(plan: StudyPlan) -> Iterator[Fault]:
    """Yield inputs that seeds must share and do not, or must not share and do."""
    for other in plan.seeds:
        if other.config.evaluate != plan.config.evaluate:
            yield Fault(("evaluate",), "all seeds share their tasks: no {seed} here")
            break
    files: dict[str, StudyNode] = {}
    for node in plan.nodes():
        if node.kind == "text" and files.setdefault(node.values["file"], node) != node:
            words = "is made anew for every seed: put {seed} into its name"
            yield Fault(("seeds",), f"the text {node.values['file']} {words}")
            return


class _Planner:
    def __init__(self, loaded: LoadedStudy) -> None:
        self.loaded, self.config = loaded, loaded.config
        self.schemas = method_schemas()
        asked = [n for n in dict.fromkeys(self.config.evaluate.tasks) if n != PERPLEXITY]
        self.tasks = tuple(find_task(name) for name in asked)
        names = [task.name for task in self.tasks]
        loaded.document.judge(self.config.evaluate.perplexity_faults(names))
        self.texts_measured = self.config.evaluate.texts(names)
        self.domains = tuple(dict.fromkeys(task.settings.domain for task in self.tasks))
        self.models: dict[str, StudyNode] = {}
        self.recipes = dict(recipes(self.config))
        self.written: dict[str, StudyNode] = {}  # by the file that a recipe writes
        if self.config.base is not None:
            self.models[BASE] = self.base(self.config.base)
        for name, source in self.config.sources.items():
            self.models[name] = self.source(name, source)
        diagnose = self.config.diagnose
        self.asked = digest_of(
            [
                _settings(self.config.evaluate, EvaluationSettings),
                [task_words(task, self.config) for task in self.tasks],
                None if diagnose is None else _settings(diagnose, DiagnosisSettings),
                *(
                    [name, text_files(name, files).values["content"]]
                    for name, files in self.texts_measured.items()
                ),
            ]
        )
        self.merges = {name: self.merge(name) for name in self.config.merges}

    def plan(self) -> StudyPlan:
        tables = self.config.tables or {
            ALL: TableEntry.model_validate({"title": self.config.title})
        }
        made = tuple(self.table(name, entry) for name, entry in tables.items())
        return StudyPlan(self.config, self.tasks, made, texts=self.texts_measured)

    # --- sources and texts ---

    def base(self, ref: ModelRef) -> StudyNode:
        """The base as given, or with the chat template that its fine-tunes learn."""
        given = given_model(BASE, ref)
        if self.config.chat_template is None:
            return given
        models = [_with_name({"model": BASE})]
        template = {"merge_method": "passthrough", "models": models}
        template["chat_template"] = self.config.chat_template
        return StudyNode.of("merge", BASE, template, (given,))

    def source(self, name: str, source: ModelRef | TunedSource) -> StudyNode:
        if isinstance(source, ModelRef):
            return given_model(name, source)
        start = self.models[BASE] if source.model is None else given_model(BASE, source.model)
        assert source.tune.data is not None  # checked before
        rows = self.text(name, source.tune.data, start)
        return StudyNode.of("tune", name, _tuning(source.tune, None), (start, rows))

    def text(
        self, name: str, text: tuple[str, ...] | DataRecipe, by: StudyNode | None = None
    ) -> StudyNode:
        """The text of one source: files, or the recipe that makes them."""
        if not isinstance(text, DataRecipe) and len(text) == 1 and text[0] in self.recipes:
            name, text = self.recipes[text[0]]
        if not isinstance(text, DataRecipe):
            return text_files(name, text)
        by = self.models[name] if by is None else by
        spec: dict[str, Any] = {"file": text.file, "recipe": plain_settings(text)}
        made_of = [file for file in (*text.prompts, *text.text) if is_local(file)]
        parents = (by, *(text_files(name, (file,)) for file in made_of))
        fetched = {key: [f for f in getattr(text, key) if f not in made_of] for key in INPUTS}
        identity = {**spec["recipe"], **fetched, "file": os.path.basename(text.file)}
        node = StudyNode.of("text", f"text {text.file}", spec, parents, identity)
        first = self.written.setdefault(text.file, node)
        if first.spec != node.spec or (first != node and not text.text):
            words = f"text of {name!r} is made in another way than other text of the same file"
            self.loaded.document.judge([Fault((), f"{words}, {text.file}")])
        return first  # plain text does not depend on the model

    def texts(self, data: Mapping[str, Any], names: Sequence[str]) -> dict[str, StudyNode]:
        return {name: self.text(name, data[name]) for name in names if name in data}

    # --- merges ---

    def merge(self, name: str) -> StudyNode:
        """A merge, checked like a config file; its models are names of sources."""
        raw = self.config.merges[name]
        self.loaded.document.judge(self.merge_faults(name, raw))
        data = self.filled(raw)
        check_config(self.loaded.merge_document(name, data))
        used = _used(data)
        parents = [self.models[model] for model in used]
        if "data" in data:
            texts = self.texts(self.config.data or {}, [n for n in used if n in data["data"]])
            parents += texts.values()
        identity = {**data, "data": sorted(data.get("data", ()))}  # its files are parents
        return StudyNode.of("merge", name, data, tuple(parents), identity)

    def merge_faults(self, name: str, raw: Mapping[str, Any]) -> Iterator[Fault]:
        for repair in REPAIRS:
            if repair.key in raw:
                place = ("merges", name, repair.key)
                yield Fault(place, "repairs of merges belong under `repairs`")
        known = [*self.config.sources, *([BASE] if self.config.base is not None else [])]
        for model in _used(raw):
            yield from unknown(model, known, ("merges", name), "source")

    def filled(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in what all merges of a study share: models, names, base and text."""
        data = dict(raw)
        if not any(key in data for key in ("models", "slices", "modules")):
            data["models"] = [{"model": name} for name in self.config.sources]
        if isinstance(data.get("models"), list):
            data["models"] = [_with_name(entry) for entry in data["models"]]
        schema = self.schemas.get(str(data.get("merge_method")))
        if schema is None:
            return data  # refused later
        if schema.base is BasePolicy.REQUIRED and self.config.base is not None:
            data.setdefault("base_model", BASE)
        if schema.statistics and self.config.data and not {"data", "statistics"} & data.keys():
            merged = [n for n in _used(data) if n in self.config.data and n != BASE]
            data["data"] = {n: list(files_of(self.config.data[n])) for n in merged}
        return data

    def sources_of(self, merge: str) -> tuple[str, ...]:
        """Return the sources of a merge."""
        return tuple(name for name in _used(self.merges[merge].values) if name != BASE)

    # --- repairs ---

    def repaired(self, merge: str, repair: str) -> StudyNode:
        entry = self.config.repairs[repair]
        start = self.merges[merge] if entry.after is None else self.repaired(merge, entry.after)
        name = f"{merge}, {repair}"
        if entry.routers is not None:
            donor = self.donor(merge, entry.routers)
            return StudyNode.of("routers", name, {}, (start, donor))
        if entry.tune is not None:
            return self.tuned(merge, name, entry, start)
        block = entry.block
        assert block is not None
        settings = block.narrowed(BY_VERB[entry.kind].settings)
        sources = self.repair_sources(merge, entry, block)
        texts = self.texts(self.repair_data(entry), list(sources))
        spec = {
            "settings": plain_settings(settings, given=True),
            "weights": block.weights or {},
            **({"experts": block.experts} if block.experts else {}),
            "sources": list(texts),
            "share": entry.share,
        }
        models = tuple(sources[source] for source in texts)
        return StudyNode.of(entry.kind, name, spec, (start, *models, *texts.values()))

    def tuned(self, merge: str, name: str, entry: RepairEntry, start: StudyNode) -> StudyNode:
        """Fine-tuning after the merge, on its own rows or on the text of all merged sources."""
        assert entry.tune is not None
        if entry.tune.data is not None:
            rows = [self.text(name, entry.tune.data, start)]
        else:
            rows = list(self.texts(self.repair_data(entry), self.sources_of(merge)).values())
        return StudyNode.of("tune", name, _tuning(entry.tune, entry.share), (start, *rows))

    def repair_sources(
        self, merge: str, entry: RepairEntry, block: RepairBlock
    ) -> dict[str, StudyNode]:
        """Return a list's sources, or the merged ones and those added; the base if it has text."""
        if isinstance(block.sources, tuple):
            return selected_sources(block.sources, self.models, given_model)
        sources = {name: self.models[name] for name in self.sources_of(merge)}
        if BASE in self.models and BASE in self.repair_data(entry):
            sources[BASE] = self.models[BASE]
        added = block.sources or {}
        return {**sources, **{name: given_model(name, ref) for name, ref in added.items()}}

    def repair_data(self, entry: RepairEntry) -> Mapping[str, Any]:
        if entry.block is not None and entry.block.data is not None:
            return entry.block.data
        return self.config.texts[entry.text] if entry.text else self.config.data or {}

    def donor(self, merge: str, which: str) -> StudyNode:
        """Return whose routers a repair takes: a source's, or the average of the merged ones."""
        if which != AVERAGE:
            return self.models[which]
        names = self.sources_of(merge)
        models = [_with_name({"model": n, "parameters": {"weight": 1.0}}) for n in names]
        config = {"merge_method": "linear", "models": models}
        for key in ("dtype", "out_dtype", "tokenizer_source", "tokenizer"):
            if key in self.merges[merge].values:
                config[key] = self.merges[merge].values[key]
        words = f"average of {', '.join(names)}"
        return StudyNode.of("merge", words, config, tuple(self.models[n] for n in names))

    # --- tables ---

    def table(self, name: str, entry: TableEntry) -> StudyTable:
        labels = list(entry.repairs if entry.repairs is not None else self.config.repairs)
        references = entry.reference
        if references is None:
            references = (*([BASE] if BASE in self.models else []), SOURCES)
        controls = self.controls(labels)
        others = [label for label in labels if label not in controls]
        rows = [Row(REFERENCE, one, self.reference(one)) for one in references]
        for merge in entry.merges if entry.merges is not None else self.config.merges:
            merged = self.merges[merge]
            rows.append(Row(merge, AS_MERGED, self.cell(merge, merged, merge)))
            for label in labels:
                repair = self.config.repairs[label]
                if repair.routers == AVERAGE and _averages(merged.values):
                    continue  # its routers are averaged already
                node = self.repaired(merge, label)
                rows.append(Row(merge, label, self.cell(node.name, node, merge), repair.x))
        tasks: dict[str, dict[str, str]] = {domain: {} for domain in self.domains}
        for task in self.tasks:
            tasks[task.settings.domain][task.name] = task.settings.title
        form = TableForm(
            name=name,
            title=entry.title or name,
            about=entry.about,
            domains=self.domains,
            figure=entry.figure,
            axis=entry.axis,
            compare=entry.compare
            if entry.compare is not None
            else tuple((control, label) for control in controls for label in others),
            control=next(iter(controls), ""),
            singles=tuple(one for one in references if one != SOURCES),
            tasks=tasks,
            paired_by="problems",
        )
        return StudyTable(form, tuple(rows))

    def reference(self, which: str) -> StudyCell:
        if which != SOURCES:
            return self.cell(which, self.models[which])
        own = tuple((d, self.models[d]) for d in self.domains if d in self.config.sources)
        if not own:
            text = f"no task's domain ({', '.join(self.domains)}) is the name of a source"
            self.loaded.document.judge([Fault(("sources",), text)])
        return self.cell(SOURCES, own)

    def cell(
        self,
        name: str,
        runs: StudyNode | tuple[tuple[str, StudyNode], ...],
        merge: str | None = None,
    ) -> StudyCell:
        """Return the cell of one model for all domains, or of a model for each."""
        if isinstance(runs, StudyNode):
            runs = tuple((domain, runs) for domain in self.domains)
        beside = () if merge is None else self.routing_nodes(merge)
        digests = [[domain, node.digest] for domain, node in runs]
        made_of = digest_of([self.asked, digests, [node.digest for node in beside]])
        return StudyCell(name, runs, made_of, beside)

    def routing_nodes(self, merge: str) -> tuple[StudyNode, ...]:
        """Return sources and their texts, in turn, on which routing is compared."""
        block = self.config.diagnose
        if block is None:
            return ()
        data = block.data or self.config.data or {}
        names = [name for name in self.sources_of(merge) if name in data]
        texts = self.texts(data, names)
        return tuple(node for name in names for node in (self.models[name], texts[name]))

    def controls(self, labels: Sequence[str]) -> list[str]:
        """Return the repairs that only average the routers."""
        repairs = self.config.repairs
        return [n for n in labels if repairs[n].routers == AVERAGE and repairs[n].after is None]


def _tuning(block: TuneBlock, share: float | None) -> dict[str, Any]:
    """Return the settings as given; a preset fills in the others."""
    values = plain_settings(block.narrowed(TuningSettings))
    given = {name: values[name] for name in sorted(block.model_fields_set) if name in values}
    return {"settings": given, "share": share}


def _settings(block: Strict, kind: type[Strict]) -> dict[str, Any]:
    values = plain_settings(block.narrowed(kind))
    return {name: value for name, value in values.items() if name not in IDLE}


def _with_name(entry: Any) -> Any:
    """Name a merge's model as in the study."""
    if isinstance(entry, Mapping) and isinstance(entry.get("model"), str):
        return {"name": entry["model"], **entry}
    return entry


def _used(data: Mapping[str, Any]) -> list[str]:
    """Return the names of all models in a merge, as far as they can be read; faults come later."""
    names: dict[str, None] = {}
    base = data.get("base_model")
    entries = list(data.get("models") or ()) if isinstance(data.get("models"), list) else []
    for one in data.get("slices") or () if isinstance(data.get("slices"), list) else ():
        entries += one.get("sources", []) if isinstance(one, Mapping) else []
    for entry in entries:
        if isinstance(entry, Mapping) and isinstance(entry.get("model"), str):
            names[entry["model"]] = None
    if isinstance(base, str):
        names[base] = None
    return list(names)


def _averages(config: Mapping[str, Any]) -> bool:
    """Return whether a merge is a plain average, whose routers are averages too."""
    if config.get("merge_method") != "linear" or "router" in config or "slices" in config:
        return False
    shared = config.get("parameters", {}).get("weight")
    weights = [entry.get("parameters", {}).get("weight", shared) for entry in config["models"]]
    return len({str(weight) for weight in weights}) == 1 and not isinstance(weights[0], list | dict)
