"""A whole distillation at a real model's shape: seconds by phase next to floors, and peak memory.

    python benchmarks/distill.py --work /dev/shm/b --out /tmp/distilled --tokens 500000
    python benchmarks/distill.py --work /dev/shm/b --out /tmp/distilled --tokens 500000 \\
        --set lora=16
    python benchmarks/distill.py --work /tmp/bench --shape small --tokens 20000 --device cpu

The models are those of benchmarks/refit.py: random bf16 weights, and two sources with noise. They
are made in --work on first use. The distillation has its own process. Times count from its start.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml

import job
from job import Row, Subject
from refit import Notes, noisy_sources
from synthetic import Shape


def main() -> None:
    parser = job.command_line(__doc__)
    parser.add_argument("--tokens", type=int, default=500_000, help="of both domains")
    parser.add_argument("--out", type=Path, help="default: in --work")
    parser.add_argument("--link", action="store_true", help="sources share the merged layers")
    parser.add_argument("--no-write", action="store_true", help="end with the last step")
    parser.add_argument("--memory", type=float, help="GB of a GPU's that the job may take at most")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of distill")
    job.run(parser, distill, run_all)


def distill(spec: dict[str, Any]) -> None:
    """Run one distillation, in its own process."""
    from moemerge.config.faults import parse_settings
    from moemerge.config.repair_settings import DistillSettings
    from moemerge.repairs.distill import distill as repair
    from moemerge.repairs.inputs import RepairRequest

    if spec["memory"] is not None:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1e9 * spec["memory"] / whole)
    request = RepairRequest(
        merged=spec["merged"],
        out=Path(spec["out"]),
        sources=spec["sources"],
        data={name: [file] for name, file in spec["data"].items()},
        settings=parse_settings(DistillSettings, spec["settings"], "the benchmark"),
        overwrite=True,
        write=spec["write"],
    )
    imported = time.time() - spec["begun"]
    report = repair.run(request, Notes(spec["begun"]))
    content = {
        **report.to_json(),
        "imported": imported,
        "ended": time.time() - spec["begun"],
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    Path(spec["report"]).write_text(json.dumps(content))


def run_all(args: argparse.Namespace) -> None:
    subject = Subject.of(args)
    settings = {
        name: yaml.safe_load(value) for name, value in (one.split("=", 1) for one in args.set)
    }
    spec = {
        "merged": str(subject.model),
        "sources": noisy_sources(args, subject),
        "data": subject.texts(args, args.tokens),
        "out": str(args.out or args.work / "distilled"),
        "settings": {**settings, "device": args.device},
        "write": not args.no_write,
        "memory": args.memory,
    }
    rates = subject.rates()
    report = job.in_own_process(__file__, args.work, spec)
    if report is None:
        sys.exit(f"the distillation of {args.tokens} tokens failed")
    rows = floors(subject.shape, args, report, rates["matrix"])
    timings = report["timings"]
    print(
        f"\n{args.shape}, {subject.shape.layers} layers, {args.tokens} tokens on "
        f"{report['device']}, {settings}: {report['ended']:.1f} s from the process's start"
    )
    job.show_rows(rows)
    peak = timings["peak_gpu_memory"]
    print(
        f"{report['parameters']:,} parameters, {report['optimiser']}, {report['steps']} steps, "
        f"kept {report['kept_step']}; rates tried: {len(report['tried_rates'])}; expected "
        f"{report['memory_estimate'] / 1e9:.1f} GB"
        + (f", peak {peak / 1e9:.1f} GB on the GPU" if peak else "")
        + f", {report['peak_rss'] / 1e9:.1f} GB of host memory; {job.in_words(rates)}",
        flush=True,
    )
    if args.json is not None:
        results = {**subject.to_json(), "tokens": args.tokens, "rates": rates, "report": report}
        args.json.write_text(json.dumps(results, indent=1))


def floors(
    shape: Shape, args: argparse.Namespace, report: dict[str, Any], rate: float
) -> list[Row]:
    """The parts of a run. A step is three forward passes, four with recomputed activations."""
    d, inner = shape.width, shape.heads * shape.head_dim
    attention = d * (2 * inner + 2 * shape.kv_heads * shape.head_dim) + args.row_tokens * inner
    layer = attention + shape.top_k * 3 * d * shape.expert_width
    forward = 2 * (shape.layers * layer + d * shape.vocabulary) / rate  # seconds per token
    rows = 32 * args.row_tokens  # tokens of a step
    passes = 3 if report["settings"]["lora"] is None else 4
    held_out = 0.1 * args.tokens * forward
    known = {
        "teachers": (args.tokens * forward, "their products"),
        "train": (report["steps"] * passes * rows * forward, f"{passes} forward passes a step"),
        "evaluate": (len(report["held_out"]) * held_out, "a tenth of the tokens each"),
    }
    return [
        ("start-up", report["imported"], None, "Python imports torch and transformers"),
        *(
            (name, s, *known.get(name, (None, "")))
            for name, s in report["timings"]["seconds"].items()
        ),
    ]


if __name__ == "__main__":
    main()
