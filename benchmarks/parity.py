"""The same YAML through mergekit and through moemerge: how far apart are the weights?

    python benchmarks/parity.py --mergekit /path/to/venv/bin/mergekit-yaml

Tiny float32 models are made on the spot: a dense Llama for every deterministic method that mergekit
has, with scalars, gradients and filters, and an OLMoE and a Qwen3-MoE for the elementwise methods.
mergekit writes fused experts and we the layout of the input, so MoE results are compared after
loading both in transformers. Exits 1 when a tensor differs by more than 1e-5 (relative, Frobenius).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    logging,
)

import moemerge
from moemerge.errors import MoeMergeError

TOLERANCE = 1e-5
LAYERS = 4
# Runs inside mergekit's own environment, through the entry point that its commands use.
DRIVER = """
import contextlib, io, json, sys, yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
problems = []
for config, out in json.load(sys.stdin):
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            settings = MergeConfiguration.model_validate(yaml.safe_load(open(config)))
            run_merge(settings, out, options=MergeOptions(copy_tokenizer=False, quiet=True))
        problems.append("")
    except BaseException as error:
        problems.append(f"mergekit failed: {type(error).__name__}: {error}"[:300])
print()
print(json.dumps(problems))
"""
KINDS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
GRADIENT = [0.2, 0.9, 0.5]
FILTERED = [
    {"filter": "self_attn", "value": 0.7},
    {"filter": "mlp", "value": [0.3, 0.8]},
    {"value": 0.5},
]


@dataclass(frozen=True)
class Case:
    """One config, but for the models' folders."""

    name: str
    method: str
    per_model: tuple[dict[str, Any], ...] = ()
    options: dict[str, Any] | None = None
    base: bool = True
    models: int = 2


def dense_cases() -> Iterator[Case]:
    for label, w in (("scalar", 0.4), ("gradient", GRADIENT), ("filter", FILTERED)):
        pair = ({"weight": w}, {"weight": 0.6})
        sparse = tuple({**p, "density": 0.5} for p in pair)
        for normalize in (True, False):
            options = {"normalize": normalize}
            suffix = f"{label}, normalize {normalize}".lower()
            yield Case(f"linear ({suffix})", "linear", pair, options, base=False)
            yield Case(f"task_arithmetic ({suffix})", "task_arithmetic", pair, options)
            yield Case(f"ties ({suffix})", "ties", sparse, {**options, "lambda": 0.8})
            crumbs = tuple({**p, "gamma": 0.05} for p in sparse)
            yield Case(f"breadcrumbs ({suffix})", "breadcrumbs", crumbs, options)
            yield Case(f"breadcrumbs_ties ({suffix})", "breadcrumbs_ties", crumbs, options)
        yield Case(f"nuslerp ({label})", "nuslerp", pair, base=False)
        yield Case(f"nuslerp, rows ({label})", "nuslerp", pair, {"nuslerp_flatten": False})
        yield Case(f"multislerp ({label})", "multislerp", pair, base=False)
        yield Case(f"multislerp with base ({label})", "multislerp", pair)
        yield Case(f"slerp ({label})", "slerp", ({},), {"t": w}, models=1)
        yield Case(f"nearswap ({label})", "nearswap", ({},), {"t": 0.01}, models=1)
    yield Case("ties, density gradient", "ties", ({"weight": 1.0, "density": [0.9, 0.3]},) * 2)
    yield Case("sce", "sce", ({}, {}), {"select_topk": 0.4})
    yield Case("sce, all", "sce", ({}, {}), {"select_topk": 1.0})
    yield Case("model_stock", "model_stock", ({}, {}, {}), models=3)
    yield Case("model_stock, filter-wise", "model_stock", ({}, {}), {"filter_wise": True})
    yield Case("karcher", "karcher", ({}, {}, {}), {"max_iter": 20}, base=False, models=3)
    yield Case("ram", "ram", ({}, {}, {}), models=3)
    yield Case("ram, coarse", "ram", ({}, {}), {"epsilon": 0.01})
    yield Case("ramplus_tl", "ramplus_tl", ({}, {}, {}), {"epsilon": 0.01}, models=3)
    raised = {"r": 0.5, "alpha": 1.0, "epsilon": 0.02}
    yield Case("ramplus_tl, r 0.5", "ramplus_tl", ({}, {}), raised)
    yield Case("passthrough, scaled", "passthrough", ({"scale": 0.5},), base=False, models=1)


