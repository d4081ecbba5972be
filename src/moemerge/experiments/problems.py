"""Compare models over the problems of a study's tasks, by resampling problems."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moemerge.evaluation.report import PairedDifference, TaskScores, compare_models
from moemerge.evaluation.settings import EvaluationSettings
from moemerge.evaluation.significance import Mean, mean
from moemerge.experiments.tables import TableForm

DRAWS: int = EvaluationSettings.model_fields["draws"].default
SEED = 0
CellEntry = Mapping[str, Any]


def pack(solved: Sequence[bool]) -> str:
    """Pack one bit per problem into hexadecimal digits."""
    bits = "".join("1" if value else "0" for value in solved)
    return f"{int('1' + bits, 2):x}"  # the leading 1 preserves leading zeros


def unpack(text: str) -> list[bool]:
    """Undo `pack`."""
    return [bit == "1" for bit in f"{int(text, 16):b}"[1:]]


def packed(scores: Sequence[float]) -> dict[str, Any]:
    """Return the scores of one task in the journal's format."""
    if all(score in (0.0, 1.0) for score in scores):
        return {"solved": pack([score == 1.0 for score in scores])}
    return {"scores": list(scores)}


def scores_of(task: CellEntry) -> list[float]:
    """Undo `packed`."""
    if "solved" in task:
        return [float(bit) for bit in unpack(task["solved"])]
    return [float(score) for score in task["scores"]]


def overall(form: TableForm, entry: CellEntry) -> Mean:
    """Return the mean of the domains' averages, with its standard error over problems."""
    means, weights = [], []
    domains = [domain for domain in form.domains if domain in entry["domains"]]
    for domain in domains:
        tasks = entry["domains"][domain]["tasks"]
        means += [mean(scores_of(tasks[task])) for task in form.tasks[domain]]
        weights += [1 / (len(domains) * len(tasks))] * len(tasks)
    value = math.fsum(w * m.value for w, m in zip(weights, means, strict=True))
    errors = [m.error for m in means]
    squares = [(w * e) ** 2 for w, e in zip(weights, errors, strict=True) if e is not None]
    return Mean(value, math.sqrt(math.fsum(squares)) if None not in errors else None, 1)


def pooled(form: TableForm, entries: Sequence[CellEntry]) -> CellEntry:
    """Combine the entries of several seeds: a problem's score is its mean over seeds."""
    if len(entries) == 1:
        return entries[0]
    domains: dict[str, Any] = {}
    for domain in (d for d in form.domains if all(d in e["domains"] for e in entries)):
        tasks: dict[str, Any] = {}
        for name in form.tasks[domain]:
            rows = [scores_of(entry["domains"][domain]["tasks"][name]) for entry in entries]
            tasks[name] = {"scores": np.mean(rows, axis=0).tolist()}
        domains[domain] = {"tasks": tasks}
    return {"domains": domains}


def paired(form: TableForm, first: CellEntry, second: CellEntry) -> PairedDifference | None:
    """Compare second with first over the domains that both have; None if there is none."""
    shared = [d for d in form.domains if d in first["domains"] and d in second["domains"]]
    tasks = []
    for domain in shared:
        for name, title in form.tasks[domain].items():
            rows = [scores_of(e["domains"][domain]["tasks"][name]) for e in (first, second)]
            places = tuple(map(str, range(len(rows[0]))))
            single = all(score in (0.0, 1.0) for row in rows for score in row)
            tasks.append(TaskScores(name, title, domain, places, np.array(rows), single))
    if not tasks:
        return None
    rows_of = compare_models(tasks, ["first", "second"], draws=DRAWS, seed=SEED)
    kinds = {row.kind: row for row in rows_of}
    whole = kinds.get("overall") or kinds.get("domain") or kinds["task"]
    return whole.pairs[0]
