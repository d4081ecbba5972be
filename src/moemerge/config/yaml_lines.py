"""YAML files that users write, with the line of every key, and errors in them.

This is YAML 1.2, with one exception for mergekit's files: `yes`, `no`, `on` and `off` without
quotes are booleans.
"""

from __future__ import annotations

import datetime
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq, TaggedScalar
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.representer import RoundTripRepresenter

from moemerge.config.faults import Fault, Path, faults_of, path_text
from moemerge.config.models import CONFIG_NAME, located, named
from moemerge.errors import ConfigError
from moemerge.runtime.files import open_file_or_pipe, read_utf8

M = TypeVar("M", bound=BaseModel)

MOST_BYTES: Final = 2**24  # no config is larger; /dev/zero is
MOST_VALUES: Final = 200_000  # aliases of aliases can describe more data than memory holds
BOOLEANS: Final = {"yes": True, "on": True, "no": False, "off": False}


@dataclass
class Document:
    """The content of a YAML text, and the line of each key or list entry.

    With `lenient`, keys that mergekit ignores are warned of; None if the caller does not have this
    setting. `where` names the text in messages.
    """

    where: str = "config"
    data: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    lenient: bool | None = None

    def line(self, path: Path) -> int | None:
        """Return the line of `path`, or of its nearest existing parent."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return None

    def place(self, path: Path) -> str | None:
        """Return the same as text for messages."""
        line = self.line(path)
        return None if line is None else f"line {line}"

    def judge(self, faults: Iterable[Fault]) -> tuple[str, ...]:
        """Raise one error for all faults; return those that `lenient` allows as warnings."""
        ordered = sorted(dict.fromkeys(faults), key=lambda f: self.line(f.path) or 0)
        wrong = [fault for fault in ordered if not (self.lenient and fault.ignorable)]
        if wrong:
            hint = None
            count = sum(fault.ignorable for fault in wrong)
            if self.lenient is False and count:
                these = "this" if count == 1 else "these"
                which = these if count == len(wrong) else f"{count} of these"
                hint = f"mergekit ignores {which}: --lenient warns instead"
            raise ConfigError.from_problems(self.where, [self._text(f) for f in wrong], hint=hint)
        return tuple(f"{self._text(fault)} (ignored)" for fault in ordered)

    def _text(self, fault: Fault) -> str:
        parts = (self.place(fault.path), path_text(fault.path), fault.message)
        return ": ".join(part for part in parts if part)

    def parse(self, model: type[M], check: Callable[[M], Iterable[Fault]] = lambda _: ()) -> M:
        """Return the content as a `model`; raise one error for all faults.

        `check` looks for more faults if the structure is right.
        """
        return self.parse_with_warnings(model, check)[0]

    def parse_with_warnings(
        self,
        model: type[M],
        check: Callable[[M], Iterable[Fault]],
        explain: Callable[[Fault], Fault] = lambda fault: fault,
    ) -> tuple[M, tuple[str, ...]]:
        """Return the same without the keys that `lenient` ignores, and a warning about each.

        `explain` may improve the message of a structural fault.
        """
        data = self.data
        warnings: tuple[str, ...] = ()
        while True:
            try:
                content = model.model_validate(data)
                faults = list(check(content))
            except ValidationError as error:
                faults = [explain(fault) for fault in faults_of(error)]
            warnings += self.judge(faults)
            if not faults:
                return content, warnings
            for fault in reversed(faults):  # later entries of a list first
                data = _without(data, fault.path)


def _without(data: Any, path: Path) -> Any:
    """Return a copy without the key or list entry at `path`, if it is there."""
    if not isinstance(data, Mapping | list | tuple):
        return data
    mapping = isinstance(data, Mapping)
    kept = dict(data) if isinstance(data, Mapping) else dict(enumerate(data))
    if path[0] in kept:
        if path[1:]:
            kept[path[0]] = _without(kept[path[0]], path[1:])
        else:
            del kept[path[0]]
    return kept if mapping else list(kept.values())


# The key that every file of a kind has and no other kind has, and what the file is.
MERGE, COMPOSITION, STUDY, TASK = "merge_method", "experts", "merges", "verify"
_KINDS: Final[Mapping[str, str]] = {
    MERGE: "a config for `moemerge merge`, `run` and `validate`",
    COMPOSITION: "a config for `moemerge compose`",
    STUDY: "a study for `moemerge study`",
    TASK: "a task for `moemerge evaluate`",
}


def require_kind(document: Document, kind: str) -> None:
    """Refuse a file of another kind, of which every key would be a fault."""
    found = next((key for key in _KINDS if key in document.data), kind)
    if kind in document.data or found == kind:
        return
    place = ", ".join(part for part in (document.place((found,)), f"`{found}:`") if part)
    raise ConfigError(
        f"{document.where}: this is {_KINDS[found]} ({place})",
        hint=f"expected {_KINDS[kind]}, which has `{kind}:`",
    )


# --- reading --------------------------------------------------------------------------------------


def read_document(source: str | FilePath | Mapping[str, Any]) -> Document:
    """Return the content of a config. Refuse several documents."""
    return _single(read_documents(source))


def read_documents(source: str | FilePath | Mapping[str, Any]) -> list[Document]:
    """Return all documents of a config: a file, its text (with a line break), or its content."""
    if isinstance(source, Mapping):
        return [Document(data=source)]
    if isinstance(source, str) and "\n" in source:
        return read_all(source, Document.where)
    where = str(source)
    try:
        with open(open_file_or_pipe(FilePath(source)), "rb") as file:
            text = file.read(MOST_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read config {where!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: not UTF-8 text (byte {error.start})", hint="a config is a YAML file"
        ) from None
    return read_all(text, where)


def read_yaml(text: str, where: str) -> Document:
    """Read one YAML document that is a mapping; syntax errors name line and column."""
    return _single(read_all(text, where))


def read_all(text: str, where: str) -> list[Document]:
    """Read every document of a YAML text; lines are those of the text.

    Relative paths in our own file in a model folder are located from the working directory.
    """
    reader = YAML(pure=True)
    reader.preserve_quotes = True  # tells `yes` from "yes"
    try:
        contents = [content for content in reader.load_all(text) if content is not None]
        documents = [_document(content, where) for content in contents]
    except YAMLError as error:
        raise _syntax_error(error, where) from None
    except RecursionError:
        raise ConfigError(f"{where}: the YAML is nested too deeply") from None
    except (ValueError, IndexError) as error:  # a number that Python cannot hold, or `0x_`
        raise ConfigError(f"{where}: not valid YAML: {error}") from None
    if not documents:
        raise ConfigError(f"{where}: the file is empty", hint="a config is a YAML file")
    file = FilePath(where)
    if file.name == CONFIG_NAME:
        for document in documents:
            document.data = located(document.data, file.parent)
    return documents


def config_for(path: FilePath, folder: FilePath) -> str:
    """Return the text of a model's own config for a file in another folder."""
    documents = read_all(read_utf8(path), str(path))
    return "---\n".join(dump_document(named(document.data, folder)) for document in documents)


