"""Calibrate and refit layers of DeepSeek-V3's shape: time and memory next to floors and estimates.

    export PYTHONPATH=.
    python benchmarks/deepseek_layers.py --work /dev/shm/b
    python benchmarks/deepseek_layers.py --work /dev/shm/b --job refit --seconds 200
    python benchmarks/deepseek_layers.py --work /tmp/bench --tiny --device cpu

The model has two MoE layers in block FP8, random codes, and a small vocabulary. Its routers, norms
and embeddings are in their own shard. The two sources have noise in that shard, and hard links to
the layers. Files are made in --work on first use: 11.6 GB per layer, 0.25 GB per source. Each job
has its own process. Every result is printed as a line of JSON as soon as it is known.

Without --write, jobs end with the last layer. With it, OUT has the model's size (`requantize: same`
for the refit), and the journal next to it holds the refitted layers in bf16: 23 GB each.
"""

from __future__ import annotations

import argparse
import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import calibrate
import job
import refit
import synthetic
from moemerge.checkpoint import TensorInfo
from moemerge.checkpoint.safetensors_file import build_header
from moemerge.runtime.dtypes import Dtype
from moemerge.runtime.process import configure_process
from tools.scale import SHAPES, Estimate, Shape

TINY = Shape("deepseek_v3", 2, 256, 16, 4, 128, 2, 1024, dense_width=256)
CODE_STD = 100.0  # of random FP8 codes, whose largest value is 448
SCRIPTS = {"calibrate": calibrate.__file__, "refit": refit.__file__}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="default: in --work")
    parser.add_argument("--job", nargs="+", default=["make", "calibrate", "refit"],
                        choices=["make", "calibrate", "refit"])  # fmt: skip
    parser.add_argument("--tokens", type=int, default=100_000, help="of both domains")
    parser.add_argument("--row-tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="same structure, small matrices")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, help="stop a job after this time")
    parser.add_argument("--cold", action="store_true", help="empty the page cache before each job")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of the job")
    args = parser.parse_args()
    configure_process()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.work.mkdir(parents=True, exist_ok=True)
    run_all(args)


def run_all(args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    is_gpu = device.type == "cuda"
    shape = TINY if args.tiny else replace(SHAPES["deepseek-v3"], dense_layers=0, vocabulary=8192)
    shape = replace(shape, layers=args.layers, extra_layers=0)
    model = args.work / f"deepseek{'-tiny' if args.tiny else ''}-{shape.layers}"
    begin = time.perf_counter()
    nbytes = make_model(model, shape, device)
    sources = {
        name: model.with_name(f"{model.name}-{name}")
        for name in synthetic.domains(shape.vocabulary)
    }
    for seed, folder in enumerate(sources.values(), 1):
        refit.make_source(folder, model, seed, device, link=True)
    data = make_texts(args, shape)
    machine = torch.cuda.get_device_name() if is_gpu else "cpu"
    say("make", seconds=time.perf_counter() - begin, bytes=nbytes, layers=shape.layers,
        device=machine, torch=torch.__version__)  # fmt: skip
    if args.cold:
        calibrate.drop_from_cache(model)
    rates = {
        "read": synthetic.read_rate(model),
        "bf16": synthetic.matrix_rate(device),
        "float64": synthetic.matrix_rate(device, torch.float64),
    }
    say("rates", **rates)
    if is_gpu:
        torch.cuda.empty_cache()
    for name in [name for name in args.job if name != "make"]:
        if args.cold:
            calibrate.drop_from_cache(model)
        report, used = run_job(args, name, model, sources, data)
        if report is None:
            say(name, failed=True, host_used=used)
            continue
        show(args, name, shape, report, used, rates)


def say(part: str, **values: Any) -> None:
    shown = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}
    print(json.dumps({"part": part, **shown}), flush=True)


# --- files --------------------------------------------------------------------------------------


def make_model(folder: Path, shape: Shape, device: torch.device) -> int:
    """Write the merged model; return its bytes. An existing folder is kept."""
    layers: list[list[TensorInfo]] = [[] for _ in range(shape.layers)]
    small: list[TensorInfo] = []
    for info in shape.tensors():
        is_small = ".layers." not in info.name or info.dtype is Dtype.BFLOAT16
        (small if is_small else layers[int(info.name.split(".")[2])]).append(info)
    parts = [small, *layers]
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator(device).manual_seed(0)
        largest = max(sum(info.nbytes for info in infos) for infos in parts)
        host = torch.empty(largest, dtype=torch.uint8)  # pinned memory would not be given back
        weight_map: dict[str, str] = {}
        with ThreadPoolExecutor(synthetic.WRITERS) as pool:
            for number, infos in enumerate(parts, 1):
                name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
                header, offsets = build_header(infos)
                for info in infos:
                    at = offsets[info.name] - len(header)
                    drawn = draw(info, generator).reshape(-1).view(torch.uint8)
                    host[at : at + info.nbytes].copy_(drawn)
                total = sum(info.nbytes for info in infos)
                synthetic.write_file(folder / name, header, host[:total], pool)
                weight_map |= dict.fromkeys((info.name for info in infos), name)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        synthetic.make_tokenizer(shape.vocabulary, folder)
        # The shape's config has groups only if it has layers of multi-token prediction.
        config = {**shape.config, "n_group": 8, "topk_group": 4}
        config |= {"pad_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 4096}
        (folder / "config.json").write_text(json.dumps(config))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def draw(info: TensorInfo, generator: torch.Generator) -> Tensor:
    """Return random values with unit gain, so that hidden states keep their size."""
    device, shape = generator.device, info.shape
    if "norm" in info.name:
        return torch.ones(shape, dtype=info.dtype.torch, device=device)
    if len(shape) == 1:  # the correction bias of a router
        return 0.01 * torch.randn(shape, generator=generator, device=device)
    if info.name.endswith("_scale_inv"):
        # The last block of columns may be smaller, which changes the gain little.
        return torch.full(shape, (128 * shape[1]) ** -0.5 / CODE_STD, device=device)
    drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    if info.dtype is Dtype.FLOAT8_E4M3FN:
        return drawn.mul_(CODE_STD).clamp_(-448, 448).to(torch.float8_e4m3fn)
    return drawn.mul_(shape[1] ** -0.5)


def make_texts(args: argparse.Namespace, shape: Shape) -> dict[str, str]:
    made = {}
    for seed, (name, words) in enumerate(synthetic.domains(shape.vocabulary).items()):
        path = args.work / f"deepseek-{shape.vocabulary}-{name}-{args.tokens}.jsonl"
        synthetic.make_text(path, args.tokens // 2, args.row_tokens, words, seed)
        made[name] = str(path)
    return made


# --- jobs ---------------------------------------------------------------------------------------


def run_job(
    args: argparse.Namespace,
    name: str,
    model: Path,
    sources: dict[str, Path],
    data: dict[str, str],
) -> tuple[dict[str, Any] | None, int]:
    """Return the job's report, None if it failed, and the most host memory in use meanwhile."""
    out = args.out or args.work / "deepseek-out"
    shutil.rmtree(out, ignore_errors=True)
    settings: dict[str, Any] = dict(item.split("=", 1) for item in args.set)
    if name == "refit" and args.write:
        settings = {"requantize": "same", **settings}
    spec = {
        "merged": str(model),
        "sources": {name: str(folder) for name, folder in sources.items()},
        "data": data,
        "out": str(out),
        "settings": {**settings, "device": args.device},
        "write": args.write,
        "verbose": False,
        "memory": None,
    }
    with host_memory() as least:
        before = least[0]
        report = job.in_own_process(SCRIPTS[name], args.work, spec, args.seconds)
    shutil.rmtree(out, ignore_errors=True)
    return report, before - min(least)


@contextmanager
def host_memory() -> Iterator[list[int]]:
    """Sample the machine's available memory, which also counts pinned memory and tmpfs."""
    samples, ended = [_available()], threading.Event()

    def sample() -> None:
        while not ended.wait(0.2):
            samples.append(_available())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


# --- results ------------------------------------------------------------------------------------


def show(
    args: argparse.Namespace,
    name: str,
    shape: Shape,
    report: dict[str, Any],
    used: int,
    rates: dict[str, float],
) -> None:
    timings, estimate = report["timings"], Estimate.of(shape)
    on_paper = getattr(estimate, name)(args.tokens)
    read = report["bytes_read"] or {}
    floors = {"read": (read.get("files") or 0) / rates["read"]}
    floors |= {k: flops / rates[k] for k, flops in counted_flops(name, shape, args.tokens).items()}
    say(
        name,
        tokens=args.tokens,
        seconds=timings["solved"],  # from the run's start to the last layer
        imported=report["imported"],
        ended=report["ended"],
        by_part=timings["seconds"],
        beside=timings["beside"],
        told=next((note for _, note in report["notes"] if " reads " in note), None),
        layers_done=[[at, note] for at, note in report["notes"] if "→" in note],
        bytes_read=read,
        floors={k: round(v, 2) for k, v in floors.items()},
        offload=report["offload"],
        gpu_peak=timings["peak_gpu_memory"],
        gpu_estimate=report["memory_estimate"],
        host_peak_rss=report["peak_rss"],
        host_used=used,
        paper_seconds=on_paper,
        paper_error=on_paper / timings["solved"] - 1,
        notices=len(report["notices"]),
    )


def counted_flops(name: str, shape: Shape, tokens: int) -> dict[str, float]:
    """Return the least products: forward passes in bf16, sums and solutions in float64."""
    bf16 = double = 0.0
    for info in shape.tensors():
        if info.dtype is not Dtype.FLOAT8_E4M3FN:
            continue
        rows, columns = info.shape
        count = tokens * shape.top_k / shape.experts if ".experts." in info.name else tokens
        forward = 2 * count * rows * columns
        bf16 += forward
        if name == "refit":
            bf16 += 3 * forward  # the sources' pass, and outputs of both for the targets
            # Gate and up of an expert, q_a and kv_a of attention share their input.
            shared = 0.5 if columns == shape.hidden else 1.0
            gram, cross = count * columns * columns * shared, 2 * count * rows * columns
            factor = columns**3 / 3 * shared
            double += gram + cross + factor + 3 * 2 * columns * columns * rows  # solve, two errors
    return {"bf16": bf16, "float64": double} if name == "refit" else {"bf16": bf16}


if __name__ == "__main__":
    main()
