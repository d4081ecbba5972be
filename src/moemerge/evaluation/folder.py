"""The folder that an evaluation keeps: what was asked, what was answered, what came of it.

completions/MODEL-HASH.jsonl     completions of one model under one way of drawing, as they came
completions/MODEL-HASH.json      which problems they answer, and the prompts that the model saw
judgements/CHECK.jsonl           what a check said of a text, so that it need not say it again
answers/TASK/MODEL.jsonl         answers with their judgements, for people
results.json                     the report
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from moemerge.errors import DataError
from moemerge.report.words import display_names
from moemerge.runtime.files import make_folder, read_object, write_whole

_UNSAFE: Final = re.compile(r"[^\w.+-]+")
KIND: Final = "moemerge evaluation"


def file_name(text: str) -> str:
    """A name of anything as that of a file."""
    return _UNSAFE.sub("_", text).strip("._") or "_"


@dataclass(frozen=True)
class Asked:
    """One prompt as a model saw it; `key` finds its completions."""

    key: str
    prompt: str


class CompletionIndex:
    """Which problems the completions of one file answer: task -> problem -> prompt."""

    def __init__(
        self, path: Path, model: str, made_by: Mapping[str, Any], tasks: dict[str, dict[str, Asked]]
    ) -> None:
        self.path = path
        self.model = model
        self.made_by = dict(made_by)
        self.tasks = tasks

    @property
    def completions(self) -> Path:
        return self.path.with_suffix(".jsonl")

    @classmethod
    def of(cls, out: Path, model: str, made_by: Mapping[str, Any]) -> CompletionIndex:
        """The index of this model and way of drawing; what is in it already stays."""
        content = json.dumps(made_by, sort_keys=True).encode()
        digest = hashlib.blake2b(content, digest_size=6).hexdigest()
        folder = out / "completions"
        # The hash says which model it is, wherever it lies now.
        known = sorted(folder.glob(f"*-{digest}.json"))
        path = (
            known[0] if known else folder / f"{file_name(display_names([model])[0])}-{digest}.json"
        )
        tasks = cls.read(path).tasks if path.exists() else {}
        return cls(path, model, made_by, tasks)

    @classmethod
    def read(cls, path: Path) -> CompletionIndex:
        hint = "delete it: the same command without `rescore` writes it anew"
        try:
            content = read_object(path, hint, DataError)
            if content["kind"] != KIND:
                raise ValueError(f"it says kind {content['kind']!r}")
            tasks = {
                task: {name: Asked(**asked) for name, asked in problems.items()}
                for task, problems in content["tasks"].items()
            }
            return cls(path, content["model"], content["made_by"], tasks)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} is damaged ({type(error).__name__}: {error})",
                hint=hint,
            ) from error

    @classmethod
    def all_in(cls, out: Path) -> Iterator[CompletionIndex]:
        for path in sorted((out / "completions").glob("*.json")):
            yield cls.read(path)

    def write(self) -> None:
        content = {
            "kind": KIND,
            "model": self.model,
            "made_by": self.made_by,
            "tasks": {
                task: {name: vars(asked) for name, asked in problems.items()}
                for task, problems in self.tasks.items()
            },
        }
        make_folder(self.path.parents[1], self.path.parent.name)
        write_whole(self.path, json.dumps(content).encode())
