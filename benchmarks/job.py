"""What benchmarks of a whole job share: the words of their command line, a checkpoint at a real
model's shape with its text, and the process that the job has to itself."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import synthetic
from moemerge.runtime.process import configure_process
from synthetic import SHAPES, Shape

Row = tuple[str, float, float | None, str]  # a part, its seconds, their floor, what the floor is


def command_line(description: str | None, *, row_tokens: int = 512) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="olmoe-1b-7b")
    parser.add_argument("--layers", type=int, help="fewer than the real model has")
    parser.add_argument("--row-tokens", type=int, default=row_tokens)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser


def run(
    parser: argparse.ArgumentParser,
    job: Callable[[dict[str, Any]], None],
    benchmark: Callable[[argparse.Namespace], None],
) -> None:
    """The benchmark; or its job, in a process that `in_own_process` has started."""
    args = parser.parse_args()
    configure_process()  # as the command does, before the job loads torch
    if args.child is not None:
        job(json.loads(args.child.read_text()))
        return
    if args.work is None:
        parser.error("--work is needed")
    benchmark(args)


@dataclass(frozen=True)
class Subject:
    """The checkpoint that a job is timed on."""

    name: str
    shape: Shape
    device: torch.device
    model: Path
    nbytes: int

    @classmethod
    def of(cls, args: argparse.Namespace) -> Subject:
        """Made on first use."""
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(auto if args.device == "auto" else args.device)
        shape = SHAPES[args.shape]
        shape = replace(shape, layers=args.layers or shape.layers)
        args.work.mkdir(parents=True, exist_ok=True)
        model = args.work / f"{args.shape}-{shape.layers}"
        begin = time.perf_counter()
        nbytes = synthetic.make_model(model, shape, device)
        seconds = time.perf_counter() - begin
        print(f"model: {nbytes / 1e9:.1f} GB, made in {seconds:.1f} s", flush=True)
        return cls(args.shape, shape, device, model, nbytes)

    def texts(self, args: argparse.Namespace, tokens: int) -> dict[str, str]:
        """A file for each domain, `tokens` in all."""
        made = {}
        for seed, (name, words) in enumerate(synthetic.domains(self.shape.vocabulary).items()):
            path = args.work / f"{self.name}-{name}-{tokens}-{args.row_tokens}.jsonl"
            synthetic.make_text(path, tokens // 2, args.row_tokens, words, seed)
            made[name] = str(path)
        return made

    def sources(self) -> dict[str, str]:
        """Models that differ from this one in their routers, one for each domain."""
        made = {}
        for seed, name in enumerate(synthetic.domains(self.shape.vocabulary)):
            path = self.model.with_name(f"{self.model.name}-{name}")
            synthetic.make_source(path, self.model, seed + 1)
            made[name] = str(path)
        return made

    def rates(self) -> dict[str, float]:
        """What the machine can do, which floors are made of."""
        rates = {
            "disk_read": synthetic.read_rate(self.model),
            "matrix": synthetic.matrix_rate(self.device),
            "memory_read": synthetic.read_bandwidth(self.device),
        }
        self.leave_device()
        return rates

    def leave_device(self) -> None:
        """Give the memory back that this process holds: the job has another."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def to_json(self) -> dict[str, Any]:
        cuda = self.device.type == "cuda"
        return {
            "shape": self.name,
            "layers": self.shape.layers,
            "bytes": self.nbytes,
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
        }


def in_own_process(
    script: str, work: Path, spec: dict[str, Any], seconds: float | None = None
) -> dict[str, Any] | None:
    """What the job of `script` writes to spec["report"]; None if it fails or takes longer."""
    path, report = work / "spec.json", work / "report.json"
    path.write_text(json.dumps({**spec, "report": str(report), "begun": time.time()}))
    report.unlink(missing_ok=True)
    words = [sys.executable, script, "--child", str(path)]
    try:
        if subprocess.run(words, check=False, timeout=seconds).returncode != 0:
            return None
    except subprocess.TimeoutExpired:
        return None
    written: dict[str, Any] = json.loads(report.read_text())
    return written


def show_rows(rows: Sequence[Row]) -> None:
    print(f"{'part':<18}{'seconds':>9}{'floor':>9}   the floor is")
    for name, seconds, floor, why in rows:
        shown = "" if floor is None else f"{floor:.2f}"
        print(f"{name:<18}{seconds:>9.2f}{shown:>9}   {why}")


def in_words(rates: dict[str, float]) -> str:
    return (
        f"disk {rates['disk_read'] / 1e9:.1f} GB/s, products {rates['matrix'] / 1e12:.1f} TFLOP/s, "
        f"memory {rates['memory_read'] / 1e12:.2f} TB/s"
    )
