"""A whole refit at a real model's shape: where the time goes, beside the floor of each part.

    python benchmarks/refit.py --work /dev/shm/b --out /tmp/refitted --shape olmoe-1b-7b
    python benchmarks/refit.py --work /dev/shm/b --shape qwen3-30b-a3b --tokens 500000 \\
        --link --no-write
    python benchmarks/refit.py --work /tmp/bench --layers 6 --tokens 4000 --device cpu

The merged checkpoint has random bf16 weights and is made in --work on first use. A source is the
same with noise of its own in every layer; with --link, where memory cannot hold more than one
model, its layers are links to the merged model's and only its embedding has noise, which moves
every hidden state all the same. The refit is a process of its own. With --no-write it ends when the
last map is fitted. The floors are measured in this run: disk, bf16 products, reads of memory.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

import job
import synthetic
from job import Row, Subject
from moemerge.runtime.progress import Silent
from synthetic import Shape

NOISE = 0.1


def main() -> None:
    parser = job.command_line(__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of both domains")
    parser.add_argument("--out", type=Path, help="default: in --work")
    parser.add_argument("--link", action="store_true", help="sources share the merged layers")
    parser.add_argument("--no-write", action="store_true", help="end with the last map fitted")
    parser.add_argument("--memory", type=float, help="GB of a GPU's that the job may take at most")
    parser.add_argument("--prepare", action="store_true", help="make models and text, and end")
    parser.add_argument("--verbose", action="store_true", help="times after every layer")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of refit")
    job.run(parser, refit, run_all)


# --- one refit, in its own process --------------------------------------------------------------


class Notes(Silent):
    """Every layer is told as it is done: a run that is stopped has said how far it came."""

    def __init__(self, begun: float) -> None:
        self.begun = begun
        self.told: list[tuple[float, str]] = []

    def note(self, message: str) -> None:
        self.told.append((round(time.time() - self.begun, 2), message))
        print(f"{self.told[-1][0]:7.1f} s  {message}", flush=True)


def refit(spec: dict[str, Any]) -> None:
    from moemerge.config.faults import parse_settings
    from moemerge.config.repair_settings import RefitSettings
    from moemerge.repairs.inputs import RepairRequest
    from moemerge.repairs.refit import refit as repair

    if spec["memory"] is not None:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1e9 * spec["memory"] / whole)
    if spec["verbose"]:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("moemerge").setLevel(logging.DEBUG)
    request = RepairRequest(
        merged=spec["merged"],
        out=Path(spec["out"]),
        sources=spec["sources"],
        data={name: [file] for name, file in spec["data"].items()},
        settings=parse_settings(RefitSettings, spec["settings"], "the benchmark"),
        overwrite=True,
        write=spec["write"],
    )
    imported = time.time() - spec["begun"]
    notes = Notes(spec["begun"])
    report = repair.run(request, notes)
    content = {
        **report.to_json(),
        "notes": notes.told,
        "imported": imported,
        "ended": time.time() - spec["begun"],
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    Path(spec["report"]).write_text(json.dumps(content))


def make_source(folder: Path, merged: Path, seed: int, device: torch.device, link: bool) -> None:
    """The merged model with noise; with `link`, in the embedding's shard alone."""
    if folder.exists():
        return
    folder.mkdir(parents=True)
    shards = sorted(merged.glob("*.safetensors"))
    noisy = shards[:1] if link else shards
    for file in sorted(set(merged.iterdir()) - set(noisy)):
        os.link(file, folder / file.name)
    with ThreadPoolExecutor(synthetic.WRITERS) as threads:
        seeds = range(seed * len(shards), (seed + 1) * len(shards))
        list(threads.map(partial(add_noise, folder, device), noisy, seeds))


def add_noise(folder: Path, device: torch.device, file: Path, seed: int) -> None:
    """A shard with noise in all its weights, as a file of the same name."""
    made = folder / file.name
    shutil.copyfile(file, made)
    data = torch.from_file(str(made), shared=True, size=file.stat().st_size, dtype=torch.uint8)
    begin = 8 + int.from_bytes(bytes(data[:8].tolist()), "little")
    generator = torch.Generator(device).manual_seed(seed)
    for part in torch.split(data[begin:].view(torch.bfloat16), 2**26):
        there = part.to(device).float()
        noise = torch.randn(there.shape, generator=generator, device=device)
        part.copy_((there * (1.0 + NOISE * noise)).bfloat16())


def noisy_sources(args: argparse.Namespace, subject: Subject) -> dict[str, str]:
    made = {}
    for seed, name in enumerate(synthetic.domains(subject.shape.vocabulary)):
        kind = "link" if args.link else "noise"
        path = subject.model.with_name(f"{subject.model.name}-{kind}-{name}")
        make_source(path, subject.model, seed + 1, subject.device, args.link)
        made[name] = str(path)
    return made


