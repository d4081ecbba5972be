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
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import synthetic
from synthetic import SHAPES


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="olmoe-1b-7b")
    parser.add_argument("--layers", type=int, help="fewer than the real model has")
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--row-tokens", type=int, default=512)
    parser.add_argument("--kinds", nargs="+", default=["gram", "fisher"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--profile", action="store_true", help="print where Python's time goes")
    parser.add_argument("--show", action="store_true", help="tell of every layer at once")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        collect(json.loads(args.child.read_text()))
        return
    if args.work is None:
        parser.error("--work is needed")
    results = run_all(args)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))


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
    from moemerge.collecting import CollectRequest, run_collect
    from moemerge.config.settings import CollectingSettings
    from moemerge.config.translate import parse_settings
    from moemerge.runtime.process import keep_few_kernels

    keep_few_kernels()
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


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    device = ("cuda" if cuda else "cpu") if args.device == "auto" else args.device
    shape = SHAPES[args.shape]
    shape = replace(shape, layers=args.layers or shape.layers)
    args.work.mkdir(parents=True, exist_ok=True)
    model = args.work / f"{args.shape}-{shape.layers}"
    begin = time.perf_counter()
    nbytes = synthetic.make_model(model, shape, torch.device(device))
    print(f"model: {nbytes / 1e9:.1f} GB, made in {time.perf_counter() - begin:.1f} s", flush=True)
    if cuda:
        torch.cuda.empty_cache()
    text = args.work / f"{args.shape}-{args.tokens}-{args.row_tokens}.jsonl"
    synthetic.make_text(text, args.tokens, args.row_tokens, synthetic.domains(shape)["math"], 0)
    runs = [run_once(args, model, text, device, kind) for kind in args.kinds]
    return {
        "shape": args.shape,
        "layers": shape.layers,
        "model_bytes": nbytes,
        "tokens": args.tokens,
        "row_tokens": args.row_tokens,
        "device": torch.cuda.get_device_name() if device != "cpu" else "cpu",
        "torch": torch.__version__,
        "runs": runs,
    }


def run_once(
    args: argparse.Namespace, model: Path, text: Path, device: str, kind: str
) -> dict[str, Any]:
    out = args.work / f"out.{kind}"
    spec = {
        "model": str(model),
        "text": str(text),
        "kind": kind,
        "device": device,
        "out": str(out),
        "report": str(args.work / "report.json"),
        "profile": args.profile,
        "show": args.show,
        "begun": time.time(),
    }
    path = args.work / "spec.json"
    path.write_text(json.dumps(spec))
    Path(spec["report"]).unlink(missing_ok=True)
    status = subprocess.run([sys.executable, __file__, "--child", str(path)], check=False)
    if status.returncode != 0:
        print(f"{kind} failed", flush=True)
        return {"kind": kind, "failed": status.returncode}
    found: dict[str, Any] = json.loads(Path(spec["report"]).read_text())
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
