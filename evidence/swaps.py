"""Do swapped routers predict what calibration closes? `python -m evidence.swaps OUT`

Merges of the bundled specialists are diagnosed with `diagnose --swaps` on calibration text, and
calibrated. OUT has one line for each merge: what the sources' routers win back, and the share of
the gap that calibration closes on test problems. Losses are those of answers. A repeated command
continues.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import moemerge
from evidence.natural_table import append
from evidence.prediction import expected
from moemerge.diagnosis.advice import Expected
from moemerge.diagnosis.verdict import WORTH, overall_totals, won_back
from moemerge.lab.testbed import bundled_set
from moemerge.lab.testbed.tasks.drawing import Split, problems

METHODS: Mapping[str, Mapping[str, float]] = {
    "linear": {"weight": 1.0},
    "task_arithmetic": {"weight": 1.0},
    "ties": {"weight": 1.0, "density": 0.6},
    "dare_ties": {"weight": 1.0, "density": 0.6},
    "wudi": {},
    "model_stock": {},
    "breadcrumbs": {"weight": 1.0, "density": 0.9, "gamma": 0.01},
    "tsv": {},
    "della": {"weight": 1.0, "density": 0.7, "epsilon": 0.1},
}
TRAINING_PROBLEMS, TEST_PROBLEMS = 512, 300  # of a domain


class Specialists:
    """The bundled models, and text of their domains."""

    def __init__(self, folder: Path) -> None:
        trained = bundled_set()
        self.base, self.models = trained.base, trained.models
        self.text = {name: _write(folder, name, "train", TRAINING_PROBLEMS) for name in self.models}
        self.unseen = {name: _write(folder, name, "test", TEST_PROBLEMS) for name in self.models}

    def measure(self, domains: Sequence[str], method: str, work: Path) -> dict[str, Any]:
        """Merge some specialists; return what swaps win back and what calibration closes."""
        sources = {domain: self.models[domain] for domain in domains}
        text, unseen = ({d: rows[d] for d in domains} for rows in (self.text, self.unseen))
        merged, calibrated = work / "merged", work / "calibrated"
        models = [{"model": str(m), "parameters": {**METHODS[method]}} for m in sources.values()]
        config: dict[str, Any] = {"merge_method": method, "models": models}
        if method != "linear":
            config["base_model"] = str(self.base)
        moemerge.merge(config, merged)
        found = moemerge.diagnose(merged, sources=sources, data=text, swaps=True)
        own = overall_totals(found.totals)["model"]
        moemerge.calibrate(merged, calibrated, sources=sources, data=text)
        after = moemerge.diagnose(merged, sources=sources, data=unseen, against=[calibrated])
        gap, left = (float(one.loss_gap or 0) for one in overall_totals(after.totals).values())
        shares = {"won_back": won_back(found.swaps), "closed": 1 - left / gap}
        return {"sources": list(domains), "method": method, "kl": own.mean("kl"), **shares}


def _write(folder: Path, domain: str, split: Split, count: int) -> Path:
    out = folder / f"{domain}-{split}.jsonl"
    drawn = problems(domain, split=split, count=count, seed=0)
    lines = (json.dumps({"prompt": p.prompt, "response": p.answer}) for p in drawn)
    out.write_text("\n".join(lines) + "\n")
    return out


@dataclass(frozen=True)
class Swapped:
    """A merge: what swapped routers win back of its loss, and what calibration closes."""

    sources: int
    won_back: float
    closed: float


def read(path: Path) -> list[Swapped]:
    lines = map(json.loads, path.read_text().splitlines())
    return [Swapped(len(line["sources"]), line["won_back"], line["closed"]) for line in lines]


def shortfall(found: Sequence[Swapped]) -> Expected:
    """Return by how much less calibration closes, in merges of two specialists."""
    pairs = [one for one in found if one.sources == 2 and one.won_back >= WORTH]
    return expected([one.won_back - one.closed for one in pairs])


def main(out: Path) -> None:
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    known = {(*line["sources"], line["method"]) for line in done}
    with TemporaryDirectory() as folder:
        specialists = Specialists(Path(folder))
        names = sorted(specialists.models)
        for domains in (*combinations(names, 2), tuple(names)):
            for method in METHODS:
                if (*domains, method) in known:
                    continue
                with TemporaryDirectory() as work:
                    line = specialists.measure(domains, method, Path(work))
                append(out, line)
                print(line, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
