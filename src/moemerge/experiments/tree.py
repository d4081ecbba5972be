"""The models and texts of a study, and what is measured of them. Nothing is made here.

A node says how a thing comes about: what it is made of, and with which settings. Nodes that say the
same are the same node, whatever they are called, so that what tables share is made once.
What a study is given is known by its content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.locate import hub_ids, is_local
from moemerge.config.data import DataRecipe
from moemerge.config.dump import plain_settings
from moemerge.config.models import ModelRef
from moemerge.config.study import StudyConfig
from moemerge.errors import MoeMergeError
from moemerge.evaluation.job import BenchmarkTask
from moemerge.runtime.files import file_digest

Kind = Literal["given", "files", "text", "merge", "routers", "calibrate", "refit", "tune"]
MODELS: tuple[Kind, ...] = ("given", "merge", "routers", "calibrate", "refit", "tune")


@dataclass(frozen=True)
class StudyNode:
    """A model or text. `spec` is JSON: what its maker is told."""

    kind: Kind
    spec: str
    parents: tuple[StudyNode, ...] = ()
    name: str = field(default="", compare=False)

    @classmethod
    def of(cls, kind: Kind, name: str, spec: Any, parents: tuple[StudyNode, ...] = ()) -> StudyNode:
        return cls(kind, json.dumps(spec, sort_keys=True, ensure_ascii=False), parents, name)

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
        return self.kind in MODELS

    @cached_property
    def digest(self) -> str:
        """Tells it from what is made of other things or in another way."""
        return digest_of([self.kind, self.values, [parent.digest for parent in self.parents]])

    @cached_property
    def depth(self) -> int:
        """Steps from what is given."""
        return 1 + max((parent.depth for parent in self.parents), default=-1)

    @property
    def slug(self) -> str:
        """A name for its folder."""
        words = "".join(c if c.isalnum() or c in "-=.," else "_" for c in self.name)[:80]
        return f"{words}-{self.digest[:10]}"


def digest_of(value: Any) -> str:
    """Of anything that JSON can hold."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class StudyCell:
    """Each domain's tasks, solved by the model that `runs` names for it."""

    name: str
    runs: tuple[tuple[str, StudyNode], ...]
    made_of: str  # digest of all that its numbers depend on
    beside: tuple[StudyNode, ...] = ()  # sources and text that the routing is compared on

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(domain for domain, _ in self.runs)

    @property
    def models(self) -> dict[StudyNode, tuple[str, ...]]:
        """Who solves which domains."""
        solved: dict[StudyNode, list[str]] = {}
        for domain, node in self.runs:
            solved.setdefault(node, []).append(domain)
        return {node: tuple(domains) for node, domains in solved.items()}

    @property
    def nodes(self) -> tuple[StudyNode, ...]:
        """All that must exist."""
        return tuple(dict.fromkeys([*self.models, *self.beside]))


@dataclass(frozen=True)
class StudySet:
    """One of the seeds over which a study is repeated, or the whole of one that is not."""

    name: str = "study"
    seed: int = 0

    def to_json(self) -> Mapping[str, Any]:
        return {"study": 0}


def at_seed(name: str, seed: int) -> str:
    """What a cell is called in one of several seeds."""
    return f"{name}, seed {seed}"


# --- what a study is given ------------------------------------------------------------------------


def given_model(name: str, ref: ModelRef) -> StudyNode:
    """A model that is there: known by its content where it is a folder, by its id on the hub."""
    spec = {"model": str(ref), "content": None}
    if not hub_ids(str(ref)):
        try:
            with Checkpoint.open(ref) as checkpoint:
                spec["content"] = checkpoint.fingerprint()
        except MoeMergeError:
            pass  # told with all that is missing
    return StudyNode.of("given", name, spec)


def text_files(name: str, files: Sequence[str]) -> StudyNode:
    """Files by their content; those of the hub by their names."""
    content = [file_digest(Path(file)) if is_local(file) else None for file in files]
    return StudyNode.of("files", f"text of {name}", {"files": list(files), "content": content})


def recipes(config: StudyConfig) -> Iterator[tuple[str, tuple[str, DataRecipe]]]:
    """Files that the study makes, which other keys may name as they are."""
    for data in (config.data or {}, *config.texts.values()):
        for name, text in data.items():
            if isinstance(text, DataRecipe):
                yield text.file, (name, text)


def task_words(task: BenchmarkTask, config: StudyConfig) -> list[Any]:
    data = config.evaluate.data.get(task.name) or ([task.data] if task.data else [])
    return [task.name, plain_settings(task.settings), text_files(task.name, data).values["content"]]
