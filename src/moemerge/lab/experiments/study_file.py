"""Read a study file and check all of it that can be checked without knowing any method.

A file may extend another: mappings are merged key by key, any other value replaces the other's.
Errors name the file and line. Relative paths start from the folder of the file that contains them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path as FilePath
from typing import Any, Final

from moemerge.checkpoint.locate import HUB_ID, is_local
from moemerge.config.faults import Fault, Path, suggested
from moemerge.config.yaml_lines import STUDY, Document, read_document, read_yaml, require_kind
from moemerge.errors import ConfigError
from moemerge.lab.evaluation.job import TASK_SUFFIXES
from moemerge.lab.experiments.settings import (
    AS_MERGED,
    AVERAGE,
    BASE,
    BY_VERB,
    StudyConfig,
    TunedSource,
)

EXTENDS: Final = "extends"
MOST_LAYERS: Final = 20  # files that extend each other; more would be a circle
OVERRIDES: Final = "overrides"
SEED: Final = "{seed}"
SOURCES: Final = "sources"  # as a row of reference: each source on its own domain


@dataclass
class LayeredDocument(Document):
    """A document of several files, the leading one on top."""

    layers: list[Document] = field(default_factory=list)

    def place(self, path: Path) -> str | None:
        """The nearest thing around `path`, in the topmost file that has it."""
        for end in range(len(path), -1, -1):
            for number, document in enumerate(self.layers):
                if path[:end] in document.lines:
                    words = f"line {document.lines[path[:end]]}"
                    return words if number == 0 else f"{document.where}, {words}"
        return None


@dataclass
class PartDocument(Document):
    """One part of a document, completed with defaults; its errors name lines of the whole."""

    whole: Document = field(default_factory=Document)
    prefix: Path = ()

    def line(self, path: Path) -> int | None:
        return self.whole.line((*self.prefix, *path))

    def place(self, path: Path) -> str | None:
        return self.whole.place((*self.prefix, *path))


@dataclass(frozen=True)
class LoadedStudy:
    """A checked study. Its merges are checked later, by code that knows the methods."""

    config: StudyConfig
    document: Document  # with `{seed}` not yet replaced

    def at(self, seed: int) -> LoadedStudy:
        """Return the study with `{seed}` replaced by this seed."""
        return _checked(self.document, seed)

    def merge_document(self, name: str, data: Mapping[str, Any]) -> Document:
        """Return a merge, completed with the study's defaults, as a separate config."""
        where = f"{self.document.where}, merge {name!r}"
        return PartDocument(where, data, whole=self.document, prefix=("merges", name))


