"""`moemerge stats` at a real model's shape: seconds, and peak memory of device and host.

    python benchmarks/stats.py --work /tmp/bench --shape olmoe-1b-7b --tokens 200000
    python benchmarks/stats.py --work /tmp/bench --layers 6 --tokens 2000 --device cpu

The checkpoint has random bf16 weights and is made in --work on first use. Each run is a process of
its own, whose peaks are taken. A file is removed once it has been measured.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import resource
import time
from pathlib import Path
from typing import Any

import torch

import job
import synthetic
from job import Subject


def main() -> None:
    parser = job.command_line(__doc__)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--kinds", nargs="+", default=["gram", "fisher"])
    parser.add_argument("--profile", action="store_true", help="print where Python's time goes")
    parser.add_argument("--show", action="store_true", help="tell of every layer at once")
    job.run(parser, collect, run_all)


# --- one run, in its own process ----------------------------------------------------------------


class Clock:
    """Notes when a job's parts begin and how long each layer takes."""

    def __init__(self, *, show: bool) -> None:
        self.parts: list[dict[str, Any]] = []
        self._show = show
        self._begin = time.perf_counter()

    def start(self, what: str, total: int, *, unit: str) -> None:
        self.parts.append({"part": what, "at": [time.perf_counter()]})

    def advance(self, amount: int) -> None:
        self.parts[-1]["at"].append(time.perf_counter())
        if self._show:
            print(
                f"  {self.parts[-1]['part']}: {time.perf_counter() - self._begin:.1f} s", flush=True
            )

    def status(self, message: str) -> None: ...

    def note(self, message: str) -> None: ...

    def finish(self) -> None:
        self.parts[-1]["at"].append(time.perf_counter())


def collect(spec: dict[str, Any]) -> None:
    from moemerge.config.faults import parse_settings
    from moemerge.config.job_settings import CollectingSettings
    from moemerge.statistics.collecting.job import CollectRequest
    from moemerge.statistics.collecting.run import run_collect

    settings = {"kind": spec["kind"], "device": spec["device"]}
    request = CollectRequest(
        spec["model"],
        Path(spec["out"]),
        [spec["text"]],
        parse_settings(CollectingSettings, settings, "the benchmark"),
        overwrite=True,
    )
    clock = Clock(show=spec["show"])
    profile = cProfile.Profile()
    if spec["profile"]:
        profile.enable()
    begin = time.perf_counter()
    report = run_collect(request, clock)
    ended = time.perf_counter()
    if spec["profile"]:
        profile.disable()
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(25)
        print(text.getvalue()[:6000])
    parts = []
    for part in clock.parts:
        times = [begin, *part["at"]]
        parts.append([part["part"], *(round(t - begin, 2) for t in times[1:])])
    cuda = torch.cuda.is_available() and spec["device"] != "cpu"
    found = {
        "kind": spec["kind"],
        "seconds": ended - begin,
        "with_imports": time.time() - spec["begun"],
        "parts": parts,
        "nbytes": report.nbytes,
        "units": report.units,
        "host_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "device_peak": torch.cuda.max_memory_reserved() if cuda else 0,
        "device_peak_allocated": torch.cuda.max_memory_allocated() if cuda else 0,
    }
    Path(spec["report"]).write_text(json.dumps(found))


# --- all of them --------------------------------------------------------------------------------


def run_all(args: argparse.Namespace) -> None:
    subject = Subject.of(args)
    subject.leave_device()
    text = args.work / f"{args.shape}-{args.tokens}-{args.row_tokens}.jsonl"
    words = synthetic.domains(subject.shape.vocabulary)["math"]
    synthetic.make_text(text, args.tokens, args.row_tokens, words, 0)
    runs = [run_once(args, subject, text, kind) for kind in args.kinds]
    if args.json is not None:
        sizes = {"tokens": args.tokens, "row_tokens": args.row_tokens}
        args.json.write_text(json.dumps({**subject.to_json(), **sizes, "runs": runs}, indent=1))


def run_once(args: argparse.Namespace, subject: Subject, text: Path, kind: str) -> dict[str, Any]:
    out = args.work / f"out.{kind}"
    spec = {
        "model": str(subject.model),
        "text": str(text),
        "kind": kind,
        "device": str(subject.device),
        "out": str(out),
        "profile": args.profile,
        "show": args.show,
    }
    found = job.in_own_process(__file__, args.work, spec)
    if found is None:
        print(f"{kind} failed", flush=True)
        return {"kind": kind, "failed": True}
    out.unlink(missing_ok=True)
    print(
        f"{kind}: {found['seconds']:.1f} s ({found['with_imports']:.1f} s with start-up), "
        f"{found['nbytes'] / 1e9:.1f} GB written, peak {found['device_peak'] / 1e9:.1f} GB of "
        f"device and {found['host_peak'] / 1e9:.2f} GB of host memory",
        flush=True,
    )
    for part in found["parts"]:
        print("   ", *part, flush=True)
    return found


if __name__ == "__main__":
    main()
