"""A whole calibration at a real model's shape: seconds, and peak memory.

    python benchmarks/calibrate.py --work /tmp/bench --layers 6 --tokens 4000 --device cpu
    python benchmarks/calibrate.py --work /tmp/bench --layers 16 --tokens 1000000 --device cuda

The merged checkpoint has random bf16 weights of OLMoE-1B-7B's shape and is made in --work on first
use, a tensor at a time. The two sources differ from it in their routers; nothing else of them is
read, so the rest of their files is holes. The calibration is a process of its own, whose peak is
taken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from moemerge.checkpoint import CheckpointWriter, TensorInfo
from moemerge.testbed.tiny import character_tokenizer

WIDTH, EXPERT_WIDTH, EXPERTS, TOP_K, VOCABULARY = 2048, 1024, 64, 8, 50304
ROUTER_NOISE = 0.3
ROW_TOKENS = 256


def tensors(layers: int) -> Iterator[TensorInfo]:
    def info(name: str, *shape: int) -> TensorInfo:
        return TensorInfo.of(name, torch.bfloat16, shape)

    yield info("model.embed_tokens.weight", VOCABULARY, WIDTH)
    for n in range(layers):
        p = f"model.layers.{n}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield info(f"{p}self_attn.{name}.weight", WIDTH, WIDTH)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            yield info(f"{p}{name}.weight", WIDTH)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield info(f"{p}{name}.weight", WIDTH)
        yield info(f"{p}mlp.gate.weight", EXPERTS, WIDTH)
        for e in range(EXPERTS):
            for name in ("gate_proj", "up_proj"):
                yield info(f"{p}mlp.experts.{e}.{name}.weight", EXPERT_WIDTH, WIDTH)
            yield info(f"{p}mlp.experts.{e}.down_proj.weight", WIDTH, EXPERT_WIDTH)
    yield info("model.norm.weight", WIDTH)
    yield info("lm_head.weight", VOCABULARY, WIDTH)


def config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "hidden_size": WIDTH,
        "intermediate_size": EXPERT_WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def value(info: TensorInfo, generator: torch.Generator) -> torch.Tensor:
    if len(info.shape) == 1:
        return torch.ones(info.shape, dtype=info.dtype)
    spread = info.shape[-1] ** -0.5
    return torch.empty(info.shape).normal_(0.0, spread, generator=generator).to(info.dtype)


def make_model(folder: Path, layers: int) -> None:
    """The merged model, tensor by tensor."""
    if folder.exists():
        return
    infos = list(tensors(layers))
    generator = torch.Generator().manual_seed(0)
    with CheckpointWriter(folder, infos, shard_bytes=2 * 10**9, overwrite=False) as writer:
        for info in infos:
            writer.write(info.name, value(info, generator))
        writer.add_bytes("config.json", json.dumps(config(layers)).encode())
        writer.commit()
    character_tokenizer().save_pretrained(folder)


def make_source(folder: Path, merged: Path, seed: int) -> None:
    """A model whose routers are the merged ones plus noise; all else is never read."""
    from moemerge.checkpoint import Checkpoint

    if folder.exists():
        return
    folder.mkdir(parents=True)
    source = Checkpoint.open(merged)
    generator = torch.Generator().manual_seed(seed)
    for file in merged.iterdir():
        target = folder / file.name
        if file.suffix != ".safetensors":
            shutil.copyfile(file, target)
            continue
        with open(file, "rb") as stored, open(target, "wb") as sparse:
            length = int.from_bytes(stored.read(8), "little")
            stored.seek(0)
            header = stored.read(8 + length)
            sparse.write(header)
            sparse.truncate(file.stat().st_size)
            entries = json.loads(header[8:])
            for name, entry in entries.items():
                if name.endswith("mlp.gate.weight"):
                    router = source.read(name).float()
                    router += (
                        ROUTER_NOISE * router.std() * torch.randn(router.shape, generator=generator)
                    )
                    sparse.seek(8 + length + entry["data_offsets"][0])
                    sparse.write(router.bfloat16().view(torch.uint8).numpy().tobytes())


def make_text(path: Path, tokens: int, alphabet: str, seed: int) -> None:
    chance = random.Random(seed)
    rows = max(1, tokens // ROW_TOKENS)
    lines = ("".join(chance.choices(alphabet, k=ROW_TOKENS)) for _ in range(rows))
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--moemerge", nargs="+", default=[sys.executable, "-m", "moemerge"])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=4000, help="in both domains together")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--more", nargs=argparse.REMAINDER, default=[], help="flags of calibrate")
    args = parser.parse_args()
    merged = args.work / f"olmoe-{args.layers}"
    make_model(merged, args.layers)
    command = [*args.moemerge, "calibrate", str(merged), str(args.work / "calibrated")]
    for seed, (name, alphabet) in enumerate((("math", "0123456789+-*/="), ("code", "abcdef()[]:"))):
        source = args.work / f"olmoe-{args.layers}-{name}"
        make_source(source, merged, seed + 1)
        text = args.work / f"{name}-{args.tokens}.jsonl"
        make_text(text, args.tokens // 2, alphabet, seed)
        command += ["--source", f"{name}={source}", "--data", f"{name}={text}"]
    report = args.work / "calibrate.json"
    command += ["--device", args.device, "--overwrite", "-q", "--json", str(report), *args.more]
    start = time.perf_counter()
    process = subprocess.Popen(command)
    _pid, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if os.waitstatus_to_exitcode(status) != 0:
        sys.exit("the calibration failed")
    size = sum(f.stat().st_size for f in merged.glob("*.safetensors"))
    print(
        f"{size / 1e9:.1f} GB, {args.layers} layers, {args.tokens} tokens on {args.device}: "
        f"{seconds:.1f} s, peak {usage.ru_maxrss * 1024 / 1e9:.2f} GB of host memory"
    )


if __name__ == "__main__":
    main()
