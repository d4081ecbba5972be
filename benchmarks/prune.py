"""Pruning with a repair at a real model's shape: seconds from the run's start, and memory.

    python benchmarks/prune.py --work /dev/shm/b --out /dev/shm/b/pruned --tokens 500000
    python benchmarks/prune.py --work /tmp/bench --shape small --tokens 4000 --device cpu

The checkpoint has random bf16 weights and is made in --work on first use. The job is a process of
its own: it scores the experts, writes the pruned model, and repairs it with the original as its
source. With random weights the scores mean nothing; times do.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import job
from job import Row, Subject


def main() -> None:
    parser = job.command_line(__doc__)
    parser.add_argument("--tokens", type=int, default=500_000, help="of both domains")
    parser.add_argument("--out", type=Path, help="default: in --work")
    parser.add_argument("--keep", type=float, default=0.75)
    parser.add_argument("--repair", default="refit", choices=["none", "calibrate", "refit"])
    parser.add_argument("--measure", action="store_true", help="diagnose the result as well")
    job.run(parser, prune, run_all)


def prune(spec: dict[str, Any]) -> None:
    import moemerge

    begun = time.time()
    report = moemerge.prune(
        spec["model"], spec["out"], data=spec["data"], overwrite=True, **spec["settings"]
    )
    content = {
        **report.to_json(),
        "imported": begun - spec["begun"],
        "ended": time.time() - spec["begun"],
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    Path(spec["report"]).write_text(json.dumps(content))


def run_all(args: argparse.Namespace) -> None:
    subject = Subject.of(args)
    settings = {"keep": args.keep, "repair": args.repair, "device": args.device}
    settings["measure"] = args.measure
    spec = {
        "model": str(subject.model),
        "out": str(args.out or args.work / "pruned"),
        "data": subject.texts(args, args.tokens),
        "settings": settings,
    }
    subject.leave_device()
    report = job.in_own_process(__file__, args.work, spec)
    if report is None:
        sys.exit(f"pruning with {args.tokens} tokens failed")
    pruning = report["prune"]
    rows: list[Row] = [
        ("start-up", report["imported"], None, ""),
        ("score", pruning["seconds"], None, ""),
    ]
    repair = next((report[key] for key in ("refit", "calibration") if key in report), None)
    peak = None
    if repair is not None:
        rows.append((args.repair, repair["seconds"], None, ""))
        peak = repair["timings"]["peak_gpu_memory"]
    spent = sum(seconds for _, seconds, _, _ in rows)
    rows.append(("the rest", report["ended"] - spent, None, ""))
    print(
        f"\n{args.shape}, {subject.shape.layers} layers, {pruning['experts_before']} to "
        f"{pruning['experts_after']} experts, {args.tokens} tokens on {pruning['device']}: "
        f"{report['ended'] - report['imported']:.1f} s from the run's start"
    )
    job.show_rows(rows)
    print(
        (f"peak {peak / 1e9:.1f} GB on the GPU, " if peak else "")
        + f"{report['peak_rss'] / 1e9:.1f} GB of host memory",
        flush=True,
    )
    if args.json is not None:
        args.json.write_text(json.dumps({**subject.to_json(), "tokens": args.tokens, **report}))


if __name__ == "__main__":
    main()
