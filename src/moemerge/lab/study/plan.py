"""Read a study file and list its commands. Nothing is made here.

Every model, text and measurement is one command. Its key is a hash of its settings and of the keys
of its inputs, and files that are given are known by their content. So commands that agree in all
of it are one command, and a result with the same key need not be made again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any, Final, NoReturn, TypeVar

from moemerge.api import check_config, method_schemas
from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.locate import HUB_ID, hub_ids, is_local
from moemerge.config.dump import plain_settings
from moemerge.config.faults import Fault, suggested
from moemerge.config.fields import Strict
from moemerge.config.job_settings import DiagnosisSettings
from moemerge.config.models import ModelRef
from moemerge.config.parameters import BasePolicy
from moemerge.config.repairs import selected_sources
from moemerge.config.schema import REPAIRS
from moemerge.config.text_settings import DataRecipe, files_of
from moemerge.config.yaml_lines import STUDY, Document, read_document, read_yaml, require_kind
from moemerge.errors import ConfigError
from moemerge.lab.benchmarks import TASK_SUFFIXES, BenchmarkTask, find_task
from moemerge.lab.settings import PERPLEXITY, EvaluationSettings
from moemerge.lab.study.settings import (
    AS_MERGED,
    AVERAGE,
    BASE,
    BY_VERB,
    StudyConfig,
    TableEntry,
    TuneBlock,
    TunedSource,
)
from moemerge.lab.tuning.settings import TuningSettings
from moemerge.runtime.files import file_digest

T = TypeVar("T")

EXTENDS: Final = "extends"
MOST_LAYERS: Final = 20  # files that extend each other; more would be a circle
SEED: Final = "{seed}"
SOURCES: Final = "sources"  # the row of all sources, each on its own domain
REFERENCE: Final = "reference"  # the group of rows that are not merges
# Settings of where and how fast work is done. No result depends on them.
IDLE: Final = ("device", "offload", "workers", "batch_size", "url", "served_model", "measure")


@dataclass(frozen=True)
class Command:
    """One model, text or measurement. Two commands with the same key are the same."""

    key: str
    verb: str = field(compare=False)  # a verb of moemerge; "model" and "files" are given
    name: str = field(compare=False)
    arguments: Mapping[str, Any] = field(compare=False)  # JSON
    inputs: tuple[Command, ...] = field(compare=False, default=())

    @property
    def is_given(self) -> bool:
        return self.verb in ("model", "files")

    @property
    def is_model(self) -> bool:
        return self.verb not in ("files", "data", "measure")

    @property
    def slug(self) -> str:
        """The name of its folder."""
        words = "".join(c if c.isalnum() or c in "-=.," else "_" for c in self.name)[:80]
        return f"{words}-{self.key[:10]}"


def command(
    verb: str,
    name: str,
    arguments: Mapping[str, Any],
    inputs: Sequence[Command] = (),
    identity: Any = None,
) -> Command:
    """Return a command. `identity` replaces the arguments in the key."""
    known = arguments if identity is None else identity
    key = digest_of([verb, known, [one.key for one in inputs]])
    return Command(key, verb, name, arguments, tuple(inputs))


def digest_of(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def in_order(commands: Iterable[Command]) -> list[Command]:
    """Return commands and all that they need, each once and after its inputs."""
    found: dict[Command, None] = {}
    for one in commands:
        if one not in found:
            found |= dict.fromkeys([*in_order(one.inputs), one])
    return list(found)


@dataclass(frozen=True)
class Row:
    """A row of a table: a measurement for each seed (0 without seeds)."""

    group: str
    label: str
    cells: Mapping[int, Command] = field(compare=False)
    x: float | None = None  # position on the figure's axis


@dataclass(frozen=True)
class Table:
    """A table's rows, and how they are compared."""

    name: str
    entry: TableEntry
    rows: tuple[Row, ...]
    tasks: Mapping[str, Mapping[str, str]]  # domain -> task -> title
    compare: tuple[tuple[str, str], ...]  # pairs of labels
    control: str  # label of the merge with averaged routers; may be empty
    singles: tuple[str, ...]  # reference rows of one model each

    @property
    def title(self) -> str:
        return self.entry.title or self.name


@dataclass(frozen=True)
class Study:
    """A checked study: its tables, and with them all its commands."""

    config: StudyConfig
    tasks: tuple[BenchmarkTask, ...]
    texts: Mapping[str, tuple[str, ...]]  # of the task perplexity
    tables: tuple[Table, ...]

    @property
    def cells(self) -> list[Command]:
        """All measurements, in the order of seeds and tables."""
        rows = [row for table in self.tables for row in table.rows]
        return list(dict.fromkeys(row.cells[seed] for seed in rows[0].cells for row in rows))