def run_once(args: argparse.Namespace, spec: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = dict(item.split("=", 1) for item in args.set)
    if "ridge" in settings and settings["ridge"] != "auto":
        settings["ridge"] = float(settings["ridge"])
    spec |= {
        "out": str(args.out or args.work / "refitted"),
        "settings": {**settings, "device": args.device},
        "write": not args.no_write,
        "verbose": args.verbose,
        "memory": args.memory,
    }
    report = job.in_own_process(__file__, args.work, spec)
    if report is None:
        sys.exit(f"the refit of {args.tokens} tokens failed")
    return report


# --- the table ----------------------------------------------------------------------------------


def run_all(args: argparse.Namespace) -> None:
    subject = Subject.of(args)
    spec = {
        "merged": str(subject.model),
        "sources": noisy_sources(args, subject),
        "data": subject.texts(args, args.tokens),
    }
    subject.leave_device()
    if args.prepare:
        return
    rates = subject.rates()
    report = run_once(args, spec)
    rows = floors(subject.shape, args, report, rates)
    show(args, subject.shape, report, rows, rates)
    if args.json is not None:
        results = {
            **subject.to_json(),
            "tokens": args.tokens,
            "rates": rates,
            "report": {**report, "layers": len(report["layers"])},
            "floors": {row[0]: row[2] for row in rows},
        }
        args.json.write_text(json.dumps(results, indent=1))


def floors(
    shape: Shape, args: argparse.Namespace, report: dict[str, Any], rates: dict[str, float]
) -> list[Row]:
    """The parts of a run. Products are counted as the matrix unit does them, Grams whole."""
    d, layers, tokens = shape.width, shape.layers, args.tokens
    inner, pairs = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sent = tokens * shape.top_k
    width = shape.expert_width
    attention_maps = 2 * tokens * (
        2 * d * (inner + 2 * pairs)  # what source and merged give
        + d * d + d * (inner + 2 * pairs)  # Gram and cross products of q, k, v
        + inner * d + inner * inner + d * inner  # of the output
    )  # fmt: skip
    first = 2 * sent * (2 * d * 2 * width + d * d + d * 2 * width)
    last = 2 * sent * (d * 2 * width + 2 * d * width + d * 2 * width + width * width + d * width)
    head = 2 * tokens * (3 * d * shape.vocabulary + d * d)
    forward = (
        2
        * tokens
        * (d * (2 * inner + 2 * pairs) + args.row_tokens * inner + shape.top_k * 3 * d * width)
    )
    rate = rates["matrix"]
    known: dict[str, tuple[float | None, str]] = {
        "fit maps": (layers * attention_maps / rate, "their products"),
        "fit experts": (layers * (first + last) / rate, "their products"),
        "fit the head": (head / rate, "its products"),
        "fit routers": (layers * tokens * d * 2 / rates["memory_read"], "one read of X a layer"),
    }
    rows: list[Row] = [
        ("start-up", report["imported"], None, "Python imports torch and transformers")
    ]
    seconds = report["timings"]["seconds"]
    streaming = {name: s for name, s in seconds.items() if name in STREAMING}
    total = sum(streaming.values())
    rows.append(("forward", total, 2 * layers * forward / rate, "merged and sources, products"))
    rows += [
        (name, s, *known.get(name, (None, "")))
        for name, s in seconds.items()
        if name not in STREAMING
    ]
    read = report["timings"]["beside"].get("read")
    if read is not None:
        floor = read["bytes"] / rates["disk_read"]
        rows.append(("(beside) read", read["seconds"], floor, f"{read['bytes'] / 1e9:.1f} GB"))
    return rows


STREAMING = ("embeddings", "attention", "experts", "modules", "other layers")


def show(
    args: argparse.Namespace,
    shape: Shape,
    report: dict[str, Any],
    rows: list[Row],
    rates: dict[str, float],
) -> None:
    timings = report["timings"]
    fitted = report["imported"] + timings["solved"]
    print(
        f"\n{args.shape}, {shape.layers} layers, {args.tokens} tokens on {report['device']}: "
        f"{fitted:.1f} s from the process's start to the last map fitted, "
        f"{report['ended']:.1f} s to its end"
    )
    job.show_rows(rows)
    peak = timings["peak_gpu_memory"]
    totals = report["totals"]
    shares = totals["error_left"]["held_out"] or totals["error_left"]["calibration"]
    left = {kind: f"{value:.2f}" for kind, value in shares.items()}
    print(
        f"{totals['maps']} maps, {totals['kept']} kept; error left {left}; expected "
        f"{report['memory_estimate'] / 1e9:.1f} GB"
        + (f", peak {peak / 1e9:.1f} GB on the GPU" if peak else "")
        + f", {report['peak_rss'] / 1e9:.1f} GB of host memory; {job.in_words(rates)}",
        flush=True,
    )


if __name__ == "__main__":
    main()
