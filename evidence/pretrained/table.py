"""Print tables of scored models: `python -m evidence.pretrained.table SCORES.jsonl`.

The share of the accuracy gap that a repair closes is over the domains' own tasks: the distance from
the merge to each domain's specialist. Intervals are paired over problems (95 %, bootstrap).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TASKS = {
    "math": ("gsm8k", "arithmetic"),
    "knowledge": ("arc_easy", "arc_challenge", "openbookqa", "commonsense_qa", "boolq"),
    "code": ("trace",),
}
RESAMPLES = 2000

Right = dict[str, NDArray[np.float64]]  # by task: the share of each problem's samples


def read(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Return the scored models by name; a later line of a model replaces an earlier one."""
    lines = [json.loads(line) for path in paths for line in path.open(encoding="utf-8")]
    return {Path(line["model"]).name: line for line in lines}


def right(line: Mapping[str, Any]) -> Right:
    found = {task: np.array(own, float) for task, own in line["choices"].items()}
    for task, own in line["answers"].items():
        found[task] = np.array([statistics.fmean(one) for one in own])
    return found


def domain_accuracy(found: Right, picks: Mapping[str, NDArray[np.int64]] | None = None) -> Any:
    """Return the mean over tasks in each domain, in percent, of all or of resampled problems."""
    means = {
        task: own.mean() if picks is None else own[picks[task]].mean(-1)
        for task, own in found.items()
    }
    return {d: 100 * sum(means[t] for t in tasks) / len(tasks) for d, tasks in TASKS.items()}


def closed(model: Any, merge: Any, specialists: Mapping[str, Any]) -> Any:
    """Return the share of the gap that is closed, the mean over domains, in percent."""
    gained = sum(model[d] - merge[d] for d in TASKS)
    return 100 * gained / sum(specialists[d][d] - merge[d] for d in TASKS)


def interval(model: Right, merge: Right, specialists: Mapping[str, Right]) -> tuple[float, float]:
    generator = np.random.default_rng(0)
    picks = {
        task: generator.integers(len(own), size=(RESAMPLES, len(own)))
        for task, own in model.items()
    }
    owns = {d: domain_accuracy(one, picks) for d, one in specialists.items()}
    shares = closed(domain_accuracy(model, picks), domain_accuracy(merge, picks), owns)
    low, high = np.percentile(shares, [2.5, 97.5])
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scores", type=Path, nargs="+")
    lines = read(parser.parse_args().scores)
    found = {name: right(line) for name, line in lines.items()}
    own = {domain: found[domain] for domain in TASKS}
    reference = {domain: domain_accuracy(one) for domain, one in own.items()}
    heads = ["model", *TASKS, "gap closed", "loss gap closed", "general", "instructions", "loops"]
    print("| " + " | ".join(heads) + " |")
    print("| --- |" + " ---: |" * (len(heads) - 1))
    for name, line in lines.items():
        accuracy = domain_accuracy(found[name])
        cells = [name, *(f"{accuracy[d]:.1f}" for d in TASKS)]
        merge, _, repair = name.partition(".")  # a repair of `avg` is in `avg.refit`
        if repair:
            share = closed(accuracy, domain_accuracy(found[merge]), reference)
            low, high = interval(found[name], found[merge], own)
            start, loss = lines[merge]["loss"], line["loss"]
            gap = sum(start[d] - lines[d]["loss"][d] for d in TASKS)
            won = 100 * sum(start[d] - loss[d] for d in TASKS) / gap
            cells += [f"{share:.0f} % ({low:.0f} to {high:.0f})", f"{won:.0f} %"]
        else:
            cells += ["", ""]
        looped = sum(one[0] for one in line["health"]) / sum(one[2] for one in line["health"])
        cells += [f"{line['loss'][k]:.3f}" for k in ("general", "instructions")]
        print("| " + " | ".join([*cells, f"{100 * looped:.1f} %"]) + " |")


if __name__ == "__main__":
    main()
