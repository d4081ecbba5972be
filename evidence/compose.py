"""Compose small dense specialists by each gate mode, and measure the domains' loss.

    python -m evidence.compose WORK --json docs/data/compose.json

Per seed, a Llama is trained on all domains and a copy of it on each; the copies become the experts
of a Mixtral. Losses are of test rows, in nats per character. `hidden` gets 64 prompts of each
domain, which are training rows; `fit` gets 300 training rows, or the same 64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import moemerge
from evidence.layout import VOCABULARY, character_tokenizer, encode
from moemerge.lab.testbed.tasks import DOMAINS, problems

MODES = (
    "base",
    "average",
    "random",
    "hidden",
    "fit, prompts",
    "fit",
    "hidden, averaged attention",
    "fit, averaged attention",
    "own specialist",
)
BASE_STEPS, SPECIALIST_STEPS, BATCH, RATE = 150, 100, 16, 3e-3
TRAIN_ROWS, TEST_ROWS, FIT_ROWS, PROMPTS = 1500, 200, 300, 64


def rows_of(domain: str, split: Any, count: int, seed: int) -> list[str]:
    drawn = problems(domain, split=split, count=count, seed=seed)
    return [problem.prompt + problem.answer for problem in drawn]


def loss_of(model: Any, texts: Sequence[str]) -> Any:
    ids = [encode(text).long() for text in texts]
    padded = pad_sequence(ids, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    labels = padded.masked_fill(mask == 0, -100)
    return model(input_ids=padded, attention_mask=mask, labels=labels).loss


def train(model: Any, texts: Sequence[str], steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    model.train()
    for step in range(steps):
        chosen = torch.randint(len(texts), (BATCH,), generator=generator).tolist()
        for group in optimiser.param_groups:
            group["lr"] = RATE * (1 - step / steps)
        optimiser.zero_grad()
        loss_of(model, [texts[at] for at in chosen]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def measure(seed: int, work: Path) -> dict[str, dict[str, float]]:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256,
    )  # fmt: skip
    training = {d: rows_of(d, "train", TRAIN_ROWS, seed) for d in DOMAINS}
    tests = {d: rows_of(d, "test", TEST_ROWS, seed) for d in DOMAINS}
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    train(model, [text for rows in training.values() for text in rows], BASE_STEPS, seed)
    base = save(model, work / "base")
    experts = []
    for domain, rows in training.items():
        own: Any = AutoModelForCausalLM.from_pretrained(base)
        train(own, rows, SPECIALIST_STEPS, seed)
        (work / f"{domain}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in rows[:FIT_ROWS])
        )
        experts.append({"source_model": str(save(own, work / domain))})

    models = [{"model": e["source_model"], "parameters": {"weight": 1 / 3}} for e in experts]
    merge = {"merge_method": "linear", "models": models}

    def composed(mode: str) -> Path:
        entries = [dict(entry) for entry in experts]
        for entry, (domain, rows) in zip(entries, training.items(), strict=True):
            if mode.startswith("fit") and mode != "fit, prompts":
                entry["data"] = str(work / f"{domain}.jsonl")
            elif mode != "random":
                entry["positive_prompts"] = rows[:PROMPTS]  # type: ignore[assignment]
        wanted: dict[str, Any] = {
            "base_model": str(base),
            "experts": entries,
            "gate_mode": mode.partition(",")[0],
        }
        if mode.endswith("averaged attention"):
            wanted["attention"] = merge
        out = work / "composed"
        moemerge.compose(wanted, out, device="cpu", holdout=0.0, overwrite=True)
        return out

    def loss(folder: Path, domain: str) -> float:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
        loaded.eval()
        with torch.no_grad():
            return float(loss_of(loaded, tests[domain]))

    moemerge.merge(merge, work / "average", device="cpu", overwrite=True)
    found: dict[str, dict[str, float]] = {}
    for mode in MODES:
        if mode == "own specialist":
            found[mode] = {domain: loss(work / domain, domain) for domain in DOMAINS}
            continue
        folder = work / mode if mode in ("base", "average") else composed(mode)
        found[mode] = {domain: loss(folder, domain) for domain in DOMAINS}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for seed in range(args.seeds):
        begin = time.perf_counter()
        args.work.mkdir(parents=True, exist_ok=True)
        results.append(measure(seed, args.work))
        means = {mode: statistics.mean(own.values()) for mode, own in results[-1].items()}
        listed = ", ".join(f"{mode} {value:.4f}" for mode, value in means.items())
        print(f"seed {seed}: {listed} ({time.perf_counter() - begin:.0f} s)", flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
