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
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import synthetic
from synthetic import SHAPES, Shape

Row = tuple[str, float, float | None, str]  # a part, its seconds, their floor, what the floor is


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="olmoe-1b-7b")
    parser.add_argument("--layers", type=int, help="fewer than the real model has")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1_000_000], help="of both domains"
    )
    parser.add_argument("--row-tokens", type=int, default=512)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--no-write", action="store_true", help="end with the last router solved")
    parser.add_argument(
        "--cold", action="store_true", help="drop the model from the page cache first"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of calibrate")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        calibrate(json.loads(args.child.read_text()))
        return
    if args.work is None:
        parser.error("--work is needed")
    run_all(args)


# --- one calibration, in its own process --------------------------------------------------------


def calibrate(spec: dict[str, Any]) -> None:
    from moemerge.calibration import CalibrationRequest, run_calibration
    from moemerge.config.calibration import CalibrationSettings
    from moemerge.config.translate import parse_settings
    from moemerge.runtime.process import keep_few_kernels, own_process
    from moemerge.runtime.progress import Silent

    own_process()
    keep_few_kernels()
    request = CalibrationRequest(
        merged=spec["merged"],
        out=Path(spec["out"]),
        sources=spec["sources"],
        data={name: [file] for name, file in spec["data"].items()},
        settings=parse_settings(CalibrationSettings, spec["settings"], "the benchmark"),
        overwrite=True,
        write=spec["write"],
    )
    imported = time.time() - spec["begun"]
    report = run_calibration(request, Silent())
    content = {**report.to_json(), "imported": imported, "ended": time.time() - spec["begun"]}
    Path(spec["report"]).write_text(json.dumps(content))


def run_once(args: argparse.Namespace, shape: Shape, merged: Path, tokens: int) -> dict[str, Any]:
    sources, data = {}, {}
    for seed, (name, words) in enumerate(synthetic.domains(shape).items()):
        sources[name] = str(merged.with_name(f"{merged.name}-{name}"))
        synthetic.make_source(Path(sources[name]), merged, seed + 1)
        text = args.work / f"{args.shape}-{name}-{tokens}-{args.row_tokens}.jsonl"
        synthetic.make_text(text, tokens // 2, args.row_tokens, words, seed)
        data[name] = str(text)
    settings = dict(item.split("=", 1) for item in args.set)
    spec: dict[str, Any] = {
        "merged": str(merged),
        "out": str(args.work / "calibrated"),
        "sources": sources,
        "data": data,
        "settings": {**settings, "device": args.device},
        "write": not args.no_write,
        "report": str(args.work / "report.json"),
        "begun": time.time(),
    }
    path = args.work / "spec.json"
    path.write_text(json.dumps(spec))
    Path(spec["report"]).unlink(missing_ok=True)
    status = subprocess.run([sys.executable, __file__, "--child", str(path)], check=False)
    if status.returncode != 0:
        sys.exit(f"the calibration of {tokens} tokens failed")
    found: dict[str, Any] = json.loads(Path(spec["report"]).read_text())
    return found


# --- the table ----------------------------------------------------------------------------------


def run_all(args: argparse.Namespace) -> None:
    device = torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    )
    shape = SHAPES[args.shape]
    shape = replace(shape, layers=args.layers or shape.layers)
    args.work.mkdir(parents=True, exist_ok=True)
    merged = args.work / f"{args.shape}-{shape.layers}"
    begin = time.perf_counter()
    nbytes = synthetic.make_model(merged, shape, device)
    print(f"model: {nbytes / 1e9:.1f} GB, made in {time.perf_counter() - begin:.1f} s", flush=True)
    if args.cold:
        drop_from_cache(merged)
    rates = {
        "disk_read": synthetic.read_rate(merged),
        "matrix": synthetic.matrix_rate(device),
        "memory_read": synthetic.read_bandwidth(device),
    }
    if device.type == "cuda":
        torch.cuda.empty_cache()
    runs: list[dict[str, Any]] = []
    results = {
        "shape": args.shape,
        "layers": shape.layers,
        "bytes": nbytes,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "rates": rates,
        "runs": runs,
    }
    for tokens in args.tokens:
        if args.cold:
            drop_from_cache(merged)
        report = run_once(args, shape, merged, tokens)
        rows = floors(shape, tokens, args.row_tokens, report, rates, nbytes)
        show(args, shape, tokens, report, rows, rates)
        runs.append({"tokens": tokens, "report": report, "floors": {r[0]: r[2] for r in rows}})
        if args.json is not None:  # after each, so that a run that is cut short has told something
            args.json.write_text(json.dumps(results, indent=1))


def drop_from_cache(folder: Path) -> None:
    import os

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
    print(f"{'part':<18}{'seconds':>9}{'floor':>9}   the floor is")
    for name, seconds, floor, why in rows:
        shown = "" if floor is None else f"{floor:.2f}"
        print(f"{name:<18}{seconds:>9.2f}{shown:>9}   {why}")
    peak = timings["peak_gpu_memory"]
    steps = [row["iterations"] for row in report["layers"]]
    bad = [row["layer"] for row in report["layers"] if row["status"] != "converged"]
    print(
        f"steps {min(steps)} to {max(steps)}"
        + (f", not converged: layers {bad}" if bad else ", all converged")
        + (f"; peak {peak / 1e9:.1f} GB on the GPU" if peak else "")
        + f"; disk {rates['disk_read'] / 1e9:.1f} GB/s, products {rates['matrix'] / 1e12:.0f} "
        f"TFLOP/s, memory {rates['memory_read'] / 1e12:.2f} TB/s",
        flush=True,
    )


if __name__ == "__main__":
    main()