def load_study(
    source: str | FilePath | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> LoadedStudy:
    """Read a study (a YAML file, or its content) and apply `overrides`."""
    layers = _layers(source, MOST_LAYERS)
    where = layers[0].where
    if overrides:
        layers.insert(0, Document(OVERRIDES, dict(overrides)))
    document = _laid_over(where, layers)
    require_kind(document, STUDY)
    seeds = document.data.get("seeds")
    first = seeds[0] if isinstance(seeds, list) and seeds else None
    return _checked(document, first)


def _checked(document: Document, seed: Any) -> LoadedStudy:
    data = document.data if seed is None else seeded(document.data, seed)
    config = replace(document, data=data).parse(StudyConfig, _reference_faults)
    return LoadedStudy(config, document)


def parse_overrides(texts: Iterable[str]) -> dict[str, Any]:
    """`evaluate.limit=10` as `{"evaluate": {"limit": 10}}`; values are YAML."""
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


def overlaid(below: Any, above: Any) -> Any:
    """Merge mappings key by key; otherwise `above` replaces `below`, and null removes a key."""
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    # In the order of the file below, which is that of its tables.
    merged = {k: overlaid(v, above[k]) if k in above else v for k, v in below.items()}
    added = {k: v for k, v in above.items() if k not in below}
    removed = {key for key, value in above.items() if value is None}
    return {k: v for k, v in {**merged, **added}.items() if k not in removed}


def seeded(value: Any, seed: int) -> Any:
    """Replace `{seed}` in values by the seed, as a number if it is the whole value."""
    if value == {"seed": None}:  # what YAML reads where there are no quotes around it
        return seed
    if isinstance(value, Mapping):
        return {key: seeded(one, seed) for key, one in value.items()}
    if isinstance(value, list):
        return [seeded(one, seed) for one in value]
    if not isinstance(value, str):
        return value
    return seed if value == SEED else value.replace(SEED, str(seed))


def _layers(source: str | FilePath | Mapping[str, Any], most: int) -> list[Document]:
    """A file and those that it extends, the topmost first: of several the last counts most."""
    document = read_document(source)
    layers = [from_its_folder(document)]
    given = document.data.get(EXTENDS, [])
    names = [given] if isinstance(given, str) else given
    known = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not known or (names and most == 0):
        raise ConfigError(
            f"{document.where}: `{EXTENDS}` is {given!r}",
            hint="expected names of study files, from this file's folder, that end somewhere",
        )
    for name in reversed(names):
        layers += _layers(FilePath(document.where).parent / name, most - 1)
    return layers


def _laid_over(where: str, layers: list[Document]) -> LayeredDocument:
    *above, lowest = layers
    data = lowest.data
    for document in reversed(above):
        data = overlaid(data, document.data)
    data = {key: value for key, value in data.items() if key != EXTENDS}
    return LayeredDocument(where, data, lowest.lines, layers=layers)


# --- paths ----------------------------------------------------------------------------------------


def from_its_folder(document: Document) -> Document:
    """Return the document with its relative paths joined to the folder of its file."""
    folder = os.path.dirname(document.where)
    data: Any = document.data
    for join, places in _PLACES.items():
        for place in places:
            data = _rewritten(data, place.split("."), partial(join, folder))
    return replace(document, data=data)


def _file(folder: str, text: str) -> str:
    local = is_local(text) or os.path.exists(os.path.join(folder, text))
    return _joined(folder, text) if local else text  # a data set of the hub


def _model(folder: str, text: str) -> str:
    if "+" in text and not os.path.exists(os.path.join(folder, text)):
        return "+".join(_model(folder, part) for part in text.split("+"))
    here = os.path.exists(os.path.join(folder, text))
    on_hub = HUB_ID.fullmatch(text.partition("@")[0]) and not text.startswith(".")
    return _joined(folder, text) if here or not on_hub else text


def _task(folder: str, text: str) -> str:
    return _joined(folder, text) if text.lower().endswith(TASK_SUFFIXES) else text


def _joined(folder: str, text: str) -> str:
    if not folder or text.startswith("~"):
        return text
    return os.path.normpath(os.path.join(folder, text))


_PLACES: Final[Mapping[Callable[[str, str], str], tuple[str, ...]]] = {
    _model: ("base", "sources.*", *(f"repairs.*.{verb}.sources.*" for verb in BY_VERB)),
    _file: (
        *("sources.*.tune.data", "data.*", "texts.*.*", "evaluate.data.*", "diagnose.data.*"),
        *("repairs.*.tune.data", *(f"repairs.*.{verb}.data.*" for verb in BY_VERB)),
        *("merges.*.statistics.*", "merges.*.coefficients"),
    ),
    _task: ("evaluate.tasks",),
}
# Keys with paths in a recipe of text, and in a model that is written as a mapping.
_WITH_PATHS: Final = ("file", "prompts", "text", "against", "path", "model", "lora")


def _rewritten(value: Any, steps: list[str], join: Callable[[str], str]) -> Any:
    """Apply `join` to the paths at a place such as `sources.*`."""
    if isinstance(value, Mapping):
        wanted = steps[:1] or _WITH_PATHS
        return {
            key: _rewritten(one, steps[1:], join) if key in wanted or "*" in wanted else one
            for key, one in value.items()
        }
    if isinstance(value, list):
        # In a list of sources, text is the name of a source.
        return [
            _rewritten(one, steps, join) if not steps or isinstance(one, Mapping) else one
            for one in value
        ]
    return join(value) if isinstance(value, str) and not steps else value


# --- names that other keys speak of ---------------------------------------------------------------


def _reference_faults(config: StudyConfig) -> Iterator[Fault]:
    models = [*config.sources, *([BASE] if config.base is not None else [])]
    for name, source in config.sources.items():
        if isinstance(source, TunedSource) and source.model is None and config.base is None:
            yield Fault(("sources", name), "nothing to tune: give `base` at the top, or `model`")
    texts: dict[Path, Mapping[str, Any]] = {("data",): config.data or {}}
    texts |= {("texts", kind): own for kind, own in config.texts.items()}
    for place, own in texts.items():
        for name in own:
            yield from unknown(name, models, (*place, name), "source")
    for name in (config.diagnose.data if config.diagnose is not None else None) or {}:
        yield from unknown(name, config.sources, ("diagnose", "data", name), "source")
    for name in config.repairs:
        yield from _repair_faults(config, name, models)
    yield from _table_faults(config)


def _repair_faults(config: StudyConfig, name: str, models: list[str]) -> Iterator[Fault]:
    repair, place = config.repairs[name], ("repairs", name)
    for key, known, what in (
        ("after", list(config.repairs), "repair"),
        ("text", list(config.texts), "kind of text"),
        ("routers", [AVERAGE, *models], "source"),
    ):
        given = getattr(repair, key)
        if given is not None:
            yield from unknown(given, known, (*place, key), what)
    block = repair.block
    if block is not None and isinstance(block.sources, tuple):
        for number, one in enumerate(block.sources):
            where = (*place, repair.kind, "sources", number)
            if isinstance(one, str):
                yield from unknown(one, models, where, "source")
    yield from _lacks_text(config, name)
    yield from _circle(config, name)


def _lacks_text(config: StudyConfig, name: str) -> Iterator[Fault]:
    repair = config.repairs[name]
    block = repair.block or repair.tune
    if block is None or block.data is not None:
        return
    if isinstance(getattr(block, "sources", None), tuple):  # a list replaces the merged models
        return
    data = (config.texts.get(repair.text, {}) if repair.text else config.data) or {}
    missing = [source for source in config.sources if source not in data]
    if missing:
        text = f"no text of {', '.join(missing)}: give `data` at the top, or here"
        yield Fault(("repairs", name), text)


def _circle(config: StudyConfig, name: str) -> Iterator[Fault]:
    seen, at = {name}, config.repairs[name].after
    while at is not None and at in config.repairs:
        if at == name:
            yield Fault(("repairs", name, "after"), "begins from itself")
        if at in seen:
            return
        seen.add(at)
        at = config.repairs[at].after


def _table_faults(config: StudyConfig) -> Iterator[Fault]:
    rows = [*config.sources, SOURCES, *([BASE] if config.base is not None else [])]
    for name, table in config.tables.items():
        place = ("tables", name)
        for key, known, what in (
            ("merges", config.merges, "merge"),
            ("repairs", config.repairs, "repair"),
            ("reference", rows, "row"),
        ):
            for number, one in enumerate(getattr(table, key) or ()):
                yield from unknown(one, known, (*place, key, number), what)
        for number, pair in enumerate(table.compare or ()):
            for side, one in enumerate(pair):
                known = [*config.repairs, AS_MERGED]
                yield from unknown(one, known, (*place, "compare", number, side), "repair")


def unknown(name: str, known: Collection[str], place: Path, what: str) -> Iterator[Fault]:
    if name not in known:
        yield Fault(place, f"no {what} is called {name!r}{suggested(name, known)}")
