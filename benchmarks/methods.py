"""Seconds and peak memory of every merge method and wrapper, one command each.

    python benchmarks/methods.py --work /tmp/methods                       # three 1.3 GB models
    python benchmarks/methods.py --work /tmp/methods --layers 1 --methods ties tsv   # a try
    python benchmarks/methods.py --work /dev/shm/methods --shape olmoe-1b-7b --device cuda \\
        --methods tsv iso_c iso_cts wudi                                    # a real merge
    python benchmarks/methods.py --work /dev/shm/methods --shape olmoe-1b-7b --layers 2 \\
        --device cuda                                                       # a share of its layers

A base and two fine-tunes with random weights are written first (all tensors of a fine-tune differ
from the base's), and statistics with made-up values for the methods that need them. `--shape`
takes a real model's shape (`synthetic.SHAPES`); without it the model is that of `merge.py`.
Seconds are of the whole command, start-up included; memory is the peak that was resident. On two
busy cores timings are worthless: run it alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import merge as pairs
import synthetic
from moemerge.api import list_methods, list_wrappers
from moemerge.architectures.opened import open_model
from moemerge.architectures.roles import Role
from moemerge.statistics import Provenance, StatisticsWriter
from moemerge.statistics.file import Kind, pack, packed_size, stored_shape
from moemerge.statistics.provenance import (
    all_units,
    family_name,
    model_fingerprint,
    tokenizer_fingerprint,
)

NAMES = ("base", "math", "code")
NOISE = 0.1  # of a tensor's own spread
NOT_LINEAR = frozenset({Role.NORM, Role.EMBEDDING, Role.HEAD})
TOKENS = 1000
AROUND = {"knots": "ties", "svc": "task_arithmetic", "aim": "task_arithmetic"}


@dataclass(frozen=True)
class Result:
    method: str
    seconds: float
    peak_bytes: int
    ok: bool


# --- what is merged -------------------------------------------------------------------------------


def make_models(work: Path, shape: str | None, layers: int | None, device: str) -> None:
    if shape is None:
        count = layers or pairs.LAYERS["1.3"]
        for seed, name in enumerate(NAMES):
            pairs.make_checkpoint(work / name, count, seed)
        return
    chosen = synthetic.SHAPES[shape]
    if layers is not None:
        chosen = replace(chosen, layers=layers)
    where = torch.device("cuda" if device.startswith("cuda") else "cpu")
    synthetic.make_model(work / "base", chosen, where)
    for seed, name in enumerate(NAMES[1:], 1):
        make_finetune(work / name, work / "base", seed, where)


def make_finetune(folder: Path, base: Path, seed: int, device: torch.device) -> None:
    """The base with noise in every tensor."""
    if (folder / "config.json").exists():
        return
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    generator = torch.Generator(device).manual_seed(seed)
    for shard in sorted(base.glob("*.safetensors")):
        moved = {}
        with safe_open(shard, framework="pt", device=str(device)) as opened:
            for name in opened.keys():  # noqa: SIM118  (it is no mapping)
                value = opened.get_tensor(name).float()
                noise = torch.randn(value.shape, generator=generator, device=device)
                spread = value.square().mean().sqrt()
                moved[name] = (value + NOISE * spread * noise).bfloat16().cpu()
        save_file(moved, folder / shard.name, metadata={"format": "pt"})
    shutil.copy(base / "config.json", folder / "config.json")


def make_statistics(folder: Path, out: Path, kind: Kind) -> None:
    """Statistics of the right shapes with made-up values; one Gram for all inputs of a width."""
    if out.exists():
        return
    model = open_model("model", str(folder))
    units = all_units(model.checkpoint, model.architecture)
    provenance = Provenance(
        model=model.label,
        family=family_name(model.architecture),
        model_fingerprint=model_fingerprint(model.checkpoint, model.architecture),
        tokenizer_fingerprint=tokenizer_fingerprint(model.checkpoint.tokenizer_folder),
        data_fingerprint="made up",
        tokens=TOKENS,
        sequences=10,
        seed=0,
        version="benchmark",
        dtype="float32",
        device="cpu",
    )
    made: dict[tuple[int, ...], torch.Tensor] = {}
    with StatisticsWriter(out, kind=kind, provenance=provenance, keys=units) as writer:
        for key, unit in units.items():
            if len(unit.shape) != 2 or unit.role in NOT_LINEAR:
                continue
            stored = stored_shape(kind, unit.shape)
            if stored not in made:
                made[stored] = _values(kind, unit.shape)
            writer.add(key, stored, made[stored], units={key: unit.shape}, tokens=TOKENS)
        writer.commit(sequences=10)


def _values(kind: Kind, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    if kind != "gram":
        return torch.rand(stored_shape(kind, shape), generator=generator)
    width = shape[-1]
    x = torch.randn(TOKENS, width, generator=generator)
    gram = pack(x.T @ x / TOKENS)
    assert gram.numel() == packed_size(width)
    return gram


# --- what is measured -----------------------------------------------------------------------------


def configs(work: Path, chosen: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A config for every method, and for every wrapper around one."""
    methods = {row["method"]: row for row in list_methods()}
    for name, row in methods.items():
        if name != "passthrough" and (not chosen or name in chosen):
            yield name, config(work, row)
    for row in list_wrappers():
        name = row["wrapper"]
        if not chosen or name in chosen:
            wrapped = config(work, methods[AROUND[name]]) | {"wrap": [name]}
            if row["statistics"]:
                wrapped["statistics"] = {"base": statistics(work, "base", row["statistics"])}
            yield f"{AROUND[name]} in {name}", wrapped


