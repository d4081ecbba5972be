"""Compare `moemerge tune` with our own training of a specialist.

The same base learns the same rows in as many steps through `moemerge tune`, whole and with a LoRA.
Every model solves the same unseen problems, and both results are merged. With --steps, both sides
train for that number of steps from the same base, on other problems.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

import moemerge
from evidence.data import PRESETS, plan, pool_of, specialist_mixture
from evidence.finetuning import finetune
from evidence.layout import IDS
from evidence.scoring import accuracy_many
from evidence.training import Job, derived_seed, pool_rows
from moemerge.lab.testbed import TrainedSet, bundled_set, open_set
from moemerge.lab.testbed.tasks import problems

# The models have no chat template: an answer follows its prompt and ends with the end token.
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
RANK = 16
LORA_RATE = 3.0  # factor on the learning rate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("work", type=Path, metavar="WORK", help="folder of the trained models")
    parser.add_argument("--set", type=Path, help="a trained set (default: the bundled one)")
    parser.add_argument("--domain", default="math")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--lora-rate", type=float, default=LORA_RATE)


def main(options: argparse.Namespace) -> None:
    trained = bundled_set() if options.set is None else open_set(options.set)
    preset = PRESETS[trained.manifest["preset"]]
    steps = options.steps or int(trained.manifest["steps"]["specialist"])
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    base = work / "base"
    if not base.exists():
        shutil.copytree(trained.base, base)
        (base / "chat_template.jinja").write_text(TEMPLATE)
    drawn = problems(options.domain, split="train", count=steps * preset.batch, seed=1)
    rows = [(p.prompt, p.answer) for p in drawn]
    if options.steps is None:
        rows = rows_of_specialist(trained, options.domain)
    data = work / "rows.jsonl"
    lines = [json.dumps({"prompt": prompt, "response": answer}) + "\n" for prompt, answer in rows]
    data.write_text("".join(lines))
    rate = preset.specialist_lr
    ways = {
        "whole": {"learning_rate": rate},
        f"lora-{RANK}": {"learning_rate": options.lora_rate * rate, "lora": RANK},
    }
    for name, settings in ways.items():
        if not (work / name).exists():
            begun = time.monotonic()
            report = moemerge.tune(
                base,
                work / name,
                data=[data],
                epochs=1.0,
                batch=preset.batch,
                warmup=0.1,
                recompute=False,
                resume=True,
                **settings,
            )
            print(
                f"{name}: {report.steps} steps, {report.parameters} parameters, loss "
                f"{report.first_loss:.4f} to {report.last_loss:.4f}, "
                f"{time.monotonic() - begun:.0f} s",
                flush=True,
            )
    if options.steps is None:
        specialist = trained.models[options.domain]
    else:
        specialist = work / "specialist"
        if not specialist.exists():
            finetune(trained.base, specialist, drawn, steps=steps, lr=rate, batch=preset.batch)
    models = {
        "base": trained.base,
        "our specialist": specialist,
        **{f"tune, {name}": work / name for name in ways},
    }
    config = {
        "merge_method": "ties",
        "base_model": str(base),
        "models": [
            {"model": str(work / name), "parameters": {"weight": 0.5, "density": 0.6}}
            for name in ways
        ],
    }
    (work / "ties.yml").write_text(json.dumps(config))
    moemerge.merge(work / "ties.yml", work / "merged", overwrite=True)
    models["TIES of the two"] = work / "merged"
    test = problems(options.domain, split="test", count=options.problems, seed=0)
    solved = accuracy_many(list(models.values()), test, device="cpu")
    kinds = sorted({p.kind for p in test})
    for name, right in zip(models, solved, strict=True):
        words = f"{name:20} {100 * sum(right) / len(right):5.1f} % of {len(right)}"
        for kind in kinds:
            own = [ok for ok, p in zip(right, test, strict=True) if p.kind == kind]
            words += f", {kind} {100 * sum(own) / len(own):.1f} of {len(own)}"
        print(words)


def rows_of_specialist(trained: TrainedSet, domain: str) -> list[tuple[str, str]]:
    """Return the prompts and answers that a specialist was trained on, with repetitions.

    Kinds with few problems are repeated in training, so that all kinds are equally frequent.
    """
    manifest = trained.manifest
    preset, steps = PRESETS[manifest["preset"]], manifest["steps"]
    scale = int(steps["base"]) / preset.base_steps
    pool = pool_of(pool_rows(Job(trained.folder, preset.name, steps_scale=scale)))
    order = plan(
        pool,
        specialist_mixture(domain),
        steps=int(steps["specialist"]),
        batch=preset.batch,
        seed=derived_seed(int(manifest["seed"]), domain),
    ).flatten()
    characters = list(IDS)
    found = []
    for row in order.tolist():
        end = int(pool.lengths[row]) - 1  # without the end token
        text = "".join(characters[token] for token in pool.tokens[row, :end].tolist())
        found.append((text[: pool.prompts[row]], text[pool.prompts[row] :]))
    return found