def moe_cases() -> Iterator[Case]:
    for label, w in (("scalar", 0.4), ("gradient", GRADIENT)):
        pair = ({"weight": w}, {"weight": 0.6})
        yield Case(f"linear ({label})", "linear", pair, base=False)
        yield Case(f"task_arithmetic ({label})", "task_arithmetic", pair)
        # Density 1: only the sign election is left of TIES, which acts on each element.
        yield Case(f"ties, density 1 ({label})", "ties", pair)
        yield Case(f"nearswap ({label})", "nearswap", ({},), {"t": 0.01}, models=1)
    yield Case("passthrough", "passthrough", ({},), base=False, models=1)


def build(kind: str, folder: Path, seed: int) -> Path:
    size: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    make_config, make_model = KINDS[kind]
    if kind != "llama":
        size |= {"num_experts": 8, "num_experts_per_tok": 2}
    if kind == "qwen3_moe":
        size |= {"moe_intermediate_size": 24, "head_dim": 8}
    model = make_model(make_config(**size))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def write_config(case: Case, folders: list[Path], path: Path) -> Path:
    base, *tuned = folders
    config: dict[str, Any] = {
        "merge_method": case.method,
        "models": [
            {"model": str(m), "parameters": p}
            for m, p in zip(tuned[: case.models], case.per_model, strict=True)
        ],
        "parameters": case.options or {},
        "dtype": "float32",
    }
    if case.base:
        config["base_model"] = str(base)
    path.write_text(json.dumps(config))  # JSON is YAML
    return path


def state(folder: Path) -> dict[str, torch.Tensor]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: value.clone() for name, value in model.state_dict().items()}


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative difference of a tensor, and its name."""
    if a.keys() != b.keys():
        return float("inf"), f"other tensors: {sorted(a.keys() ^ b.keys())[:3]}"
    worst = (0.0, "")
    for name, value in a.items():
        gap = float((value - b[name]).norm() / value.norm().clamp_min(1e-30))
        worst = max(worst, (gap, name))
    return worst


def run_theirs(python: str, jobs: list[tuple[Path, Path]]) -> list[str]:
    """All configs through mergekit in one process of its own; "" or what went wrong, for each."""
    listed = json.dumps([[str(config), str(out)] for config, out in jobs])
    result = subprocess.run(
        [python, "-c", DRIVER], input=listed, capture_output=True, text=True, check=True
    )
    problems: list[str] = json.loads(result.stdout.splitlines()[-1])
    return problems


def run_ours(config: Path, out: Path) -> str:
    try:
        moemerge.merge(config, out)
    except MoeMergeError as error:
        return str(error)
    return ""


def cases() -> Iterator[tuple[str, Case]]:
    yield from (("llama", case) for case in dense_cases())
    for kind in ("olmoe", "qwen3_moe"):
        yield from ((kind, case) for case in moe_cases())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mergekit", required=True, type=Path)
    parser.add_argument("--only", help="run cases whose name holds this text")
    args = parser.parse_args()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    chosen = [(kind, case) for kind, case in cases() if not args.only or args.only in case.name]
    failures = 0
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        for kind in KINDS:
            for seed in range(4):
                build(kind, work / f"{kind}-{seed}", seed)
        jobs = []
        for number, (kind, case) in enumerate(chosen):
            folders = [work / f"{kind}-{seed}" for seed in range(4)]
            config = write_config(case, folders, work / f"{number}.yml")
            jobs.append((config, work / f"theirs-{number}"))
        theirs = run_theirs(str(args.mergekit.with_name("python")), jobs)
        for number, (kind, case) in enumerate(chosen):
            config, out = jobs[number]
            ours = work / f"ours-{number}"
            problem = theirs[number] or run_ours(config, ours)
            gap, where = (float("inf"), problem) if problem else difference(state(out), state(ours))
            failures += gap > TOLERANCE
            mark = "" if gap <= TOLERANCE else f"  DIFFERS: {where}"
            print(f"{kind:<10} {case.name:<44} {gap:9.1e}{mark}", flush=True)
    print(f"{len(chosen) - failures} of {len(chosen)} configs agree to {TOLERANCE:g}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
