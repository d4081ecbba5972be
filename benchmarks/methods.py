"""Seconds and peak memory of every merge method and wrapper, one command each.

    python benchmarks/methods.py --work /tmp/methods --time passes          # three 1.3 GB models
    python benchmarks/methods.py --work /tmp/methods --time decompositions  # minutes a method
    python benchmarks/methods.py --work /tmp/methods --time steps --layers 1 --share 0.1
    python benchmarks/methods.py --work /tmp/try --layers 1 --methods ties tsv       # a try
    python benchmarks/methods.py --work /dev/shm/methods --shape olmoe-1b-7b --device cuda \\
        --methods tsv iso_c iso_cts wudi                                    # a real merge
    python benchmarks/methods.py --work /dev/shm/methods --shape olmoe-1b-7b --layers 2 \\
        --device cuda                                                       # a share of its layers

A base and two fine-tunes with random weights are written first (all tensors of a fine-tune differ
from the base's), and statistics with made-up values for the methods that need them. `--shape`
takes a real model's shape (`synthetic.SHAPES`); without it the model is that of `merge.py`.
Seconds are of the whole command, start-up included; memory is the peak that was resident. On
busy cores seconds are worthless (processor seconds are not): run it alone.

Every result is a line of WORK/results.jsonl as soon as it is there; a repeated run measures only
what it lacks; `--again` measures anew. `--time` takes methods by what `moemerge ls methods` says
they take longest for; `--share` lets methods that take steps take a share of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import merge as pairs
import synthetic
from moemerge.api import list_methods, list_wrappers
from moemerge.config.parameters import StatisticsKind
from moemerge.families.opened import open_model
from moemerge.families.roles import Role
from moemerge.statistics import Provenance, StatisticsWriter
from moemerge.statistics.file import pack_symmetric, packed_size, stored_shape
from moemerge.statistics.provenance import (
    family_name,
    model_fingerprint,
    tokenizer_fingerprint,
)

NAMES = ("base", "math", "code")
NOISE = 0.1  # of a tensor's own spread
NOT_LINEAR = frozenset({Role.NORM, Role.EMBEDDING, Role.HEAD})
TOKENS = 1000
VARIANTS = {
    "wudi": {
        "exact": {"solver": "exact"},
        "spectral": {"solver": "spectral"},
        "adaptive": {"solver": "adaptive"},
    }
}
AROUND = {"knots": "ties", "svc": "task_arithmetic", "aim": "task_arithmetic"}


@dataclass(frozen=True)
class Result:
    method: str
    bytes: int  # of one model
    device: str
    share: float  # of the steps, of methods that take steps
    seconds: float
    processor_seconds: float
    peak_bytes: int
    ok: bool

    @property
    def key(self) -> tuple[str, int, str, float]:
        return self.method, self.bytes, self.device, self.share

    def row(self) -> str:
        failed = "" if self.ok else " FAILED"
        numbers = f"{self.seconds:.1f} | {self.processor_seconds:.1f}"
        return f"| `{self.method}` | {numbers} | {self.peak_bytes / 1e9:.2f} GB{failed} |"


@dataclass(frozen=True)
class Case:
    """One merge that is measured."""

    name: str
    time: str  # what it takes longest for
    config: Callable[[], dict[str, Any]]  # makes the statistics that it names


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


def make_statistics(folder: Path, out: Path, kind: StatisticsKind) -> None:
    """Statistics of the right shapes with made-up values; one Gram for all inputs of a width."""
    if out.exists():
        return
    model = open_model("model", str(folder))
    units = model.architecture.units_by_key
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


def _values(kind: StatisticsKind, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    if kind != "gram":
        return torch.rand(stored_shape(kind, shape), generator=generator)
    width = shape[-1]
    x = torch.randn(TOKENS, width, generator=generator)
    gram = pack_symmetric(x.T @ x / TOKENS)
    assert gram.numel() == packed_size(width)
    return gram


# --- what is measured -----------------------------------------------------------------------------


def cases(work: Path, share: float) -> Iterator[Case]:
    """Every method, other solvers of one, and every wrapper around one."""
    methods = {row["method"]: row for row in list_methods()}
    for name, row in methods.items():
        if name == "passthrough":
            continue
        few = steps(row, share) if row["time"] == "steps" else {}
        yield Case(name, row["time"], partial(config, work, row, few))
        for words, settings in VARIANTS.get(name, {}).items():
            yield Case(f"{name}, {words}", "decompositions", partial(config, work, row, settings))
    for row in list_wrappers():
        name, inner = row["wrapper"], methods[AROUND[row["wrapper"]]]
        time = "passes" if row["statistics"] else "decompositions"
        yield Case(f"{AROUND[name]} in {name}", time, partial(wrapped_config, work, inner, row))


def steps(row: dict[str, Any], share: float) -> dict[str, Any]:
    """A share of a method's usual steps."""
    usual = next(p["default"] for p in row["options"] if p["name"] == "steps")
    return {} if share == 1 else {"steps": max(1, round(share * usual))}