def plan_study(
    source: str | FilePath | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> Study:
    """Read a study (a YAML file, or its content), apply `overrides`, and check all of it."""
    document = load_study(source, overrides)
    seeds = document.data.get("seeds")
    if not (isinstance(seeds, list) and seeds):
        return _Planner(document, check_study(document)).study()
    plans = [_Planner(document, check_study(document, seed), seed).study() for seed in seeds]
    first = plans[0]
    if any(plan.config.evaluate != first.config.evaluate for plan in plans):
        document.judge([Fault(("evaluate",), "all seeds share their tasks: no {seed} here")])
    written: dict[str, Command] = {}
    for one in in_order(cell for plan in plans for cell in plan.cells):
        if one.verb == "data" and written.setdefault(one.arguments["file"], one) != one:
            text = f"the text {one.arguments['file']} is made anew for every seed: put {{seed}} "
            document.judge([Fault(("seeds",), f"{text}into its name")])
    tables = []
    for same in zip(*(plan.tables for plan in plans), strict=True):
        rows = [
            replace(rows[0], cells={seed: c for row in rows for seed, c in row.cells.items()})
            for rows in zip(*(table.rows for table in same), strict=True)
        ]
        tables.append(replace(same[0], rows=tuple(rows)))
    return replace(first, tables=tuple(tables))


# --- the file -------------------------------------------------------------------------------------


def load_study(
    source: str | FilePath | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> Document:
    """Read a study and lay it over the files that it extends, and `overrides` over all."""
    layers = _layers(source, MOST_LAYERS)
    document = layers[0]
    # Lines are known if there is one file.
    lines = document.lines if len(layers) == 1 else {}
    data: Any = layers[-1].data
    for above in [layer.data for layer in reversed(layers[:-1])] + [overrides or {}]:
        data = overlaid(data, above)
    data = {key: value for key, value in data.items() if key != EXTENDS}
    whole = Document(document.where, data, lines)
    require_kind(whole, STUDY)
    return whole


def check_study(document: Document, seed: Any = None) -> StudyConfig:
    """Return the study with `{seed}` replaced, and refuse all its faults at once."""
    data = document.data if seed is None else seeded(document.data, seed)
    return replace(document, data=data).parse(StudyConfig)


def _layers(source: str | FilePath | Mapping[str, Any], most: int) -> list[Document]:
    """Return a file and those that it extends, the topmost first: the last extended counts most."""
    document = read_document(source)
    names = document.data.get(EXTENDS, [])
    names = [names] if isinstance(names, str) else names
    known = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not known or (names and most == 0):
        raise ConfigError(
            f"{document.where}: `{EXTENDS}` is {document.data[EXTENDS]!r}",
            hint="expected names of study files, from this file's folder, that end somewhere",
        )
    folder = os.path.dirname(document.where)
    layers = [replace(document, data=_joined_paths(document.data, folder))]
    for name in reversed(names):
        layers += _layers(FilePath(document.where).parent / name, most - 1)
    return layers


def overlaid(below: Any, above: Any) -> Any:
    """Merge mappings key by key; otherwise `above` replaces `below`, and null removes a key."""
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    # In the order of the file below, which is that of its tables.
    merged = {k: overlaid(v, above[k]) if k in above else v for k, v in below.items()}
    merged |= {k: v for k, v in above.items() if k not in below}
    return {k: v for k, v in merged.items() if not (k in above and above[k] is None)}


def seeded(value: Any, seed: int) -> Any:
    """Replace `{seed}` in values by the seed, as a number if it is the whole value."""
    if value == {"seed": None}:  # what YAML reads without quotes around it
        return seed
    if isinstance(value, Mapping):
        return {key: seeded(one, seed) for key, one in value.items()}
    if isinstance(value, list):
        return [seeded(one, seed) for one in value]
    if not isinstance(value, str):
        return value
    return seed if value == SEED else value.replace(SEED, str(seed))


def parse_overrides(texts: Iterable[str]) -> dict[str, Any]:
    """Return `evaluate.limit=10` as `{"evaluate": {"limit": 10}}`; values are YAML."""
    result: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        steps = key.split(".")
        if not equals or not all(steps):
            raise ConfigError(
                f"override {text!r}: expected KEY.KEY=VALUE", hint="such as evaluate.limit=10"
            )
        parsed = read_yaml(f"value: {value}", f"override {text!r}").data["value"]
        for step in reversed(steps):
            parsed = {step: parsed}
        result = overlaid(result, parsed)
    return result


# Places of paths in a study, by what they name. They start from the folder of their file.
_MODELS: Final = ("base", "sources.*", *(f"repairs.*.{verb}.sources.*" for verb in BY_VERB))
_FILES: Final = (
    *("sources.*.tune.data", "data.*", "texts.*.*", "evaluate.data.*", "diagnose.data.*"),
    *("repairs.*.tune.data", *(f"repairs.*.{verb}.data.*" for verb in BY_VERB)),
    *("merges.*.statistics.*", "merges.*.coefficients", "evaluate.tasks"),
)
# Keys with paths in a recipe of text, and in a model that is written as a mapping.
_WITH_PATHS: Final = ("file", "prompts", "text", "against", "path", "model", "lora")


def _joined_paths(data: Any, folder: str) -> Any:
    """Return a study with its relative paths joined to the folder of its file."""

    def join(place: str, text: str) -> str:
        if place in _MODELS:
            if "+" in text and not os.path.exists(os.path.join(folder, text)):
                return "+".join(join(place, part) for part in text.split("+"))
            on_hub = HUB_ID.fullmatch(text.partition("@")[0]) and not text.startswith(".")
            local = os.path.exists(os.path.join(folder, text)) or not on_hub
        elif place == "evaluate.tasks":
            local = text.lower().endswith(TASK_SUFFIXES)
        else:
            local = is_local(text) or os.path.exists(os.path.join(folder, text))
        if not local or not folder or text.startswith("~"):
            return text
        return os.path.normpath(os.path.join(folder, text))

    def rewritten(value: Any, place: str, steps: list[str]) -> Any:
        if isinstance(value, Mapping):
            wanted = steps[:1] or _WITH_PATHS
            return {
                key: rewritten(one, place, steps[1:]) if key in wanted or "*" in wanted else one
                for key, one in value.items()
            }
        if isinstance(value, list):
            # In a list of sources, text is the name of a source.
            names = [bool(steps) and not isinstance(one, Mapping) for one in value]
            return [
                one if is_name else rewritten(one, place, steps)
                for one, is_name in zip(value, names, strict=True)
            ]
        return join(place, value) if isinstance(value, str) and not steps else value

    for place in (*_MODELS, *_FILES):
        data = rewritten(data, place, place.split("."))
    return data


# --- the commands ---------------------------------------------------------------------------------


class _Planner:
    """Lists the commands of a study at one seed, and refuses names that nothing defines."""

    def __init__(self, document: Document, config: StudyConfig, seed: int = 0) -> None:
        self.document, self.config, self.seed = document, config, seed
        self.schemas = method_schemas()
        asked = [n for n in dict.fromkeys(config.evaluate.tasks) if n != PERPLEXITY]
        self.tasks = tuple(find_task(name) for name in asked)
        names = [task.name for task in self.tasks]
        document.judge(config.evaluate.perplexity_faults(names))
        self.measured_texts = config.evaluate.texts(names)
        self.domains = tuple(dict.fromkeys(task.settings.domain for task in self.tasks))
        self.recipes = {
            text.file: (name, text)
            for own in (config.data or {}, *config.texts.values())
            for name, text in own.items()
            if isinstance(text, DataRecipe)
        }
        self.written: dict[str, Command] = {}  # by the file that a recipe writes
        self.models: dict[str, Command] = {}
        if config.base is not None:
            self.models[BASE] = self.base(config.base)
        for name, source in config.sources.items():
            self.models[name] = self.source(name, source)
        texts: list[Mapping[str, Any]] = [config.data or {}, *config.texts.values()]
        texts += [config.diagnose.data or {}] if config.diagnose is not None else []
        for name in [name for own in texts for name in own]:
            self.find(self.models, name, "source", "data")
        self.asked = [
            _settings(config.evaluate, EvaluationSettings),
            [self.task_identity(task) for task in self.tasks],
            None if config.diagnose is None else _settings(config.diagnose, DiagnosisSettings),
            {name: given_files(name, files).key for name, files in self.measured_texts.items()},
        ]
        self.merges = {name: self.merge(name) for name in config.merges}

    def study(self) -> Study:
        whole = {"table": TableEntry.model_validate({"title": self.config.title})}
        tables = (self.config.tables or whole).items()
        made = tuple(self.table(name, entry) for name, entry in tables)
        return Study(self.config, self.tasks, self.measured_texts, made)

    def task_identity(self, task: BenchmarkTask) -> list[Any]:
        files = self.config.evaluate.data.get(task.name) or ([task.data] if task.data else [])
        return [task.name, plain_settings(task.settings), given_files(task.name, files).key]

    def refuse(self, message: str, *place: str) -> NoReturn:
        self.document.judge([Fault(place, message)])
        raise AssertionError(message)  # a fault that is not ignorable ends in an error

    def find(self, known: Mapping[str, T], name: str, what: str, *place: str) -> T:
        if name not in known:
            self.refuse(f"no {what} is called {name!r}{suggested(name, known)}", *place)
        return known[name]

    # --- sources and texts ---

    def base(self, ref: ModelRef) -> Command:
        """The base as given, or with the chat template that its fine-tunes learn."""
        given = given_model(BASE, ref)
        if self.config.chat_template is None:
            return given
        config = {"merge_method": "passthrough", "models": [_with_name({"model": BASE})]}
        config["chat_template"] = self.config.chat_template
        return command("merge", BASE, config, [given])

    def source(self, name: str, source: ModelRef | TunedSource) -> Command:
        if isinstance(source, ModelRef):
            return given_model(name, source)
        if source.model is None and BASE not in self.models:
            words = "nothing to tune: give `base` at the top, or `model`"
            self.refuse(words, "sources", name)
        start = self.models[BASE] if source.model is None else given_model(BASE, source.model)
        assert source.tune.data is not None  # checked with the file
        rows = self.text(name, source.tune.data, start)
        return command("tune", name, _tuning(source.tune, None), [start, rows])

    def text(
        self, name: str, text: tuple[str, ...] | DataRecipe, by: Command | None = None
    ) -> Command:
        """The text of one source: files, or the recipe that makes them."""
        if not isinstance(text, DataRecipe) and len(text) == 1 and text[0] in self.recipes:
            name, text = self.recipes[text[0]]
        if not isinstance(text, DataRecipe):
            return given_files(name, text)
        by = self.find(self.models, name, "source", "data") if by is None else by
        made_of = [file for file in (*text.prompts, *text.text) if is_local(file)]
        # The identity names no local file: their content is in the keys of the inputs.
        recipe = plain_settings(text)
        remote = {key: [f for f in recipe[key] if f not in made_of] for key in ("prompts", "text")}
        own = command(
            "data",
            f"text {text.file}",
            {"file": text.file, "recipe": recipe},
            [by, *(given_files(name, (file,)) for file in made_of)],
            identity={**recipe, **remote, "file": os.path.basename(text.file)},
        )
        first = self.written.setdefault(text.file, own)
        if first.arguments != own.arguments or (first != own and not text.text):
            words = f"text of {name!r} is made in another way than other text of the same file"
            self.refuse(f"{words}, {text.file}")
        return first  # plain text does not depend on the model

    # --- merges ---

    def merge(self, name: str) -> Command:
        """A merge, checked like a config file; its models are names of sources."""
        raw = self.config.merges[name]
        for repair in REPAIRS:
            if repair.key in raw:
                words = "repairs of merges belong under `repairs`"
                self.refuse(words, "merges", name, repair.key)
        for model in _used(raw):
            self.find(self.models, model, "source", "merges", name)
        data = self.filled(raw)
        check_config(Document(f"{self.document.where}, merge {name!r}", data))
        used = _used(data)
        texts = self.config.data or {}
        given = [n for n in used if n in data.get("data", ()) and n in texts]
        inputs = [self.models[n] for n in used] + [self.text(n, texts[n]) for n in given]
        identity = {**data, "data": sorted(data.get("data", ()))}  # its files are inputs
        return command("merge", name, data, inputs, identity)

    def filled(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in what all merges of a study share: models, names, base and text."""
        data = dict(raw)
        if not any(key in data for key in ("models", "slices", "modules")):
            data["models"] = [{"model": name} for name in self.config.sources]
        if isinstance(data.get("models"), list):
            data["models"] = [_with_name(entry) for entry in data["models"]]
        schema = self.schemas.get(str(data.get("merge_method")))
        if schema is None:
            return data  # `check_config` refuses it
        if schema.base is BasePolicy.REQUIRED and self.config.base is not None:
            data.setdefault("base_model", BASE)
        if schema.statistics and self.config.data and not {"data", "statistics"} & data.keys():
            merged = [n for n in _used(data) if n in self.config.data and n != BASE]
            data["data"] = {n: list(files_of(self.config.data[n])) for n in merged}
        return data

    def sources_of(self, merge: str) -> list[str]:
        return [name for name in _used(self.merges[merge].arguments) if name != BASE]

    # --- repairs ---

    def repaired(self, merge: str, repair: str, then: tuple[str, ...] = ()) -> Command:
        """Repair a merge; `then` are the repairs that begin from this one."""
        place, name = ("repairs", repair), f"{merge}, {repair}"
        entry = self.find(self.config.repairs, repair, "repair", "repairs", *then[-1:])
        if repair in then:
            self.refuse("begins from itself", *place, "after")
        start = self.merges[merge]
        if entry.after is not None:
            start = self.repaired(merge, entry.after, (*then, repair))
        if entry.routers is not None:
            return command("swap-routers", name, {}, [start, self.donor(merge, entry.routers)])
        block = entry.block
        if block is not None and block.data is not None:
            data: Mapping[str, Any] = block.data
        else:
            data = self.config.data or {}
            if entry.text is not None:
                data = self.find(self.config.texts, entry.text, "kind of text", *place, "text")
        names = self.sources_of(merge)
        listed = block is not None and isinstance(block.sources, tuple)
        own_rows = entry.tune is not None and entry.tune.data is not None
        missing = [n for n in names if n not in data]
        if missing and not (listed or own_rows):
            words = f"no text of {', '.join(missing)}: give `data` at the top, or here"
            self.refuse(words, *place)
        if entry.tune is not None:  # on its own rows or on the text of all merged sources
            if entry.tune.data is not None:
                rows = [self.text(name, entry.tune.data, start)]
            else:
                rows = [self.text(n, data[n]) for n in names]
            return command("tune", name, _tuning(entry.tune, entry.share), [start, *rows])
        assert block is not None
        # A list of sources replaces the merged ones; a mapping adds to them, as does base text.
        if isinstance(block.sources, tuple):
            sources = selected_sources(block.sources, self.models, given_model)
        else:
            sources = {n: self.models[n] for n in names}
            if BASE in self.models and BASE in data:
                sources[BASE] = self.models[BASE]
            for added, ref in (block.sources or {}).items():
                sources[added] = given_model(added, ref)
        paired = {n: self.text(n, data[n]) for n in sources if n in data}
        arguments = {
            "settings": plain_settings(block.narrowed(BY_VERB[entry.kind].settings), given=True),
            "weights": block.weights or {},
            **({"experts": block.experts} if block.experts else {}),
            "sources": list(paired),
            "share": entry.share,
        }
        inputs = [start, *(sources[n] for n in paired), *paired.values()]
        return command(entry.kind, name, arguments, inputs)

    def donor(self, merge: str, which: str) -> Command:
        """Return whose routers a repair takes: a source's, or the average of the merged ones."""
        if which != AVERAGE:
            return self.find(self.models, which, "source", "repairs")
        names = self.sources_of(merge)
        models = [_with_name({"model": n, "parameters": {"weight": 1.0}}) for n in names]
        config: dict[str, Any] = {"merge_method": "linear", "models": models}
        merged = self.merges[merge].arguments
        kept = ("dtype", "out_dtype", "tokenizer_source", "tokenizer")
        config |= {key: merged[key] for key in kept if key in merged}
        name = f"average of {', '.join(names)}"
        return command("merge", name, config, [self.models[n] for n in names])

    # --- tables ---

    def table(self, name: str, entry: TableEntry) -> Table:
        repairs, place = self.config.repairs, ("tables", name)
        labels = list(entry.repairs if entry.repairs is not None else repairs)
        for label in [*labels, *(one for pair in entry.compare or () for one in pair)]:
            if label != AS_MERGED:
                self.find(repairs, label, "repair", *place)
        controls = [n for n in labels if repairs[n].routers == AVERAGE and repairs[n].after is None]
        references = entry.reference
        if references is None:
            references = (*([BASE] if BASE in self.models else []), SOURCES)
        rows = [Row(REFERENCE, one, {self.seed: self.reference(one)}) for one in references]
        for merge in entry.merges if entry.merges is not None else self.config.merges:
            merged = self.find(self.merges, merge, "merge", *place, "merges")
            rows.append(Row(merge, AS_MERGED, {self.seed: self.cell(merge, merged, merge)}))
            for label in labels:
                if repairs[label].routers == AVERAGE and _averages(merged.arguments):
                    continue  # its routers are averaged already
                made = self.repaired(merge, label)
                cell = self.cell(made.name, made, merge)
                rows.append(Row(merge, label, {self.seed: cell}, repairs[label].x))
        tasks: dict[str, dict[str, str]] = {domain: {} for domain in self.domains}
        for task in self.tasks:
            tasks[task.settings.domain][task.name] = task.settings.title
        others = [label for label in labels if label not in controls]
        pairs = tuple((control, label) for control in controls for label in others)
        return Table(
            name=name,
            entry=entry,
            rows=tuple(rows),
            tasks=tasks,
            compare=pairs if entry.compare is None else entry.compare,
            control=next(iter(controls), ""),
            singles=tuple(one for one in references if one != SOURCES),
        )

    def reference(self, which: str) -> Command:
        if which != SOURCES:
            return self.cell(which, self.find(self.models, which, "row", "tables"))
        own = {d: self.models[d] for d in self.domains if d in self.config.sources}
        if not own:
            words = f"no task's domain ({', '.join(self.domains)}) is the name of a source"
            self.refuse(words, "sources")
        return self.cell(SOURCES, own)

    def cell(
        self, name: str, models: Command | dict[str, Command], merge: str | None = None
    ) -> Command:
        """Measure one model on all domains, or a model for each; a merge's routing, too."""
        if isinstance(models, Command):
            models = dict.fromkeys(self.domains, models)
        solved: dict[Command, list[str]] = {}
        for domain, model in models.items():
            solved.setdefault(model, []).append(domain)
        block = self.config.diagnose
        sources: list[str] = []
        data: Mapping[str, Any] = {}
        if block is not None and merge is not None:
            data = block.data or self.config.data or {}
            sources = [one for one in self.sources_of(merge) if one in data]
        texts = [self.text(one, data[one]) for one in sources]
        return command(
            "measure",
            name,
            {"solves": list(solved.values()), "sources": sources},
            [*solved, *(self.models[one] for one in sources), *texts],
            identity=[self.asked, list(solved.values()), sources],
        )


def given_model(name: str, ref: ModelRef) -> Command:
    """Return an input model: a folder is known by its content, a hub model by its id."""
    identity = str(ref)
    if not hub_ids(identity):
        with Checkpoint.open(ref) as checkpoint:
            identity = checkpoint.fingerprint()
    return command("model", name, {"model": str(ref)}, identity=identity)


def given_files(name: str, files: Sequence[str]) -> Command:
    """Return input text: files are known by their content, files on the hub by their names."""
    identity = [file_digest(FilePath(file)) if is_local(file) else file for file in files]
    return command("files", f"text of {name}", {"files": list(files)}, identity=identity)


def _tuning(block: TuneBlock, share: float | None) -> dict[str, Any]:
    """Return the settings as given; a preset fills in the others."""
    values = plain_settings(block.narrowed(TuningSettings))
    given = {name: values[name] for name in sorted(block.model_fields_set) if name in values}
    return {"settings": given, "share": share}


def _settings(block: Strict, kind: type[Strict]) -> dict[str, Any]:
    values = plain_settings(block.narrowed(kind))
    return {name: value for name, value in values.items() if name not in (*IDLE, "draws")}


def _with_name(entry: Any) -> Any:
    """Name a merge's model as in the study."""
    if isinstance(entry, Mapping) and isinstance(entry.get("model"), str):
        return {"name": entry["model"], **entry}
    return entry


def _used(data: Mapping[str, Any]) -> list[str]:
    """Return the names of all models in a merge, as far as they can be read."""
    entries = list(data["models"]) if isinstance(data.get("models"), list) else []
    for one in data["slices"] if isinstance(data.get("slices"), list) else ():
        entries += one.get("sources", []) if isinstance(one, Mapping) else []
    entries.append({"model": data.get("base_model")})
    models = [entry.get("model") for entry in entries if isinstance(entry, Mapping)]
    return list(dict.fromkeys(model for model in models if isinstance(model, str)))


def _averages(config: Mapping[str, Any]) -> bool:
    """Return whether a merge is a plain average, whose routers are averages too."""
    if config.get("merge_method") != "linear" or "router" in config or "slices" in config:
        return False
    shared = config.get("parameters", {}).get("weight")
    weights = [entry.get("parameters", {}).get("weight", shared) for entry in config["models"]]
    return len({str(weight) for weight in weights}) == 1 and not isinstance(weights[0], list | dict)
