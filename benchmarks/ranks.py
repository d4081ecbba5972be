"""What a second process is worth: one rank of one thread against several, on the same cores.

    python benchmarks/ranks.py --work /tmp/bench --layers 6 --tokens 8000 --repeats 3
    python benchmarks/ranks.py --work /tmp/bench --shape small --tokens 4000 --job stats
    python benchmarks/ranks.py --work /dev/shm/b --ranks 8 --tokens 8000000 --device cuda

The checkpoint is that of benchmarks/calibrate.py, random bf16 weights at a real model's shape (6
layers of OLMoE are 5.4 GB). Runs take turns, so that whatever else loads the machine loads both; a
first one, which is not counted, brings the files into the page cache. Times are the job's own,
without the imports that every process makes once; on a busy machine look at the processor's time,
of the rank that used most. A calibration writes nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import synthetic
from synthetic import SHAPES, Shape

# What a job would import on its way.
IMPORTED = (
    "moemerge.calibration.run",
    "moemerge.collecting.run",
    "transformers.models.olmoe.modeling_olmoe",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="olmoe-1b-7b")
    parser.add_argument("--layers", type=int, help="fewer than the real model has")
    parser.add_argument("--tokens", type=int, default=8000, help="of both domains")
    parser.add_argument("--row-tokens", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--job", choices=("calibrate", "stats"), default="calibrate")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(json.loads(args.child.read_text()))
        return
    if args.work is None:
        parser.error("--work is needed")
    run_all(args)


# --- one job, in every rank ---------------------------------------------------------------------


def child(spec: dict[str, Any]) -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    begin, used = time.perf_counter(), time.process_time()
    job = {"calibrate": _calibrate, "stats": _collect}[spec["job"]]
    found = {**job(spec), "wall": time.perf_counter() - begin}
    found["processor"] = time.process_time() - used
    Path(f"{spec['report']}.{os.environ.get('RANK', '0')}").write_text(json.dumps(found))


def _calibrate(spec: dict[str, Any]) -> dict[str, Any]:
    from moemerge.calibration import CalibrationRequest, run_calibration
    from moemerge.config.calibration import CalibrationSettings
    from moemerge.config.translate import parse_settings
    from moemerge.runtime.progress import Silent

    request = CalibrationRequest(
        merged=spec["merged"],
        out=Path(spec["out"]),
        sources=spec["sources"],
        data={name: [file] for name, file in spec["data"].items()},
        settings=parse_settings(CalibrationSettings, spec["settings"], "the benchmark"),
        overwrite=True,
        write=False,
    )
    report = run_calibration(request, Silent())
    return {"seconds": report.seconds, "timings": report.timings.to_json()}


def _collect(spec: dict[str, Any]) -> dict[str, Any]:
    import moemerge

    files = list(spec["data"].values())
    out = f"{spec['out']}.stats"
    report = moemerge.collect_statistics(
        spec["merged"], out, data=files, device=spec["settings"]["device"], overwrite=True
    )
    return {"seconds": report.seconds}


# --- turns --------------------------------------------------------------------------------------


def run_once(args: argparse.Namespace, spec: dict[str, Any], ranks: int) -> dict[str, Any]:
    path = args.work / "ranks.json"
    path.write_text(json.dumps(spec))
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    words += ["--master-port", "29511", __file__, "--child", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    if subprocess.run(words, env=environment, check=False).returncode != 0:
        sys.exit(f"the run of {ranks} ranks failed")
    found = [json.loads(Path(f"{spec['report']}.{rank}").read_text()) for rank in range(ranks)]
    return {**found[0], "processor": max(one["processor"] for one in found)}


def make_spec(args: argparse.Namespace, shape: Shape, merged: Path) -> dict[str, Any]:
    sources, data = {}, {}
    for seed, (name, words) in enumerate(synthetic.domains(shape).items()):
        sources[name] = str(merged.with_name(f"{merged.name}-{name}"))
        synthetic.make_source(Path(sources[name]), merged, seed + 1)
        text = args.work / f"{args.shape}-{name}-{args.tokens}-{args.row_tokens}.jsonl"
        synthetic.make_text(text, args.tokens // 2, args.row_tokens, words, seed)
        data[name] = str(text)
    return {
        "job": args.job,
        "merged": str(merged),
        "out": str(args.work / "by-ranks"),
        "sources": sources,
        "data": data,
        "settings": {"device": args.device},
        "report": str(args.work / "ranks-report.json"),
    }


def run_all(args: argparse.Namespace) -> None:
    shape = SHAPES[args.shape]
    shape = replace(shape, layers=args.layers or shape.layers)
    args.work.mkdir(parents=True, exist_ok=True)
    merged = args.work / f"{args.shape}-{shape.layers}"
    nbytes = synthetic.make_model(merged, shape, torch.device(args.device))
    spec = make_spec(args, shape, merged)
    print(f"{args.job}: {nbytes / 1e9:.1f} GB, {args.tokens} tokens, {args.device}", flush=True)
    run_once(args, spec, args.ranks)
    runs: dict[int, list[dict[str, Any]]] = {1: [], args.ranks: []}
    for turn in range(args.repeats):
        for ranks, own in runs.items():
            own.append(run_once(args, spec, ranks))
            load = os.getloadavg()[0]
            times = f"{own[-1]['seconds']:.2f} s, {own[-1]['processor']:.2f} of the processor"
            print(f"{turn}: {ranks} ranks: {times}, load {load:.1f}", flush=True)
    gains = {name: _gains(runs[1], runs[args.ranks], name) for name in ("seconds", "processor")}
    for name, values in gains.items():
        spread = f"{min(values):.2f} to {max(values):.2f}, {args.repeats} pairs of runs in turns"
        print(f"{args.ranks} ranks, {name}: {statistics.median(values):.2f} x ({spread})")
    if args.json is not None:
        content = {"bytes": nbytes, "tokens": args.tokens, "runs": runs, "speed_up": gains}
        args.json.write_text(json.dumps(content, indent=2))


def _gains(one: list[dict[str, Any]], several: list[dict[str, Any]], name: str) -> list[float]:
    return [a[name] / b[name] for a, b in zip(one, several, strict=True)]


if __name__ == "__main__":
    main()
