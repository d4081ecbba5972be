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
from pathlib import Path
from typing import Any

import job
from job import Subject

# What a job would import on its way.
IMPORTED = (
    "moemerge.repairs.harc",
    "moemerge.statistics.collecting.run",
    "transformers.models.olmoe.modeling_olmoe",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)


def main() -> None:
    parser = job.command_line(__doc__, row_tokens=200)
    parser.add_argument("--tokens", type=int, default=8000, help="of both domains")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--job", choices=("calibrate", "stats"), default="calibrate")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    job.run(parser, child, run_all)


# --- one job, in every rank ---------------------------------------------------------------------


def child(spec: dict[str, Any]) -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    begin, used = time.perf_counter(), time.process_time()
    work = {"calibrate": _calibrate, "stats": _collect}[spec["job"]]
    found = {**work(spec), "wall": time.perf_counter() - begin}
    found["processor"] = time.process_time() - used
    Path(f"{spec['report']}.{os.environ.get('RANK', '0')}").write_text(json.dumps(found))


def _calibrate(spec: dict[str, Any]) -> dict[str, Any]:
    from moemerge.config.faults import parse_settings
    from moemerge.config.repair_settings import CalibrationSettings
    from moemerge.repairs.harc import calibrate as harc
    from moemerge.repairs.inputs import RepairRequest
    from moemerge.runtime.progress import Silent

    request = RepairRequest(
        merged=spec["merged"],
        out=Path(spec["out"]),
        sources=spec["sources"],
        data={name: [file] for name, file in spec["data"].items()},
        settings=parse_settings(CalibrationSettings, spec["settings"], "the benchmark"),
        overwrite=True,
        write=False,
    )
    report = harc.run(request, Silent())
    return {
        "seconds": report.seconds,
        "timings": report.timings.to_json(),
        "bytes_read": dict(report.bytes_read or {}),  # of all ranks
        "kl": [value for row in report.layers for value in row["kl_after"].values()],
    }


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


def make_spec(args: argparse.Namespace, subject: Subject) -> dict[str, Any]:
    return {
        "job": args.job,
        "merged": str(subject.model),
        "out": str(args.work / "by-ranks"),
        "sources": subject.sources(),
        "data": subject.texts(args, args.tokens),
        "settings": {"device": str(subject.device)},
        "report": str(args.work / "ranks-report.json"),
    }


def run_all(args: argparse.Namespace) -> None:
    subject = Subject.of(args)
    spec = make_spec(args, subject)
    print(f"{args.job}: {args.tokens} tokens, {subject.device}", flush=True)
    run_once(args, spec, args.ranks)
    runs: dict[int, list[dict[str, Any]]] = {1: [], args.ranks: []}
    for turn in range(args.repeats):
        for ranks, own in runs.items():
            own.append(run_once(args, spec, ranks))
            load = os.getloadavg()[0]
            times = f"{own[-1]['seconds']:.2f} s, {own[-1]['processor']:.2f} of the processor"
            print(f"{turn}: {ranks} ranks: {times}, load {load:.1f}", flush=True)
            if "kl" in own[-1]:
                print(f"   read {own[-1]['bytes_read']}, KL {_off(runs[1][0], own[-1]):.1e} apart")
    gains = {name: _gains(runs[1], runs[args.ranks], name) for name in ("seconds", "processor")}
    for name, values in gains.items():
        spread = f"{min(values):.2f} to {max(values):.2f}, {args.repeats} pairs of runs in turns"
        print(f"{args.ranks} ranks, {name}: {statistics.median(values):.2f} x ({spread})")
    if args.json is not None:
        content = {**subject.to_json(), "tokens": args.tokens, "runs": runs, "speed_up": gains}
        args.json.write_text(json.dumps(content, indent=2))


def _off(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest relative difference between the routing divergences of two results."""
    pairs = zip(one["kl"], other["kl"], strict=True)
    return float(max(abs(b / a - 1) for a, b in pairs))


def _gains(one: list[dict[str, Any]], several: list[dict[str, Any]], name: str) -> list[float]:
    return [a[name] / b[name] for a, b in zip(one, several, strict=True)]


if __name__ == "__main__":
    main()