def config(work: Path, row: dict[str, Any]) -> dict[str, Any]:
    single = row["method"] in ("slerp", "nearswap", "arcee_fusion")
    names = NAMES[1:2] if single else NAMES[1:]
    per_model = {p["name"] for p in row["per_model"]}
    wanted = {"weight": 0.5, "density": 0.5}
    parameters = {key: value for key, value in wanted.items() if key in per_model}
    built: dict[str, Any] = {
        "merge_method": row["method"],
        "models": [{"model": str(work / n), "name": n, "parameters": parameters} for n in names],
    }
    if row["base_model"] == "required":
        built["base_model"] = str(work / "base")
    if any(p["name"] == "t" for p in row["options"]):
        built["parameters"] = {"t": 0.5}
    if row["statistics"]:
        built["statistics"] = {n: statistics(work, n, row["statistics"]) for n in names}
    return built


def statistics(work: Path, name: str, kind: Kind) -> str:
    """The file, made in a process of its own: a child's peak counts from its parent's."""
    out = work / f"{name}.{kind}.stats"
    _elsewhere(make_statistics, work / name, out, kind)
    return str(out)


def _elsewhere(function: Any, *args: Any) -> None:
    process = get_context("spawn").Process(target=function, args=args)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{function.__name__}{args} failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for models and results")
    parser.add_argument("--shape", choices=list(synthetic.SHAPES), help="of a real model")
    parser.add_argument("--layers", type=int, help="so many layers instead of all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", nargs="+", default=[], help="and wrappers (default: all)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    _elsewhere(make_models, args.work, args.shape, args.layers, args.device)
    out, results = args.work / "out", []
    size = sum(f.stat().st_size for f in (args.work / "base").glob("*.safetensors"))
    print(f"three models of {size / 1e9:.2f} GB, {args.device}\n")
    print("| method | seconds | peak memory |\n|---|---:|---:|")
    for name, settings in configs(args.work, args.methods):
        file = args.work / "config.json"
        file.write_text(json.dumps(settings))
        command = [sys.executable, "-m", "moemerge", "merge", str(file), str(out), "-q"]
        seconds, peak, ok = pairs.measure([*command, "--device", args.device], out)
        results.append(Result(name, seconds, peak, ok))
        failed = "" if ok else " FAILED"
        print(f"| `{name}` | {seconds:.1f} | {peak / 1e9:.2f} GB{failed} |", flush=True)
        shutil.rmtree(out, ignore_errors=True)
    if args.json:
        args.json.write_text(json.dumps([vars(result) for result in results], indent=1))
    if not all(result.ok for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
