"""Tasks: those that come with the package, and files of the user's own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moemerge.errors import UsageError
from moemerge.evaluation.settings import TaskSettings, load_task
from moemerge.registry import did_you_mean

SUFFIXES: Final = (".yml", ".yaml")
_FOLDER: Final = Path(__file__).parent / "tasks"


@dataclass(frozen=True)
class BenchmarkTask:
    """A task under the name that it was asked for by."""

    name: str
    settings: TaskSettings
    file: Path

    @property
    def data(self) -> str | None:
        """Where its problems are; a file is looked for beside the task's own."""
        source = self.settings.data
        if source is None:
            return None
        beside = self.file.parent / os.path.expanduser(source)
        return str(beside) if beside.is_file() else source


def task_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.yml"))


def find_task(name: str) -> BenchmarkTask:
    """A task of the package by its name, or one of the user's by its file."""
    if name.lower().endswith(SUFFIXES):
        path = Path(os.path.expanduser(name))
        return BenchmarkTask(path.stem, load_task(path), path)
    path = _FOLDER / f"{name}.yml"
    if name not in task_names():
        raise UsageError(
            f"unknown task {name!r}{did_you_mean(name, task_names())}",
            hint=f"known: {', '.join(task_names())}; or a file of your own, TASK.yml",
        )
    return BenchmarkTask(name, load_task(path), path)
