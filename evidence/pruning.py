"""Accuracy of the bundled specialists with fewer experts, before and after a repair.

python -m evidence.pruning docs/data/prune.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import moemerge
from moemerge.pruning.settings import ExpertScore, RepairAfter
from moemerge.testbed import bundled_set
from moemerge.testbed.demo import PROBLEMS, accuracy, draw_test_problems, one_thread

EXPERTS = 24
KEPT = (20, 16, 12, 8)
DOMAINS = ("math", "code")
VARIANTS: tuple[tuple[ExpertScore, RepairAfter], ...] = (
    ("reap", "none"),
    ("reap", "calibrate"),
    ("reap", "refit"),
    ("norm", "none"),
    ("frequency", "none"),
)
ROWS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.out.exists():
        rows = json.loads(options.out.read_text())["measured"]
    known = {(row["domain"], row["kept"], row["score"], row["repair"]) for row in rows}
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        for domain in DOMAINS:
            for kept in (EXPERTS, *KEPT):
                for score, repair in VARIANTS if kept < EXPERTS else VARIANTS[:1]:
                    if (domain, kept, score, repair) in known:
                        continue
                    out = Path(folder) / f"{domain}-{kept}-{score}-{repair}"
                    row = measure(domain, kept, score, repair, out, options.device)
                    rows.append(row)
                    print(row, flush=True)
                    write(options.out, rows)


def measure(
    domain: str, kept: int, score: ExpertScore, repair: RepairAfter, out: Path, device: str
) -> dict[str, Any]:
    """Prune a specialist, and return how many problems it solves."""
    trained, begin = bundled_set(), time.perf_counter()
    model = trained.models[domain]
    if kept < EXPERTS:
        moemerge.prune(
            model,
            out,
            data={domain: trained.data[domain]},
            keep=kept / EXPERTS,
            score=score,
            repair=repair,
            limit=ROWS,
            measure=False,
            device=device,
            dtype="float32",
        )
        model = out
    seconds = time.perf_counter() - begin
    solved = accuracy(model, draw_test_problems(domain, PROBLEMS), device=device)
    row = {"domain": domain, "kept": kept, "score": score, "repair": repair}
    return {**row, "solved": sum(solved), "seconds": round(seconds, 1)}


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
