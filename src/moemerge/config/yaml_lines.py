"""Read YAML files that users write, with the line of every key, and report errors in them.

Strict where PyYAML is lax: duplicate keys are faults, only plain data is built, and numbers follow
YAML 1.2 where YAML 1.1 surprises: `1e-6` is a number, `1:30` and `2024-01-01` are text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, Final, TypeVar

import yaml
from pydantic import BaseModel

from moemerge.config.faults import Fault, Path, WorkingCopy, path_text, validate
from moemerge.errors import ConfigError
from moemerge.runtime.files import MOST_LEVELS, open_file_or_pipe

M = TypeVar("M", bound=BaseModel)

MAX_BITS: Final = 14_000  # of a whole number: Python prints at most 4,300 digits
MAX_NODES: Final = 200_000  # aliases of aliases can describe more data than memory holds

_FLOAT: Final = re.compile(
    r"^(?:[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_INT: Final = re.compile(r"^[-+]?(?:0b[0-1_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)$")
_TAG: Final = "tag:yaml.org,2002:"
_REPLACED: Final = frozenset({f"{_TAG}float", f"{_TAG}int", f"{_TAG}timestamp"})
_PLAIN_TAGS: Final = frozenset(
    f"{_TAG}{kind}" for kind in ("str", "int", "float", "bool", "null", "map", "seq", "merge")
)


def _resolvers() -> dict[Any, list[tuple[str, re.Pattern[str]]]]:
    """PyYAML's rules for plain scalars with ours for numbers; int goes before float."""
    rules: dict[Any, list[tuple[str, re.Pattern[str]]]] = {
        first: [(tag, pattern) for tag, pattern in entries if tag not in _REPLACED]
        for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for first in "-+0123456789.":
        own = [(f"{_TAG}int", _INT), (f"{_TAG}float", _FLOAT)]
        rules[first] = own + rules.get(first, [])
    return rules


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader with our idea of a number and a limit of nesting.

    PyYAML's time grows with the square of the levels.
    """

    yaml_implicit_resolvers = _resolvers()
    _levels = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._levels += 1
        if self._levels > MOST_LEVELS:
            raise RecursionError
        node = super().compose_node(parent, index)
        self._levels -= 1
        return node


def _whole_number(loader: Loader, node: yaml.ScalarNode) -> int:
    """Read `010` as ten (in YAML 1.1 it is eight)."""
    text = str(node.value).replace("_", "")
    digits = text.lstrip("+-").lower()
    base = {"0x": 16, "0b": 2}.get(digits[:2], 10)
    number = int(text, base)
    if number.bit_length() > MAX_BITS:
        raise ValueError(f"a number of {number.bit_length()} bits")
    return number


Loader.add_constructor(f"{_TAG}int", _whole_number)


class Dumper(yaml.SafeDumper):
    """Writes what `Loader` reads back unchanged: text that looks like a number is quoted."""

    yaml_implicit_resolvers = _resolvers()

    def ignore_aliases(self, data: Any) -> bool:
        return True


@dataclass
class Document:
    """The content of a YAML text, and the line of each key or list entry.

    With `lenient`, keys that mergekit ignores are warned of; None if the caller does not have this
    setting. `where` names the text in messages.
    """

    where: str = "config"
    data: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
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
        unique = dict.fromkeys(faults)  # a fault met twice is said once
        ordered = sorted(unique, key=lambda f: self.line(f.path) or 0)
        wrong = [f for f in ordered if not (self.lenient and f.ignorable)]
        if wrong:
            texts = [self._text(f) for f in wrong]
            raise ConfigError.from_problems(self.where, texts, hint=self._way_out(wrong))
        return tuple(f"{self._text(f)} (ignored)" for f in ordered)

    def _way_out(self, wrong: Sequence[Fault]) -> str | None:
        """Return a hint at `lenient`, if it is available and allows some of the faults."""
        count = sum(fault.ignorable for fault in wrong)
        if self.lenient is not False or not count:
            return None
        which = f"{count} of these" if count < len(wrong) else "this" if count == 1 else "these"
        return f"mergekit ignores {which}: `lenient=True` warns instead of refusing"

    def _text(self, fault: Fault) -> str:
        parts = (self.place(fault.path), path_text(fault.path), fault.message)
        return ": ".join(part for part in parts if part)

    def parse(self, model: type[M], check: Callable[[M], Iterable[Fault]] = lambda _: ()) -> M:
        """Return the content as a `model`; raise one error for all faults.

        `check` looks for more faults if every part is valid.
        """
        faults, work = list(self.faults), WorkingCopy(self.data)
        content = validate(model, work, faults.append)
        if content is not None and not work.removed:
            faults += check(content)
        self.judge(faults)
        assert content is not None  # otherwise a fault was noted
        return content


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


def read_yaml(text: str, where: str) -> Document:
    """Read one YAML document that is a mapping; syntax errors name line and column."""
    return _single(read_all(text, where))


def read_all(text: str, where: str) -> list[Document]:
    """Read every document of a YAML text; lines are those of the text."""
    try:
        nodes = _compose(text)
        if not nodes:
            raise ConfigError(f"{where}: the file is empty", hint="a config is a YAML file")
        return [_Builder(node, where).document() for node in nodes]
    except yaml.YAMLError as error:
        raise _syntax_error(error, where) from None
    except RecursionError:
        raise ConfigError(f"{where}: the YAML is nested too deeply") from None


def _single(documents: Sequence[Document]) -> Document:
    if len(documents) > 1:
        raise ConfigError(
            f"{documents[0].where}: holds {len(documents)} documents separated by '---', expected "
            "one",
            hint="`merge`, `run` and `validate` accept several; put each into its own file here",
        )
    return documents[0]


def _compose(text: str) -> list[yaml.Node]:
    loader = Loader(text)
    nodes = []
    try:
        while loader.check_node():
            node = loader.get_node()
            if node is not None and not _is_empty(node):
                nodes.append(node)
    finally:
        loader.dispose()
    return nodes


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == f"{_TAG}null"


def _syntax_error(error: yaml.YAMLError, where: str) -> ConfigError:
    if not isinstance(error, yaml.MarkedYAMLError):  # the reader: characters YAML does not allow
        return ConfigError(f"{where}: not valid YAML: {str(error).splitlines()[0]}")
    mark = error.problem_mark or error.context_mark
    place = f"{where}, line {mark.line + 1}, column {mark.column + 1}" if mark else where
    said = ", ".join(part for part in (error.context, error.problem) if part)
    hint = "indent with spaces, YAML allows no tabs" if "\\t" in said else None
    return ConfigError(f"{place}: not valid YAML: {said}", hint=hint)


def _refused(node: yaml.Node, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _check_text(node: yaml.ScalarNode) -> None:
    """Refuse text that no file name and no report can contain; join surrogates, as JSON does."""
    fault = "a NUL character (\\0)" if "\0" in node.value else None
    try:
        node.value = node.value.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        fault = "half a character (a lone surrogate)"
    if fault is not None:
        raise _refused(node, f"{fault} is not allowed in a config")


class _Builder:
    """Converts the node tree to plain data, and notes lines and duplicate keys."""

    def __init__(self, root: yaml.Node, where: str) -> None:
        self.root = root
        self.result = Document(where)
        self.scalars = Loader("")
        self.open: set[int] = set()
        self.count = 0

    def document(self) -> Document:
        if not isinstance(self.root, yaml.MappingNode):
            kind = "a list" if isinstance(self.root, yaml.SequenceNode) else "a single value"
            raise ConfigError(
                f"{self.result.where}: expected keys and values (`key: value`), got {kind}"
            )
        self.result.lines[()] = self.root.start_mark.line + 1
        self.result.data = self.build(self.root, ())
        return self.result

    def build(self, node: yaml.Node, path: Path) -> Any:
        self.count += 1
        if id(node) in self.open or self.count > MAX_NODES:
            raise _refused(node, "an alias that contains itself or grows without end")
        if node.tag not in _PLAIN_TAGS:
            raise _refused(node, f"the tag {node.tag!r} is not allowed in a config")
        if isinstance(node, yaml.ScalarNode):
            _check_text(node)
            try:
                return self.scalars.construct_object(node)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                kind = node.tag.removeprefix(_TAG)
                raise _refused(node, f"{node.value[:40]!r} is no {kind}") from error
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.item(child, (*path, i)) for i, child in enumerate(node.value)]
            assert isinstance(node, yaml.MappingNode)
            return self.mapping(node, path)
        finally:
            self.open.remove(id(node))

    def item(self, node: yaml.Node, path: Path) -> Any:
        self.result.lines[path] = node.start_mark.line + 1
        return self.build(node, path)

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        self.duplicates(node, path)
        self.scalars.flatten_mapping(node)  # `<<: *defaults`: own keys come last and win
        result = {}
        for key_node, value_node in node.value:
            key = self.key(key_node, path)
            self.result.lines[(*path, key)] = key_node.start_mark.line + 1
            result[key] = self.build(value_node, (*path, key))
        return result

    def duplicates(self, node: yaml.MappingNode, path: Path) -> None:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in seen:
                self.note((*path, key), f"given twice, on lines {seen[key]} and {line}")
            seen.setdefault(key, line)

    def key(self, node: yaml.Node, path: Path) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise _refused(node, "a key must be a single word")
        _check_text(node)
        if node.tag != f"{_TAG}str":
            self.note((*path, node.value), f"this key is read as {node.tag.removeprefix(_TAG)}, "
                      f"not as text: put it in quotes")  # fmt: skip
        return str(node.value)

    def note(self, path: Path, message: str) -> None:
        fault = Fault(path, message)
        if fault not in self.result.faults:  # an alias is walked once per use
            self.result.faults.append(fault)


# --- files ----------------------------------------------------------------------------------------

_MOST_BYTES: Final = 2**24  # no config has so many; /dev/zero has


def read_document(source: str | FilePath | Mapping[str, Any]) -> Document:
    """Return the content of a config. Refuse several documents."""
    return _single(read_documents(source))


def read_documents(source: str | FilePath | Mapping[str, Any]) -> list[Document]:
    """Return all documents of a config."""
    if isinstance(source, Mapping):
        return [Document(data=source)]
    if isinstance(source, str) and "\n" in source:
        return read_all(source, Document.where)
    where = str(source)
    try:
        with open(open_file_or_pipe(FilePath(source)), "rb") as file:
            text = file.read(_MOST_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read config {where!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: not UTF-8 text (byte {error.start})", hint="a config is a YAML file"
        ) from None
    return read_all(text, where)