def wrapped_config(work: Path, inner: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    wrapped = config(work, inner, {}) | {"wrap": [row["wrapper"]]}
    if row["statistics"]:
        wrapped["statistics"] = {"base": statistics(work, "base", row["statistics"])}
    return wrapped


def config(work: Path, row: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
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
    given = dict(options)
    if any(p["name"] == "t" for p in row["options"]):
        given["t"] = 0.5
    if given:
        built["parameters"] = given
    if row["statistics"]:
        built["statistics"] = {n: statistics(work, n, row["statistics"]) for n in names}
    return built


def statistics(work: Path, name: str, kind: StatisticsKind) -> str:
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


def measure(case: Case, work: Path, device: str) -> tuple[float, float, int, bool]:
    file, out = work / "config.json", work / "out"
    file.write_text(json.dumps(case.config()))
    command = [sys.executable, "-m", "moemerge", "merge", str(file), str(out), "-q"]
    before = os.times()
    seconds, peak, ok = pairs.measure([*command, "--device", device], out)
    after = os.times()
    spent = after.children_user + after.children_system
    shutil.rmtree(out, ignore_errors=True)
    return seconds, spent - before.children_user - before.children_system, peak, ok


def recorded(file: Path) -> dict[tuple[str, int, str, float], Result]:
    """What earlier runs measured; the last word on each case counts."""
    if not file.exists():
        return {}
    results = [Result(**json.loads(line)) for line in file.read_text().splitlines()]
    return {result.key: result for result in results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for models and results")
    parser.add_argument("--shape", choices=list(synthetic.SHAPES), help="of a real model")
    parser.add_argument("--layers", type=int, help="so many layers instead of all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", nargs="+", default=[], help="and wrappers (default: all)")
    parser.add_argument(
        "--time", nargs="+", default=[], choices=["passes", "decompositions", "steps"]
    )
    parser.add_argument("--share", type=float, default=1.0, help="of the steps that are usual")
    parser.add_argument("--again", action="store_true", help="measure what is recorded, too")
    args = parser.parse_args()
    sized = args.work / f"{args.shape or 'olmoe'}-{args.layers or 'all'}"
    sized.mkdir(parents=True, exist_ok=True)
    _elsewhere(make_models, sized, args.shape, args.layers, args.device)
    size = sum(f.stat().st_size for f in (sized / "base").glob("*.safetensors"))
    print(f"three models of {size / 1e9:.2f} GB, {args.device}\n")
    print("| method | seconds | processor seconds | peak memory |\n|---|---:|---:|---:|")
    record = args.work / "results.jsonl"
    known, failed = {} if args.again else recorded(record), False
    for case in cases(sized, args.share):
        if args.methods and not {case.name, case.name.split(" in ")[-1]} & set(args.methods):
            continue
        if args.time and case.time not in args.time:
            continue
        share = args.share if case.time == "steps" else 1.0
        result = known.get((case.name, size, args.device, share))
        if result is None or not result.ok:
            measured = measure(case, sized, args.device)
            result = Result(case.name, size, args.device, share, *measured)
            with record.open("a") as lines:
                lines.write(json.dumps(asdict(result)) + "\n")
        print(result.row(), flush=True)
        failed |= not result.ok
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
