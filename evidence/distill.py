"""Repair the weight average of the bundled math and code specialists, by refit and distillation.

    python -m evidence.distill WORK --json docs/data/distill-testbed.json

Chat text and the chat specialist are not used, except that the base teaches on chat text if the
table says so: the chat column shows what a repair costs elsewhere.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import moemerge
from evidence.scoring import accuracy
from moemerge.lab.testbed import bundled_set
from moemerge.lab.testbed.demo import draw_test_problems

DOMAINS = ("math", "code", "chat")
MERGED = ("math", "code")
COMMON: dict[str, Any] = {"device": "cpu", "dtype": "float32", "measure": False, "overwrite": True}
# Model by name: the model it starts from, the command, and its settings.
REPAIRS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "refit": ("weight average", "refit", {}),
    "distill": ("weight average", "distill", {}),
    "distill, 400 steps": ("weight average", "distill", {"steps": 400}),
    "distill, the base on chat text": ("weight average", "distill", {"base": True}),
    "distill --lora 8": ("weight average", "distill", {"lora": 8}),
    "distill --optimiser adafactor, bfloat16": (
        "weight average",
        "distill",
        {"optimiser": "adafactor", "dtype": "bfloat16"},
    ),
    "refit, then distill": ("refit", "distill", {}),
    "refit, then distill, the base on chat text": ("refit", "distill", {"base": True}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--problems", type=int, default=1500, help="of each domain")
    parser.add_argument("--only", nargs="*", choices=REPAIRS, default=list(REPAIRS))
    args = parser.parse_args()
    torch.set_num_threads(1)  # for models this small, a second thread costs more than it saves
    bundle = bundled_set()
    problems = {domain: draw_test_problems(domain, args.problems) for domain in DOMAINS}
    rows: dict[str, dict[str, Any]] = {}

    def measure(name: str, model: Path, **more: Any) -> None:
        solved = {domain: accuracy(model, own) for domain, own in problems.items()}
        shares = {domain: round(100 * sum(own) / len(own), 1) for domain, own in solved.items()}
        rows[name] = {**shares, **more}
        print(f"{name}: {rows[name]}", flush=True)

    merged = args.work / "merged"
    parameters = {"weight": 0.5}
    models = [{"model": str(bundle.models[n]), "name": n, "parameters": parameters} for n in MERGED]
    moemerge.merge({"merge_method": "linear", "models": models}, merged, overwrite=True)
    folders = {"weight average": merged}
    for name in DOMAINS:
        measure(f"{name} specialist", bundle.models[name])
    measure("weight average", merged)
    for number, (name, (start, command, settings)) in enumerate(REPAIRS.items()):
        if name not in args.only:
            continue
        sources = {domain: bundle.models[domain] for domain in MERGED}
        data = {domain: bundle.data[domain] for domain in MERGED}
        given = {**COMMON, **settings}
        if given.pop("base", False):
            sources["base"], data["base"] = bundle.base, bundle.data["chat"]
        folders[name] = args.work / str(number)
        repair: Any = getattr(moemerge, command)
        report = repair(folders[start], folders[name], sources=sources, data=data, **given)
        more: dict[str, Any] = {}
        if command == "distill":
            more = {"rate": report.learning_rate, "steps": report.kept_step}
            more["tried"] = {f"{rate:.3g}": value for rate, value in report.tried_rates.items()}
        measure(name, folders[name], **more)
    if args.json is not None:
        record = {"problems": args.problems, "rows": rows}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
