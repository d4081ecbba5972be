"""Accuracy of the bundled specialists with fewer experts, before and after a repair.

    python -m evidence.pruning docs/data/prune.json

Finished cells are kept, so the same command continues.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import moemerge
from evidence.finetuning import finetune
from evidence.layout import EOS
from evidence.similar import groups_of_experts
from moemerge.config.repair_settings import ExpertScore
from moemerge.lab.testbed import bundled_set
from moemerge.lab.testbed.demo import PROBLEMS, accuracy, draw_test_problems, one_thread
from moemerge.lab.testbed.tasks import Problem
from moemerge.text.rows import write_rows

EXPERTS = 24
KEPT = (20, 16, 12, 8)
COMPARED = (16, 12)  # a third and half of the experts removed
# Each specialist, and a domain without text that it can do in part.
DOMAINS = {"math": "code", "code": "chat"}
DRAWS = (0, 1, 2)  # of the rows
ROWS = 512
AMOUNTS = (32, 128, 1000)  # other numbers of rows
GENERAL = 64  # rows of the other domain, for which the original is one more source
COMPARED_ROWS = 128  # on which outputs of experts are compared
STEPS = 40  # of fine-tuning on the same rows, in batches of 128
RATES = (3e-4, 1e-3)


@dataclass(frozen=True)
class Cell:
    """One pruned and repaired specialist."""

    domain: str
    kept: int
    score: ExpertScore = "reap"
    repair: str = "none"
    draw: int = 0
    rows: int = ROWS


def cells() -> Iterator[Cell]:
    """Yield the cells of all tables, the most important ones first."""
    for domain in DOMAINS:
        yield Cell(domain, EXPERTS)
        for kept in KEPT:
            yield from (Cell(domain, kept, "reap", r) for r in ("none", "calibrate", "refit"))
            yield from (Cell(domain, kept, score) for score in ("norm", "frequency"))
    for rows in AMOUNTS:
        yield from (Cell(domain, 16, "reap", "refit", 0, rows) for domain in DOMAINS)
    for domain in DOMAINS:
        for kept in COMPARED:
            yield from (Cell(domain, kept, "reap", f"{r}, grouped") for r in ("calibrate", "refit"))
    tuned = [f"tune {rate:g}" for rate in RATES]
    for draw in DRAWS:
        for kept in COMPARED:
            for domain in DOMAINS:
                yield Cell(domain, kept, "reap", "gradient", draw)
                yield Cell(domain, kept, "similarity", "none", draw)
                for repair in ("none", "calibrate", "refit", "refit, general", *tuned):
                    yield Cell(domain, kept, "reap", repair, draw)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no cell later")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.out.exists():
        rows = json.loads(options.out.read_text())["measured"]
    begin = time.monotonic()
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        for number, cell in enumerate(dict.fromkeys(cells())):
            own = asdict(cell)
            if any(own == {key: row[key] for key in own} for row in rows):
                continue
            if time.monotonic() - begin > options.seconds:
                return
            row = {**own, **measure(cell, Path(folder) / str(number), options.device)}
            rows.append(row)
            print(row, flush=True)
            write(options.out, rows)


def measure(cell: Cell, folder: Path, device: str) -> dict[str, Any]:
    """Prune and repair a specialist; return how many problems it solves, here and elsewhere."""
    begin = time.perf_counter()
    folder.mkdir()
    model = make(cell, folder, device)
    seconds = time.perf_counter() - begin
    solved = {
        domain: sum(accuracy(model, draw_test_problems(domain, PROBLEMS), device=device))
        for domain in (cell.domain, DOMAINS[cell.domain])
    }
    own, other = solved.values()
    return {"solved": own, "elsewhere": other, "seconds": round(seconds, 1)}


def make(cell: Cell, folder: Path, device: str) -> Path:
    """Return the folder of the pruned and repaired model."""
    trained, out = bundled_set(), folder / "out"
    model, data = trained.models[cell.domain], {cell.domain: trained.data[cell.domain]}
    if cell.kept == EXPERTS:
        return model
    shared: dict[str, Any] = {"limit": cell.rows, "seed": cell.draw, "measure": False}
    shared |= {"device": device, "dtype": "float32"}
    options: dict[str, Any] = {**shared, "keep": cell.kept / EXPERTS, "score": cell.score}
    if cell.repair in ("none", "calibrate", "refit", "gradient"):
        moemerge.prune(model, out, data=data, **{**options, "repair": cell.repair})
        return out
    report = moemerge.prune(model, folder / "pruned", data=data, **options)
    if cell.repair.endswith("grouped"):
        some = read_problems(cell.domain)[:COMPARED_ROWS]
        groups = groups_of_experts(
            model, report.pruning.kept, [p.prompt + p.answer + EOS for p in some]
        )
        experts = folder / "experts.json"
        experts.write_text(json.dumps(groups))
        shared |= {"sources": {cell.domain: model}, "data": data}
        shared |= {"experts": {cell.domain: experts}}
        if cell.repair == "refit, grouped":
            moemerge.refit(folder / "pruned", out, **shared)
        else:
            exact: dict[str, Any] = {"targets": "source-features", "objective": "exact"}
            moemerge.calibrate(folder / "pruned", out, **shared, **exact)
        return out
    if cell.repair == "refit, general":
        other = DOMAINS[cell.domain]
        texts = {**data, other: _first_rows(trained.data[other], folder / "general.jsonl")}
        moemerge.refit(
            folder / "pruned", out, sources=dict.fromkeys(texts, model), data=texts, **shared
        )
        return out
    rate = float(cell.repair.removeprefix("tune "))
    first = cell.draw * 244  # of 1000 rows
    rows = read_problems(cell.domain)[first : first + ROWS]
    return finetune(folder / "pruned", out, rows, steps=STEPS, lr=rate, device=device)


def _first_rows(data: Path, out: Path) -> Path:
    lines = data.read_text().splitlines()[:GENERAL]
    write_rows(out, [json.loads(line) for line in lines])
    return out


def read_problems(domain: str) -> list[Problem]:
    """Return the rows of a bundled specialist's text."""
    rows = map(json.loads, bundled_set().data[domain].read_text().splitlines())
    return [Problem(domain, "", False, row["prompt"], row["response"]) for row in rows]


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    document = {
        "version": moemerge.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "experts": EXPERTS,
        "problems": PROBLEMS,
        "rows": ROWS,
        "measured": rows,
    }
    out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
