"""Task files, and evaluations in one call."""

from __future__ import annotations

import json
from pathlib import Path

from moemerge.config.faults import parse_settings
from moemerge.lab.benchmarks import EvaluationRequest
from moemerge.lab.evaluate import run_evaluation
from moemerge.lab.scores import EvaluationReport
from moemerge.lab.settings import EvaluationOutputSettings, EvaluationSettings
from moemerge.lab.testbed.tasks import Problem, check
from moemerge.runtime.progress import Silent

GREEDY = {"samples": 1, "temperature": 0, "device": "cpu", "draws": 500}


def write_task(folder: Path, asked, name: str = "sums", **values) -> str:
    """A task file with its data beside it."""
    folder.mkdir(exist_ok=True)
    rows = [{"question": p.prompt, **vars(p)} for p in asked]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = {
        "title": name.title(), "domain": "math", "data": f"{name}.jsonl", "verify": "exact",
        "max_new_tokens": 24, **values,
    }  # fmt: skip
    path = folder / f"{name}.yml"
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in said.items()))
    return str(path)


def as_the_testbed(row, response) -> bool:
    """A check in a task file: what the testbed says of this answer."""
    names = ("domain", "kind", "hard", "prompt", "answer")
    return check(Problem(**{name: row[name] for name in names}), response)


def cannot_tell(row, response) -> bool:
    """A check that never knows."""
    raise ValueError("who can tell")


def request(models, tasks, out, *, data=None, **values) -> EvaluationRequest:
    own = EvaluationOutputSettings.model_fields
    output = {"out": out, **{name: value for name, value in values.items() if name in own}}
    others = {name: value for name, value in values.items() if name not in own}
    return EvaluationRequest(
        models=models,
        tasks=tasks,
        settings=parse_settings(EvaluationSettings, {**GREEDY, **others}, "settings"),
        output=parse_settings(EvaluationOutputSettings, output, "output"),
        data=data or {},
    )


def run(models, tasks, out, **values) -> EvaluationReport:
    return run_evaluation(request(models, tasks, out, **values), Silent())


def kept_answers(out: Path, task: str, model: str) -> list[dict]:
    lines = (out / "answers" / task / f"{model}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
