"""Estimate what a study needs before it runs: disk space, tokens, and missing inputs.

It uses no network. The size of a model that was never downloaded is taken from the study file
(`size`). Token counts are upper bounds, or estimates from file sizes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.locate import hub_ids, is_here, is_local
from moemerge.checkpoint.tensors import format_size, parse_size
from moemerge.data.settings import DataRecipe
from moemerge.errors import CheckpointError, MoeMergeError, ResourceError
from moemerge.evaluation.job import BenchmarkTask, generation_settings
from moemerge.experiments.plan import INPUTS, StudyPlan
from moemerge.experiments.settings import BY_VERB
from moemerge.experiments.tree import StudyCell, StudyNode, task_files, with_parents
from moemerge.runtime.devices import free_disk
from moemerge.runtime.progress import counted

BYTES_PER_TOKEN = 4  # bytes per token of English text, roughly
KINDS = {
    "given": "a model that is given",
    "tune": "tuned",
    "text": "text",
    "merge": "merged",
    "routers": "routers exchanged",
    **{verb: repair.card_done.lower() for verb, repair in BY_VERB.items()},
}


@dataclass(frozen=True)
class NodeCost:
    """The cost of making a model or text."""

    name: str
    kind: str
    made_of: tuple[str, ...]
    bytes: int | None  # on disk; None if unknown
    tokens: int | None  # read or written to make it: a bound or an estimate
    there: bool  # exists already


@dataclass(frozen=True)
class CellCost:
    """The cost of a measurement."""

    name: str
    models: tuple[str, ...]
    completions: int | None
    tokens: int | None  # at most generated
    measured: bool


@dataclass(frozen=True)
class MissingInput:
    """An input that is not on this machine."""

    what: str
    where: str  # "to fetch" from the hub, or "missing"
    needed_for: str


@dataclass(frozen=True)
class StudyEstimate:
    """The cost of a study from its current state."""

    title: str
    nodes: tuple[NodeCost, ...]
    cells: tuple[CellCost, ...]
    missing: tuple[MissingInput, ...]
    peak_bytes: int | None  # models on disk at the same time
    free_bytes: int
    notices: tuple[str, ...] = field(default=())

    @property
    def tokens(self) -> int | None:
        """The number of tokens in all missing completions."""
        left = [cell.tokens for cell in self.cells if not cell.measured]
        return None if None in left else sum(t for t in left if t is not None)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens": self.tokens}

    def __str__(self) -> str:
        left = [cell for cell in self.cells if not cell.measured]
        models = [node for node in self.nodes if not node.there]
        tokens = "an unknown number of" if self.tokens is None else f"{self.tokens:,}"
        return (
            f"{len(left)} of {counted(len(self.cells), 'cell')} to measure, "
            f"{counted(len(models), 'model or text', 'models and texts')} to make; at most "
            f"{tokens} tokens to generate; models take about "
            f"{shown_bytes(self.peak_bytes)} of disk at a time, {shown_bytes(self.free_bytes)} are "
            "free"
        )

    def refuse(self) -> None:
        """Raise if work cannot start: missing files, or too little disk space."""
        gone = [one for one in self.missing if one.where == "missing"]
        if gone:
            named = ", ".join(f"{one.what} ({one.needed_for})" for one in gone)
            raise CheckpointError(
                f"not there: {named}",
                hint="give paths that exist, or hub ids; paths in a study file start from its "
                "folder, others from the current one",
            )
        if self.peak_bytes is not None and self.peak_bytes > self.free_bytes:
            raise ResourceError(
                f"the study needs {format_size(self.peak_bytes)} for its models, and the disk has "
                f"{format_size(self.free_bytes)} free",
                hint="`keep=results` drops models once they are measured; `work` puts them on "
                "another disk",
            )


def shown_bytes(count: int | None) -> str:
    return "an unknown size" if count is None else format_size(count)


def estimate(
    plan: StudyPlan, left: Sequence[StudyCell], folder: Path, *, jobs: int, keep: bool
) -> StudyEstimate:
    """Estimate the cells that are `left`. Models are made in `folder`; `keep` keeps them."""
    size = _sizes(plan)
    needed = dict.fromkeys(plan.nodes(left))
    costs = [
        NodeCost(
            name=node.name,
            kind=KINDS[node.kind],
            made_of=tuple(parent.name for parent in node.parents if parent.kind != "files"),
            bytes=size(node),
            tokens=_tokens(node),
            there=node not in needed or _is_there(node, folder),
        )
        for node in plan.nodes()
        if node.kind != "files"
    ]
    open_cells = {cell.name for cell in left}
    cells = [_cell_cost(plan, cell, cell.name in open_cells) for cell in plan.cells.values()]
    peak = _peak(left, size, folder, jobs=jobs, keep=keep)
    return StudyEstimate(
        title=plan.config.title,
        nodes=tuple(costs),
        cells=tuple(cells),
        missing=tuple(_missing(plan, list(needed))),
        peak_bytes=peak,
        free_bytes=free_disk(folder),
        notices=tuple(_notices(plan, peak)),
    )


def _is_there(node: StudyNode, folder: Path) -> bool:
    if node.kind == "given":
        return is_here(node.values["model"])
    if node.kind == "text":
        return os.path.exists(node.values["file"])
    return os.path.exists(folder / node.slug)


def largest_model(plan: StudyPlan) -> int:
    """Return the bytes of the largest model on disk; 0 if unknown."""
    size = _sizes(plan)
    return max((size(node) or 0 for node in plan.nodes()), default=0)


def _sizes(plan: StudyPlan) -> Callable[[StudyNode], int | None]:
    """Return a function from models to their sizes: a made one is as large as its inputs."""
    default = None if plan.config.size is None else parse_size(plan.config.size)

    @cache
    def size(node: StudyNode) -> int | None:
        if not node.is_model:
            return None
        if node.kind != "given":
            return size(node.parents[0])
        # Errors are reported when it is used.
        with contextlib.suppress(MoeMergeError):
            if is_here(node.values["model"]):
                with Checkpoint.open(node.values["model"]) as checkpoint:
                    return sum(info.nbytes for info in checkpoint.tensors.values())
        return default

    return size


def _tokens(node: StudyNode) -> int | None:
    """Return the approximate number of tokens that are read or written to make a node."""
    if node.kind == "text":
        return _written(DataRecipe.model_validate(node.values["recipe"]))
    texts = [parent for parent in node.parents if not parent.is_model]
    if not texts or (node.kind == "merge" and "data" not in node.values):
        return None
    lengths = [_length(text) for text in texts]
    if None in lengths:
        return None
    total = sum(length for length in lengths if length is not None)
    values = node.values.get("settings", {})
    share = node.values.get("share") or 1.0
    passes = values.get("epochs", 2.0) if node.kind == "tune" else 1.0
    return int(total * share * passes)


def _length(text: StudyNode) -> int | None:
    """Return the tokens of a text: estimated from its files, or its recipe's upper bound."""
    if text.kind == "text" and not os.path.exists(text.values["file"]):
        return _written(DataRecipe.model_validate(text.values["recipe"]))
    files = [text.values["file"]] if text.kind == "text" else text.values["files"]
    if not all(os.path.exists(file) for file in files):
        return None
    return sum(os.path.getsize(file) for file in files) // BYTES_PER_TOKEN


