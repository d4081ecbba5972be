"""Estimate what a study needs before it runs: disk space, tokens, and missing inputs.

It uses no network. The size of a model that was never downloaded is taken from the study file
(`size`). Token counts are upper bounds, or estimates from the rows of local files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.locate import hub_ids, is_here, is_local
from moemerge.checkpoint.tensors import format_size, parse_size
from moemerge.config.text_settings import DataRecipe
from moemerge.errors import CheckpointError, MoeMergeError, ResourceError
from moemerge.lab.evaluation.job import BenchmarkTask, generation_settings
from moemerge.lab.experiments.plan import INPUTS, StudyPlan
from moemerge.lab.experiments.settings import BY_VERB
from moemerge.lab.experiments.tree import StudyCell, StudyNode, task_files, with_parents
from moemerge.lab.tuning.settings import TuningSettings
from moemerge.runtime.devices import free_disk
from moemerge.runtime.progress import counted
from moemerge.text.rows import stream_rows

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
    notices: tuple[str, ...] = ()

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


class _Length(NamedTuple):
    rows: int
    tokens: int


_Lengths = Callable[[tuple[str, ...]], _Length | None]  # of local files of text


def shown_bytes(count: int | None) -> str:
    return "an unknown size" if count is None else format_size(count)


def estimate(
    plan: StudyPlan, left: Sequence[StudyCell], folder: Path, *, jobs: int, keep: bool
) -> StudyEstimate:
    """Estimate the cells that are `left`. Models are made in `folder`; `keep` keeps them."""
    size, lengths = _sizes(plan), cache(_length_of)
    needed = dict.fromkeys(plan.nodes(left))
    costs = [
        NodeCost(
            name=node.name,
            kind=KINDS[node.kind],
            made_of=tuple(parent.name for parent in node.parents if parent.kind != "files"),
            bytes=size(node),
            tokens=_tokens(node, lengths),
            there=node not in needed or _is_there(node, folder),
        )
        for node in plan.nodes()
        if node.kind != "files"
    ]
    open_cells = {cell.name for cell in left}
    problems = {task.name: _problems(plan, task, lengths) for task in plan.tasks}
    cells = [
        _cell_cost(plan, cell, problems, cell.name in open_cells) for cell in plan.cells.values()
    ]
    peak = _peak(left, size, folder, jobs=jobs, keep=keep)
    return StudyEstimate(
        title=plan.config.title,
        nodes=tuple(costs),
        cells=tuple(cells),
        missing=tuple(_missing(plan, list(needed))),
        peak_bytes=peak,
        free_bytes=free_disk(folder),
        notices=tuple(_notices(problems, peak)),
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


def _tokens(node: StudyNode, lengths: _Lengths) -> int | None:
    """Return the approximate number of tokens that are read or written to make a node."""
    if node.kind == "text":
        return _written(DataRecipe.model_validate(node.values["recipe"]))
    texts = [parent for parent in node.parents if not parent.is_model]
    if not texts or (node.kind == "merge" and "data" not in node.values):
        return None
    found = [_length(text, lengths) for text in texts]
    known = [length for length in found if length is not None]
    if len(known) < len(found):
        return None
    values = node.values.get("collecting" if node.kind == "merge" else "settings") or {}
    share, limit, fewest = node.values.get("share"), values.get("limit"), min(known).rows
    if node.kind == "tune":
        limit = limit if share is None else round(share * len(known) * fewest)
        return _tuned(_Length(*map(sum, zip(*known, strict=True))), values, limit)
    # A share of the rows is that share of the smallest text's, of every text.
    limit = limit if share is None else round(share * fewest)
    tokens = [_first(length, limit) for length in known]
    return sum(min(count, values.get("max_tokens") or count) for count in tokens)


def _first(length: _Length, limit: int | None) -> int:
    """Return the tokens of at most `limit` rows of a text."""
    if limit is None or limit >= length.rows:
        return length.tokens
    return length.tokens * limit // length.rows


def _tuned(length: _Length, values: Mapping[str, Any], limit: int | None) -> int:
    """Return the tokens of a tuning: of its epochs, or of the rows of its steps."""
    settings = TuningSettings.model_validate(values).resolved()
    tokens, rows = _first(length, limit), min(length.rows, limit or length.rows)
    if settings.steps is None:
        return int(tokens * settings.epochs)
    return tokens * settings.steps * settings.batch // max(1, rows)


def _length(text: StudyNode, lengths: _Lengths) -> _Length | None:
    """Return the length of a text: of its files, or its recipe's upper bound."""
    if text.kind != "text":
        return lengths(tuple(text.values["files"]))
    if os.path.exists(text.values["file"]):
        return lengths((text.values["file"],))
    recipe = DataRecipe.model_validate(text.values["recipe"])
    tokens = _written(recipe)
    return None if tokens is None else _Length(tokens // recipe.max_new_tokens, tokens)


def _length_of(files: tuple[str, ...]) -> _Length | None:
    """Return the rows of files and their tokens, roughly; None if they are not all here."""
    if not files or not all(os.path.isfile(file) for file in files):
        return None
    rows = size = 0
    # Errors are reported when it is used.
    with contextlib.suppress(MoeMergeError):
        for row in stream_rows(files):
            rows, size = rows + 1, size + row.size
        return _Length(rows, size // BYTES_PER_TOKEN)
    return None


def _written(recipe: DataRecipe) -> int | None:
    """Return the most tokens that a recipe lets its model write."""
    if recipe.text or recipe.keep in ("prompt", "reference") or recipe.limit is None:
        return None
    return recipe.limit * recipe.samples * recipe.max_new_tokens


def _cell_cost(
    plan: StudyPlan, cell: StudyCell, problems_of: Mapping[str, int | None], is_open: bool
) -> CellCost:
    completions = tokens = 0
    known = True
    for task in plan.tasks:
        if task.settings.domain not in cell.domains:
            continue
        problems = problems_of[task.name]
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


def _problems(plan: StudyPlan, task: BenchmarkTask, lengths: _Lengths) -> int | None:
    """Return the problems of a task that are used: at most `limit` of its rows."""
    limit, length = plan.config.evaluate.limit, lengths(tuple(task_files(task, plan.config)))
    own = None if task.name in plan.config.evaluate.data else task.settings.problems
    known = own if length is None else length.rows
    return min((count for count in (known, limit) if count is not None), default=None)


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


def _notices(problems: Mapping[str, int | None], peak: int | None) -> Iterator[str]:
    if peak is None:
        yield "the size of some models is unknown: state it with `size:` in the study"
    if None in problems.values():
        yield "the number of problems of some tasks is unknown before they are downloaded"
