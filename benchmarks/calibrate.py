"""A whole calibration at a real model's shape: where the time goes, beside the floor of each part.

    python benchmarks/calibrate.py --work /tmp/bench --shape olmoe-1b-7b --tokens 1000000
    python benchmarks/calibrate.py --work /dev/shm/b --shape qwen3-30b-a3b --no-write
    python benchmarks/calibrate.py --work /tmp/bench --layers 2 --tokens 4000 --device cpu

The merged checkpoint has random bf16 weights and is made in --work on first use, a layer at a time;
the two sources differ from it in their routers. The calibration is a process of its own. With
--no-write it ends when the last router is solved, for machines whose disk cannot hold a second
copy. The floors are measured in this run: disk (as warm or cold as the files are then), bf16
products, reads of device memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import job
from job import Row, Subject
from refit import Notes
from synthetic import Shape


def main() -> None:
    parser = job.command_line(__doc__)
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1_000_000], help="of both domains"
    )
    parser.add_argument("--no-write", action="store_true", help="end with the last router solved")
    parser.add_argument(
        "--cold", action="store_true", help="drop the model from the page cache first"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of calibrate")
    job.run(parser, calibrate, run_all)


# --- one calibration, in its own process --------------------------------------------------------


def calibrate(spec: dict[str, Any]) -> None:
    from moemerge.config.faults import parse_settings
    from moemerge.config.repair_settings import CalibrationSettings
    from moemerge.repairs.harc import calibrate as harc
    from moemerge.repairs.inputs import RepairRequest

    request = RepairRequest(
        merged=spec["merged"],
        out=Path(spec["out"]),
        sources=spec["sources"],
        data={name: [file] for name, file in spec["data"].items()},
        settings=parse_settings(CalibrationSettings, spec["settings"], "the benchmark"),
        overwrite=True,
        write=spec["write"],
    )
    imported = time.time() - spec["begun"]
    notes = Notes(spec["begun"])
    report = harc.run(request, notes)
    content = {
        **report.to_json(),
        "notes": notes.told,
        "imported": imported,
        "ended": time.time() - spec["begun"],
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    Path(spec["report"]).write_text(json.dumps(content))


def run_once(args: argparse.Namespace, subject: Subject, tokens: int) -> dict[str, Any]:
    settings = dict(item.split("=", 1) for item in args.set)
    spec: dict[str, Any] = {
        "merged": str(subject.model),
        "out": str(args.work / "calibrated"),
        "sources": subject.sources(),
        "data": subject.texts(args, tokens),
        "settings": {**settings, "device": args.device},
        "write": not args.no_write,
    }
    report = job.in_own_process(__file__, args.work, spec)
    if report is None:
        sys.exit(f"the calibration of {tokens} tokens failed")
    return report


# --- the table ----------------------------------------------------------------------------------


def run_all(args: argparse.Namespace) -> None:
    subject = Subject.of(args)
    if args.cold:
        drop_from_cache(subject.model)
    rates = subject.rates()
    runs: list[dict[str, Any]] = []
    results = {**subject.to_json(), "rates": rates, "runs": runs}
    for tokens in args.tokens:
        if args.cold:
            drop_from_cache(subject.model)
        report = run_once(args, subject, tokens)
        rows = floors(subject.shape, tokens, args.row_tokens, report, rates, subject.nbytes)
        show(args, subject.shape, tokens, report, rows, rates)
        runs.append({"tokens": tokens, "report": report, "floors": {r[0]: r[2] for r in rows}})
        if args.json is not None:  # after each, so that a run that is cut short has told something
            args.json.write_text(json.dumps(results, indent=1))


def drop_from_cache(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def floors(
    shape: Shape,
    tokens: int,
    row_tokens: int,
    report: dict[str, Any],
    rates: dict[str, float],
    nbytes: int,
) -> list[Row]:
    """The parts of a run."""
    d, layers = shape.width, shape.layers
    inner, pairs = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    projections = 2 * tokens * d * (2 * inner + 2 * pairs)
    scores = 2 * tokens * row_tokens * inner  # two products, half of them masked
    experts = 2 * tokens * shape.top_k * 3 * d * shape.expert_width
    features = tokens * d * 2 / rates["memory_read"]
    steps = sum(row["iterations"] for row in report["layers"])
    timings = report["timings"]
    known: dict[str, tuple[float | None, str]] = {
        "attention": (layers * (projections + scores) / rates["matrix"], "its products"),
        "experts": ((layers - 1) * experts / rates["matrix"], "its products, last layer left out"),
        "statistics": (layers * features, "one read of X a layer"),
        "solve": (steps * features, "one read of X a step"),
        "measure": (layers * features, "one read of X a layer"),
    }
    rows: list[Row] = [
        ("start-up", report["imported"], None, "Python imports torch and transformers")
    ]
    rows += [
        (name, seconds, *known.get(name, (None, "")))
        for name, seconds in timings["seconds"].items()
    ]
    read, copy = timings["beside"]["read"], timings["beside"].get("copy", {"seconds": 0.0})
    rows.append(("(beside) read", read["seconds"], read["bytes"] / rates["disk_read"], "the disk"))
    if copy["seconds"]:
        rows.append(("(beside) copy", copy["seconds"], None, f"{nbytes / 1e9:.1f} GB"))
    return rows


def show(
    args: argparse.Namespace,
    shape: Shape,
    tokens: int,
    report: dict[str, Any],
    rows: list[Row],
    rates: dict[str, float],
) -> None:
    timings = report["timings"]
    solved = report["imported"] + timings["solved"]
    print(
        f"\n{args.shape}, {shape.layers} layers, {tokens} tokens on {report['device']}: "
        f"{solved:.1f} s from the process's start to the last router solved, "
        f"{report['ended']:.1f} s to its end"
    )
    job.show_rows(rows)
    peak = timings["peak_gpu_memory"]
    steps = [row["iterations"] for row in report["layers"]]
    bad = [row["layer"] for row in report["layers"] if row["status"] != "converged"]
    print(
        f"steps {min(steps)} to {max(steps)}"
        + (f", not converged: layers {bad}" if bad else ", all converged")
        + (f"; peak {peak / 1e9:.1f} GB on the GPU" if peak else "")
        + f"; {job.in_words(rates)}",
        flush=True,
    )


if __name__ == "__main__":
    main()
