"""Merging out of core: moemerge against mergekit, or on a GPU against a CPU, in one run.

    python benchmarks/merge.py --work /tmp/bench --mergekit /path/to/venv/bin/mergekit-yaml
    python benchmarks/merge.py --work /tmp/bench --sizes 0.3 1.3 5    # growth with size, ours only
    python benchmarks/merge.py --work /tmp/bench --devices cpu cuda --methods linear ties della

Three OLMoE-shaped bf16 checkpoints (a base and two fine-tunes) are made in --work on first use.
Time is wall clock of the whole command; memory is the peak resident set of its process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from safetensors.torch import save_file

WIDTH = 1024
EXPERTS = 32
VOCABULARY = 8192
# Layers for each size in gigabytes; six layers are 646 M parameters.
LAYERS = {"0.3": 1, "1.3": 6, "5": 24}

CONFIGS = {
    "linear": """
merge_method: linear
models:
  - {model: BASE, parameters: {weight: 0.2}}
  - {model: MATH, parameters: {weight: 0.3}}
  - {model: CODE, parameters: {weight: 0.5}}
""",
    "ties": """
merge_method: ties
base_model: BASE
models:
  - {model: MATH, parameters: {weight: 0.4, density: 0.6}}
  - {model: CODE, parameters: {weight: 0.6, density: 0.6}}
""",
    "dare_ties": """
merge_method: dare_ties
base_model: BASE
models:
  - {model: MATH, parameters: {weight: 0.3, density: 0.4}}
  - {model: CODE, parameters: {weight: 0.7, density: 0.4}}
""",
    "della": """
merge_method: della
base_model: BASE
models:
  - {model: MATH, parameters: {weight: 0.4, density: 0.6}}
  - {model: CODE, parameters: {weight: 0.6, density: 0.6}}
""",
    "wudi": """
merge_method: wudi
base_model: BASE
models:
  - {model: MATH}
  - {model: CODE}
""",
}
OURS_ALONE = frozenset({"wudi"})  # methods that mergekit does not have


@dataclass(frozen=True)
class Measurement:
    tool: str
    method: str
    size: str
    seconds: float
    peak_bytes: int
    ok: bool


def shapes(layers: int) -> Iterator[tuple[int | None, str, tuple[int, ...]]]:
    """(layer, name, shape) of every tensor of the benchmark model."""
    square = (WIDTH, WIDTH)
    yield None, "model.embed_tokens.weight", (VOCABULARY, WIDTH)
    yield None, "model.norm.weight", (WIDTH,)
    yield None, "lm_head.weight", (VOCABULARY, WIDTH)
    for n in range(layers):
        p = f"model.layers.{n}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield n, f"{p}self_attn.{name}.weight", square
        for name in (
            "self_attn.q_norm",
            "self_attn.k_norm",
            "input_layernorm",
            "post_attention_layernorm",
        ):
            yield n, f"{p}{name}.weight", (WIDTH,)
        yield n, f"{p}mlp.gate.weight", (EXPERTS, WIDTH)
        for e in range(EXPERTS):
            for name in ("gate_proj", "up_proj", "down_proj"):
                yield n, f"{p}mlp.experts.{e}.{name}.weight", square


def make_checkpoint(folder: Path, layers: int, seed: int) -> None:
    """Seed 0 is the base; any other seed a fine-tune of it."""
    if (folder / "config.json").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    base_rng = torch.Generator().manual_seed(0)
    delta_rng = torch.Generator().manual_seed(seed)
    shards: dict[int | None, dict[str, torch.Tensor]] = {}
    for layer, name, shape in shapes(layers):
        value = torch.empty(shape).normal_(0, 0.02, generator=base_rng)
        if len(shape) == 1:
            value += 1
        if seed:
            value += torch.empty(shape).normal_(0, 0.002, generator=delta_rng)
        shards.setdefault(layer, {})[name] = value.bfloat16()
    weight_map = {}
    for number, tensors in enumerate(shards.values(), 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
    total = sum(2 * torch.Size(s).numel() for _, _, s in shapes(layers))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 4,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def measure(command: list[str], out: Path) -> tuple[float, int, bool]:
    """Wall seconds and peak resident bytes of one command that writes `out`."""
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    errors = process.stderr.read()
    _pid, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    ok = os.waitstatus_to_exitcode(status) == 0
    if not ok:
        print(errors.decode()[-2000:], file=sys.stderr)
    return seconds, usage.ru_maxrss * 1024, ok


def compare(args: argparse.Namespace) -> list[Measurement]:
    results = []
    for size in args.sizes:
        folder = args.work / size
        for seed, name in enumerate(("base", "math", "code")):
            # Elsewhere: a child's peak memory is counted from that of the process that starts it.
            maker = get_context("spawn").Process(
                target=make_checkpoint, args=(folder / name, LAYERS[size], seed)
            )
            maker.start()
            maker.join()
            if maker.exitcode:
                raise SystemExit(f"{folder / name} could not be made")
        for method in args.methods:
            config = folder / f"{method}.yml"
            text = CONFIGS[method]
            for name in ("base", "math", "code"):
                text = text.replace(name.upper(), str(folder / name))
            config.write_text(text)
            out = args.work / "out"
            ours = [*args.moemerge, "merge", str(config), str(out), "-q", "--device"]
            named = len(args.devices) > 1
            commands = {
                f"moemerge {device}" if named else "moemerge": [*ours, device]
                for device in args.devices
            }
            if args.mergekit and method not in OURS_ALONE:
                commands["mergekit"] = [args.mergekit, str(config), str(out), "--allow-crimes"]
            for _ in range(args.repeat):
                for tool, command in commands.items():
                    result = Measurement(tool, method, size, *measure(command, out))
                    results.append(result)
                    print(
                        f"{size:>4} GB  {method:<10} {tool:<13} {result.seconds:7.1f} s "
                        f"{result.peak_bytes / 1e9:6.2f} GB  {'' if result.ok else 'FAILED'}",
                        flush=True,
                    )
            shutil.rmtree(out, ignore_errors=True)
    return results


def show(results: list[Measurement]) -> None:
    """One row for each method and size: medians, and how many times slower than the fastest."""
    tools = list(dict.fromkeys(r.tool for r in results))
    print("\n" + "size  method    " + "".join(f"{tool:>22}" for tool in tools))
    for size, method in dict.fromkeys((r.size, r.method) for r in results):
        seconds = {
            tool: statistics.median(found)
            for tool in tools
            if (found := [
                r.seconds for r in results if (r.size, r.method, r.tool) == (size, method, tool)
            ])
        }  # fmt: skip
        best = min(seconds.values())
        cells = (
            f"{seconds[tool]:14.1f} s {seconds[tool] / best:4.1f}×" if tool in seconds else " " * 22
            for tool in tools
        )
        print(f"{size:<6}{method:<10}" + "".join(f"{cell:>22}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--moemerge", nargs="+", default=[sys.executable, "-m", "moemerge"])
    parser.add_argument("--devices", nargs="+", default=["cpu"], help="for moemerge")
    parser.add_argument("--mergekit")
    parser.add_argument("--sizes", nargs="+", default=["1.3"], choices=list(LAYERS))
    parser.add_argument("--methods", nargs="+", default=["linear", "ties", "dare_ties"])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = compare(args)
    show(results)
    if args.json:
        document = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "results": [asdict(r) for r in results],
        }
        args.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
