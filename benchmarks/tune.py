"""Whether `moemerge tune` makes as good a specialist as the testbed's own training does.

    python benchmarks/tune.py WORK [--domain math] [--set SET] [--steps N] [--problems 500]

SET is what `moemerge testbed train` wrote; without it, the specialists that come with the package.

The testbed trains its specialist on the answers of so many steps of so many problems. Here the same
base learns the same rows in as many steps through `moemerge tune`, whole and with a LoRA, and every
model solves the same unseen problems. At the end both results are merged. With --steps both sides
take so many steps instead, and the testbed's specialist is trained here, from the same base and on
other problems.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

import moemerge
from moemerge.testbed.accuracy import accuracy_many
from moemerge.testbed.network.layout import IDS
from moemerge.testbed.tasks import problems
from moemerge.testbed.training import TrainedSet, bundled_set, open_set
from moemerge.testbed.training.data import POOL_ROWS, PRESETS, plan, pool_of, specialist_mixture
from moemerge.testbed.training.finetuning import finetune
from moemerge.testbed.training.stacks import derived_seed

# The testbed has no chat template: an answer follows its prompt, and ends with the end token.
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
RANK = 16
LORA_RATE = 3.0  # on the learning rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--set", type=Path)
    parser.add_argument("--domain", default="math")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--lora-rate", type=float, default=LORA_RATE)
    options = parser.parse_args()
    trained = bundled_set() if options.set is None else open_set(options.set)
    preset = PRESETS[trained.manifest["preset"]]
    steps = options.steps or int(trained.manifest["steps"]["specialist"])
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    base = work / "base"
    if not base.exists():
        shutil.copytree(trained.base, base)
        (base / "chat_template.jinja").write_text(TEMPLATE)
    asked = problems(options.domain, split="train", count=steps * preset.batch, seed=1)
    rows = [(p.prompt, p.answer) for p in asked]
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
        specialist = work / "testbed"
        if not specialist.exists():
            finetune(trained.base, specialist, asked, steps=steps, lr=rate, batch=preset.batch)
    models = {
        "base": trained.base,
        "the testbed's specialist": specialist,
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
        words = f"{name:26} {100 * sum(right) / len(right):5.1f} % of {len(right)}"
        for kind in kinds:
            own = [ok for ok, p in zip(right, test, strict=True) if p.kind == kind]
            words += f", {kind} {100 * sum(own) / len(own):.1f} of {len(own)}"
        print(words)


def rows_of_specialist(trained: TrainedSet, domain: str) -> list[tuple[str, str]]:
    """Prompts and answers that the testbed's specialist of a domain has learnt, as often as it saw
    them. A kind that has few problems is repeated there, so that all kinds are as frequent."""
    manifest = trained.manifest
    preset, steps = PRESETS[manifest["preset"]], manifest["steps"]
    pool = pool_of(min(POOL_ROWS, int(steps["base"]) * preset.batch))
    drawn = plan(
        pool,
        specialist_mixture(domain),
        steps=int(steps["specialist"]),
        batch=preset.batch,
        seed=derived_seed(int(manifest["seed"]), domain),
    ).flatten()
    characters = list(IDS)
    found = []
    for row in drawn.tolist():
        end = int(pool.lengths[row]) - 1  # without the end token
        text = "".join(characters[token] for token in pool.tokens[row, :end].tolist())
        found.append((text[: pool.prompts[row]], text[pool.prompts[row] :]))
    return found


if __name__ == "__main__":
    main()