def _written(recipe: DataRecipe) -> int | None:
    """Return the most tokens that a recipe lets its model write."""
    if recipe.text or recipe.keep in ("prompt", "reference") or recipe.limit is None:
        return None
    return recipe.limit * recipe.samples * recipe.max_new_tokens


def _cell_cost(plan: StudyPlan, cell: StudyCell, is_open: bool) -> CellCost:
    completions = tokens = 0
    known = True
    for task in plan.tasks:
        if task.settings.domain not in cell.domains:
            continue
        problems = _problems(plan, task)
        if problems is None:
            known = False
            continue
        settings = plan.config.evaluate.settings
        asked = problems * settings.samples
        completions += asked
        tokens += asked * generation_settings(settings, task).max_new_tokens
    return CellCost(
        name=cell.name,
        models=tuple(node.name for node in cell.models),
        completions=completions if known else None,
        tokens=tokens if known else None,
        measured=not is_open,
    )


def _problems(plan: StudyPlan, task: BenchmarkTask) -> int | None:
    limit, expected = plan.config.evaluate.limit, task.settings.problems
    if expected is None:
        return limit
    return expected if limit is None else min(limit, expected)


def _missing(plan: StudyPlan, nodes: Sequence[StudyNode]) -> Iterator[MissingInput]:
    needed_for: dict[tuple[str, bool], str] = {}  # by name, and whether it is data
    for node in nodes:
        if node.kind == "given":
            needed_for.setdefault((node.values["model"], False), node.name)
        for file in _files_read(node):
            needed_for.setdefault((file, True), node.name)
    measured = {f"text {name}": files for name, files in plan.texts.items()}
    measured |= {f"task {t.name}": tuple(task_files(t, plan.config)) for t in plan.tasks}
    for why, files in measured.items():
        for file in files:
            needed_for.setdefault((file, True), why)
    for (source, data), why in needed_for.items():
        if not is_here(source, data=data):
            on_hub = not is_local(source) if data else bool(hub_ids(source))
            yield MissingInput(source, "to fetch" if on_hub else "missing", why)


def _files_read(node: StudyNode) -> list[str]:
    """Return the files of a text, or those that a missing text is made from."""
    if node.kind == "files":
        return list(node.values["files"])
    if node.kind != "text" or os.path.exists(node.values["file"]):
        return []
    recipe = node.values["recipe"]
    return [file for key in (*INPUTS, "against") for file in recipe.get(key, ())]


def _peak(
    left: Sequence[StudyCell],
    size_of: Callable[[StudyNode], int | None],
    folder: Path,
    *,
    jobs: int,
    keep: bool,
) -> int | None:
    """Return the most bytes on disk at a time, if cells are measured in order, some in parallel."""
    users: dict[StudyNode, set[int]] = {}
    for number, cell in enumerate(left):
        for node in _made(cell):
            users.setdefault(node, set()).add(number)
    most = present = 0
    alive: set[StudyNode] = set()
    for number, cell in enumerate(left):
        for node in _made(cell):
            if node not in alive:
                size = size_of(node)
                if size is None:
                    return None
                alive.add(node)
                present += 0 if _is_there(node, folder) else size
        most = max(most, present)
        done = number - jobs + 1  # cells up to this one are finished
        for node in [] if keep else [n for n in alive if max(users[n]) <= done]:
            alive.discard(node)
            present -= size_of(node) or 0
    return most


def _made(cell: StudyCell) -> list[StudyNode]:
    return [n for n in with_parents(cell.nodes) if n.is_model and not n.is_given]


def _notices(plan: StudyPlan, peak: int | None) -> Iterator[str]:
    if peak is None:
        yield "the size of some models is unknown: state it with `size:` in the study"
    if any(_problems(plan, task) is None for task in plan.tasks):
        yield "the number of problems of some tasks is unknown before they are downloaded"
