"""The graph of a study: models, texts and measurements. Nothing is made here.

A node states its inputs and settings. Nodes with the same inputs and settings are the same node,
whatever their names, so that tables share them. Inputs of a study are identified by their content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.locate import hub_ids, is_local
from moemerge.config.dump import plain_settings
from moemerge.config.models import ModelRef
from moemerge.config.text_settings import DataRecipe
from moemerge.errors import MoeMergeError
from moemerge.lab.evaluation.job import BenchmarkTask
from moemerge.lab.experiments.settings import StudyConfig
from moemerge.runtime.files import file_digest

TEXTS = ("files", "text")


@dataclass(frozen=True)
class StudyNode:
    """A model or text. `spec` is JSON: the arguments of its maker."""

    kind: str  # given, files, text, merge, or a kind of `RepairEntry`
    spec: str
    parents: tuple[StudyNode, ...] = ()
    name: str = field(default="", compare=False)
    # Replaces the spec in its digest: inputs are known by their content, wherever they are.
    identity: str = field(default="", compare=False)

    @classmethod
    def of(
        cls,
        kind: str,
        name: str,
        spec: Any,
        parents: tuple[StudyNode, ...] = (),
        identity: Any = None,
    ) -> StudyNode:
        texts = (_json(spec), "" if identity is None else _json(identity))
        return cls(kind, texts[0], parents, name, texts[1])

    @property
    def values(self) -> dict[str, Any]:
        """The spec as data."""
        values: dict[str, Any] = json.loads(self.spec)
        return values

    @property
    def is_given(self) -> bool:
        return self.kind in ("given", "files")

    @property
    def is_model(self) -> bool:
        return self.kind not in TEXTS

    @cached_property
    def digest(self) -> str:
        """Identifies the node by its inputs and settings."""
        own = json.loads(self.identity) if self.identity else self.values
        return digest_of([self.kind, own, [parent.digest for parent in self.parents]])

    @cached_property
    def urgency(self) -> float:
        """The number of steps from the study's inputs: nodes that depend on recent ones run first,
        because a model that nothing needs any longer is deleted.
        """
        return 1 + max((parent.urgency for parent in self.parents), default=-1)

    @property
    def slug(self) -> str:
        """The name of its folder."""
        words = "".join(c if c.isalnum() or c in "-=.," else "_" for c in self.name)[:80]
        return f"{words}-{self.digest[:10]}"


def with_parents(nodes: Iterable[StudyNode]) -> list[StudyNode]:
    """Return nodes and all that they are made of, each once, parents first."""
    found: dict[StudyNode, None] = {}
    for node in nodes:
        found |= dict.fromkeys([*with_parents(node.parents), node])
    return list(found)


def digest_of(value: Any) -> str:
    """Return the digest of any JSON value."""
    return hashlib.sha256(_json(value).encode()).hexdigest()[:32]


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


@dataclass(frozen=True)
class StudyCell:
    """The tasks of each domain, solved by the model that `runs` names for it."""

    name: str
    runs: tuple[tuple[str, StudyNode], ...]
    made_of: str  # digest of everything its numbers depend on
    beside: tuple[StudyNode, ...] = ()  # sources and text for the comparison of routing

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(domain for domain, _ in self.runs)

    @property
    def models(self) -> dict[StudyNode, tuple[str, ...]]:
        """The models and the domains they solve."""
        solved: dict[StudyNode, list[str]] = {}
        for domain, node in self.runs:
            solved.setdefault(node, []).append(domain)
        return {node: tuple(domains) for node, domains in solved.items()}

    @property
    def nodes(self) -> tuple[StudyNode, ...]:
        """All nodes that must exist."""
        return tuple(dict.fromkeys([*self.models, *self.beside]))


@dataclass(frozen=True)
class StudySet:
    """One seed of a repeated study, or the whole of a study without seeds."""

    name: str = "study"
    seed: int = 0

    def to_json(self) -> Mapping[str, Any]:
        return {"study": 0}


def at_seed(name: str, seed: int) -> str:
    """Return the name of a cell at one of several seeds."""
    return f"{name}, seed {seed}"


# --- what a study is given ------------------------------------------------------------------------


def given_model(name: str, ref: ModelRef) -> StudyNode:
    """Return an input model: a folder is identified by its content, a hub model by its id."""
    spec = {"model": str(ref), "content": None}
    if not hub_ids(str(ref)):
        try:
            with Checkpoint.open(ref) as checkpoint:
                spec["content"] = checkpoint.fingerprint()
        except MoeMergeError:
            pass  # reported with all missing inputs
    return StudyNode.of("given", name, spec, identity=spec["content"])


def text_files(name: str, files: Sequence[str]) -> StudyNode:
    """Identify files by their content, and files on the hub by their names."""
    content = [file_digest(Path(file)) if is_local(file) else None for file in files]
    spec = {"files": list(files), "content": content}
    known = [digest or file for digest, file in zip(content, files, strict=True)]
    return StudyNode.of("files", f"text of {name}", spec, identity=known)


def recipes(config: StudyConfig) -> Iterator[tuple[str, tuple[str, DataRecipe]]]:
    """Return the files that the study makes. Other keys may refer to them by name."""
    for data in (config.data or {}, *config.texts.values()):
        for name, text in data.items():
            if isinstance(text, DataRecipe):
                yield text.file, (name, text)


def task_files(task: BenchmarkTask, config: StudyConfig) -> Sequence[str]:
    """Return the files of a task's problems."""
    return config.evaluate.data.get(task.name) or ([task.data] if task.data else [])


def task_words(task: BenchmarkTask, config: StudyConfig) -> list[Any]:
    content = text_files(task.name, task_files(task, config)).values["content"]
    return [task.name, plain_settings(task.settings), content]
