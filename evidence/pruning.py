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
from moemerge.pruning.settings import RepairAfter
from moemerge.testbed import bundled_set
from moemerge.testbed.demo import PROBLEMS, accuracy, draw_test_problems, one_thread

EXPERTS = 24
KEPT = (20, 16, 12, 8)
DOMAINS = ("math", "code")
REPAIRS: tuple[RepairAfter, ...] = ("none", "calibrate", "refit")
ROWS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--score", default="reap", choices=["reap", "norm", "frequency"])
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        trained = bundled_set()
        for domain in DOMAINS:
            problems = draw_test_problems(domain, PROBLEMS)
            model = trained.models[domain]
            solved = accuracy(model, problems, device=options.device)
            rows.append(
                {"domain": domain, "kept": EXPERTS, "repair": "none", "solved": sum(solved)}
            )
            print(rows[-1], flush=True)
            for kept in KEPT:
                for repair in REPAIRS:
                    out, begin = Path(folder) / f"{domain}-{kept}-{repair}", time.perf_counter()
                    moemerge.prune(
                        model,
                        out,
                        data={domain: trained.data[domain]},
                        keep=kept / EXPERTS,
                        score=options.score,
                        repair=repair,
                        limit=ROWS,
                        measure=False,
                        device=options.device,
                        dtype="float32",
                    )
                    seconds = time.perf_counter() - begin
                    solved = accuracy(out, problems, device=options.device)
                    row = {"domain": domain, "kept": kept, "repair": repair, "solved": sum(solved)}
                    rows.append({**row, "seconds": round(seconds, 1)})
                    print(rows[-1], flush=True)
    document = {
        "version": moemerge.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "experts": EXPERTS,
        "problems": PROBLEMS,
        "rows": ROWS,
        "score": options.score,
        "measured": rows,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
