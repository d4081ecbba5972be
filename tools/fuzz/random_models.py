"""Refit and calibrate random tiny models, and check the results.

    PYTHONPATH=tests python -m tools.fuzz.random_models --count 100 --seed 1 [--device cuda]

Models are of several families and dtypes: small or large weights, confident routers, experts of
zeros, constant text, few rows. `refit` and `calibrate --objective exact` run with default settings.
A case fails if a job ends with an error, if a weight is not finite, or if the divergence from the
sources on unseen rows rises without a warning. Refused text and rises with a warning are counted
separately.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

import moemerge
import zoo
from repairs.calibration.cases import WORDS, average

FAMILIES = ("olmoe", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss", "ernie4_5_moe")
NAMES = ("math", "code")
UNSEEN_ROWS = 16
# The divergence of the merge is met to within this share.
TOLERANCE = 0.02


@dataclass(frozen=True)
class Kind:
    """What one random model and its text are like."""

    family: str
    dtype: str
    gain: float  # of all matrices, relative to unit gain
    router_gain: float
    zero_experts: bool
    moved: float  # how far the sources are from each other
    text: str
    rows: int

    @classmethod
    def draw(cls, rng: random.Random) -> Kind:
        return cls(
            family=rng.choice([name for name in FAMILIES if zoo.installed(name)]),
            dtype=rng.choice(("float32", "bfloat16")),
            gain=rng.choice((0.02, 0.3, 1.0)),
            router_gain=rng.choice((0.1, 1.0, 30.0)),
            zero_experts=rng.random() < 0.3,
            moved=rng.choice((0.0, 0.01, 0.1, 0.5)),
            text=rng.choice(("words", "words", "few words", "constant")),
            rows=rng.choice((2, 12, 40, 120)),
        )


def write_rows(path: Path, kind: Kind, name: str, rng: random.Random, rows: int) -> Path:
    half = WORDS[:40] if name == NAMES[0] else WORDS[20:]
    words = {"words": half, "few words": half[:3], "constant": half[:1]}[kind.text]
    lengths = [8 if kind.text == "constant" else rng.randint(2, 24) for _ in range(rows)]
    lines = [json.dumps({"text": " ".join(rng.choices(words, k=n))}) for n in lengths]
    path.write_text("\n".join(lines) + "\n")
    return path


def make_base(folder: Path, kind: Kind, seed: int) -> Path:
    zoo.build(kind.family, folder, seed=seed)
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = load_file(shard)
        for name, value in tensors.items():
            if value.dim() < 2 or not value.is_floating_point():
                continue
            is_router = value.shape[0] == zoo.EXPERTS and value.dim() == 2
            value *= kind.router_gain if is_router else kind.gain
            if kind.zero_experts and (".experts.0." in name or ".experts.1." in name):
                value.zero_()
            tensors[name] = value.to(getattr(torch, kind.dtype))
        save_file(tensors, shard, metadata={"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": kind.dtype}))
    return folder


@torch.no_grad()
def divergence(model: Path, sources: dict[str, Path], rows: dict[str, Path]) -> float:
    """Return the mean KL from each source's next-token distribution on its rows."""

    def log_probabilities(folder: Path, ids: Sequence[torch.Tensor]) -> torch.Tensor:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        parts = [loaded.eval()(input_ids=row[None]).logits[0].double() for row in ids]
        return torch.cat(parts).log_softmax(-1)

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    total = 0.0
    for name, path in rows.items():
        texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
        ids = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
        target, got = (log_probabilities(folder, ids) for folder in (sources[name], model))
        total += float((target.exp() * (target - got)).sum(-1).mean())
    return total / len(rows)


def run_case(seed: int, folder: Path, device: str) -> dict[str, list[str]]:
    """Return the faults of each job."""
    rng = random.Random(seed)
    kind = Kind.draw(rng)
    base = make_base(folder / "base", kind, seed)
    sources = {
        name: zoo.perturb(base, folder / name, seed=seed + at, scale=kind.moved)
        for at, name in enumerate(NAMES)
    }
    merged = average(list(sources.values()), folder / "merged")
    zoo.tiny_tokenizer(merged)
    data, unseen = (
        {n: write_rows(folder / f"{n}-{what}.jsonl", kind, n, rng, count) for n in NAMES}
        for what, count in (("rows", kind.rows), ("unseen", UNSEEN_ROWS))
    )
    given: dict[str, Any] = {"sources": sources, "data": data, "device": device}
    before = divergence(merged, sources, unseen)
    found: dict[str, list[str]] = {}
    for job, options in (("refit", {}), ("calibrate", {"objective": "exact"})):
        out = folder / job
        found[job] = []
        try:
            report = getattr(moemerge, job)(merged, out, **given, **options)
        except moemerge.DataError as error:  # such as text whose rows are all alike
            found[job].append(f"refused: {error}")
            continue
        except moemerge.MoeMergeError as error:
            found[job].append(f"{type(error).__name__}: {error}")
            continue
        if not all(bool(torch.isfinite(v).all()) for v in zoo.tensors(out).values()):
            found[job].append("weights that are not finite")
            continue
        after = divergence(out, sources, unseen)
        warned = any("rose" in n or "may be worse than" in n for n in report.notices)
        if after > (1 + TOLERANCE) * before + 1e-6 and not warned:
            found[job].append(f"divergence {before:.3g} → {after:.3g} without a warning")
        elif after > (1 + TOLERANCE) * before + 1e-6:
            found[job].append(f"warned: divergence {before:.3g} → {after:.3g}")
    print(seed, kind, found, flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    faults: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.count):
        with tempfile.TemporaryDirectory() as folder:
            for job, found in run_case(seed, Path(folder), options.device).items():
                faults.update(f"{job}, {fault.split()[0].rstrip(':')}" for fault in found)
    print(f"{options.count} models: {dict(faults)}")
    return int(any(not fault.endswith(("refused", "warned")) for fault in faults))


if __name__ == "__main__":
    sys.exit(main())
