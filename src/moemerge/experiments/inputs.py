"""What a study is given, as nodes that are known by their content."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.locate import hub_ids, is_local
from moemerge.config.data import DataRecipe
from moemerge.config.dump import plain_settings
from moemerge.config.models import ModelRef
from moemerge.config.study import StudyConfig
from moemerge.errors import MoeMergeError
from moemerge.evaluation.catalogue import BenchmarkTask
from moemerge.experiments.tree import StudyNode
from moemerge.runtime.files import file_digest


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