def _single(documents: Sequence[Document]) -> Document:
    if len(documents) > 1:
        raise ConfigError(
            f"{documents[0].where}: holds {len(documents)} documents separated by '---', expected "
            "one",
            hint="`merge`, `run` and `validate` accept several; put each into its own file here",
        )
    return documents[0]


def _syntax_error(error: YAMLError, where: str) -> ConfigError:
    if not isinstance(error, MarkedYAMLError):  # the reader: characters YAML does not allow
        return ConfigError(f"{where}: not valid YAML: {str(error).splitlines()[0]}")
    mark = error.problem_mark or error.context_mark
    place = f"{where}, line {mark.line + 1}, column {mark.column + 1}" if mark else where
    message = ", ".join(part for part in (error.context, error.problem) if part)
    hint = "indent with spaces, YAML allows no tabs" if "\\t" in message else None
    return ConfigError(f"{place}: not valid YAML: {message}", hint=hint)


def _document(content: Any, where: str) -> Document:
    """Return what ruamel.yaml has read as plain data, with the lines."""
    if not isinstance(content, CommentedMap):
        kind = "a list" if isinstance(content, CommentedSeq) else "a single value"
        raise ConfigError(f"{where}: expected keys and values (`key: value`), got {kind}")
    lines: dict[Path, int] = {(): content.lc.line + 1}
    values = 0

    def refuse(path: Path, problem: str) -> ConfigError:
        return ConfigError(f"{where}, line {lines[path]}: {path_text(path)}: {problem}")

    def plain(value: Any, path: Path) -> Any:
        nonlocal values
        values += 1
        if values > MOST_VALUES:
            raise refuse(path, f"more than {MOST_VALUES:,} values, counting what aliases repeat")
        if isinstance(value, CommentedMap | CommentedSeq):
            if value.tag.value is not None:
                raise refuse(path, f"the tag {value.tag.value!r} is not allowed in a config")
            mapping = isinstance(value, CommentedMap)
            result = {}
            for key, item in value.items() if isinstance(value, CommentedMap) else enumerate(value):
                if mapping and not isinstance(key, str):
                    raise refuse(path, f"the key {key!r} is not text: put it in quotes")
                name = str(key) if mapping else key
                known = value.lc.data.get(key)  # None: a key of `<<: *other`
                lines[(*path, name)] = lines[path] if known is None else known[0] + 1
                result[name] = plain(item, (*path, name))
            return result if mapping else list(result.values())
        if isinstance(value, TaggedScalar):
            raise refuse(path, f"the tag {value.tag.value!r} is not allowed in a config")
        if isinstance(value, datetime.date):
            return value.isoformat()
        if type(value) is str and value.lower() in BOOLEANS:
            return BOOLEANS[value.lower()]
        for kind in (str, bool, int, float):
            if isinstance(value, kind):
                return kind(value)
        return value

    return Document(where, plain(content, ()), lines)


# --- writing --------------------------------------------------------------------------------------


class _Representer(RoundTripRepresenter):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> Any:
        """Quote the words that `read_yaml` takes for booleans."""
        style = "'" if text.lower() in BOOLEANS else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Representer.add_representer(str, _Representer.represent_text)


def dump_document(data: Mapping[str, Any]) -> str:
    """Return plain data as YAML text, which `read_yaml` reads back unchanged."""
    writer = YAML(pure=True)
    writer.Representer = _Representer
    writer.default_flow_style = False
    writer.width = 1000
    stream = io.StringIO()
    writer.dump(dict(data), stream)
    return stream.getvalue()
