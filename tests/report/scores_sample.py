"""The document of a page, with texts that try to be more than texts."""

from __future__ import annotations

from typing import Any

import numpy as np

from moemerge.lab.scores import EvaluationReport, TaskScores, compare_models

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
MODELS = ("merged", "calibrated", "average-of-three")


def sample_page(problems: int = 40, models: int = 2, tasks: int = 4) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    names = [*MODELS[: models - 1], f"model {HOSTILE}"] if models > 2 else list(MODELS[:models])
    titles = ["GSM8K", "MATH-500", "HumanEval+", "MBPP+"][:tasks]
    domains = ["math", "math", "code", "code"][:tasks]
    scored = tuple(
        TaskScores(
            title.lower(), title, domain, tuple(str(n) for n in range(1, problems + 1)),
            (rng.random((models, problems)) < 0.6).astype(float), single=True,
        )
        for title, domain in zip(titles, domains, strict=True)
    )  # fmt: skip
    settings = {"samples": 1, "temperature": 0.0}
    rows = compare_models(scored, names, draws=500, seed=0)
    labels = {name: f"out/{name}" for name in names}
    report = EvaluationReport("correct", settings, labels, scored, rows, (f"note: {HOSTILE}",))
    long = "So the answer follows from what was said before.\n" * 12
    return {
        **report.to_json(),
        "version": "0.1.0",
        "created": "2026-11-16",
        "headline": "calibrated and merged differ by 0.4 points of overall, which may be chance",
        "drawn": "greedy",
        "answers": {
            "models": names,
            "tasks": [
                {
                    "name": task.name,
                    "title": task.title,
                    "problems": [
                        {
                            "name": name,
                            "prompt": f"Problem {name}? {HOSTILE}",
                            "expected": f"#### {name}",
                            "scores": [float(v) for v in task.scores[:, place]],
                            "texts": [
                                [
                                    {
                                        "text": f"{model} says {HOSTILE}\n{long}",
                                        "grade": "right" if task.scores[n, place] else "wrong",
                                        "detail": "" if task.scores[n, place] else "7 instead of 8",
                                        "cut": place == 3 and n == 1,
                                    }
                                ]
                                for n, model in enumerate(names)
                            ],
                        }
                        for place, name in enumerate(task.problems)
                    ],
                }
                for task in scored
            ],
        },
    }
