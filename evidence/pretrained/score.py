"""Measure models: `python -m evidence.pretrained.score SET TASKS OUT.jsonl MODEL...`

SET is the folder that `make` wrote. OUT gets a line for each model: every choice and every answer
as right or wrong (so that differences can be paired), and the losses of held-out text.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from evidence.pretrained.make import chat
from evidence.pretrained.rows import DOMAINS, Problem, Question, problems, questions

BATCH_TOKENS = 65_536  # of a forward pass
BATCH_ANSWERS = 1024  # generated together
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
MOST_BOOLQ = 1000
MOST_TOKENS = {"gsm8k": 220, "arithmetic": 80, "trace": 60}  # of an answer
MOST_OF_DOCUMENT = 1024  # tokens at which it is cut


@torch.no_grad()
def answer_losses(model: Any, encoded: Sequence[tuple[list[int], list[int]]]) -> list[float]:
    """Return the summed loss of each answer given its prompt."""
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i][0]) + len(encoded[i][1]))
    found = [0.0] * len(encoded)
    device = next(model.parameters()).device
    while order:
        longest = sum(map(len, encoded[order[-1]]))
        part, order = (
            order[-max(1, BATCH_TOKENS // longest) :],
            order[: -max(1, BATCH_TOKENS // longest)],
        )
        ids = torch.zeros(len(part), longest, dtype=torch.long)
        labels = torch.full_like(ids, -100)
        for row, number in enumerate(part):
            prompt, answer = encoded[number]
            whole = prompt + answer
            ids[row, : len(whole)] = torch.tensor(whole)
            labels[row, len(prompt) : len(whole)] = torch.tensor(answer)
        hidden = model.model(input_ids=ids.to(device), use_cache=False).last_hidden_state
        labels = labels[:, 1:].to(device)
        places = labels != -100
        losses = torch.zeros(places.shape, device=device)
        chosen = hidden[:, :-1][places]
        pieces = [
            cross_entropy(model.lm_head(h).float(), y, reduction="none")
            for h, y in zip(
                torch.split(chosen, 16384), torch.split(labels[places], 16384), strict=True
            )
        ]
        losses[places] = torch.cat(pieces)
        for number, loss in zip(part, losses.sum(1).tolist(), strict=True):
            found[number] = loss
    return found


def choices(model: Any, tokenizer: Any, asked: Sequence[Question]) -> dict[str, list[int]]:
    """Return for each task which questions are answered right: by the most likely choice."""
    encoded = [
        chat(tokenizer, {"prompt": one.prompt, "response": choice})
        for one in asked
        for choice in one.choices
    ]
    losses = iter(answer_losses(model, encoded))
    found: dict[str, list[int]] = defaultdict(list)
    for one in asked:
        own = [next(losses) for _ in one.choices]
        found[one.task].append(int(own.index(min(own)) == one.right))
    return found


@torch.no_grad()
def answers(
    model: Any, tokenizer: Any, asked: Sequence[Problem], samples: int, seed: int = 0
) -> dict[str, list[list[int]]]:
    """Return for each problem which sampled answers end with the right number (1 of `samples`).

    One sample is greedy decoding.
    """
    device = next(model.parameters()).device
    tokenizer.padding_side = "left"
    found: dict[str, list[list[int]]] = {}
    looped = ended = 0
    for task in dict.fromkeys(one.task for one in asked):
        own = [one for one in asked if one.task == task]
        messages = [
            [{"role": "user", "content": one.prompt}] for one in own for _ in range(samples)
        ]
        texts = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        written: list[str] = []
        torch.manual_seed(seed)
        for first in range(0, len(texts), BATCH_ANSWERS):
            batch = tokenizer(
                texts[first : first + BATCH_ANSWERS],
                return_tensors="pt",
                padding=True,
                add_special_tokens=False,
            ).to(device)
            sampling: dict[str, Any] = {"do_sample": samples > 1}
            if samples > 1:
                sampling |= {"temperature": 0.6, "top_p": 0.95, "top_k": 0}
            out = model.generate(
                **batch,
                max_new_tokens=MOST_TOKENS[task],
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                **sampling,
            )
            new = out[:, batch["input_ids"].shape[1] :]
            ended += int((new == tokenizer.eos_token_id).any(1).sum())
            written += tokenizer.batch_decode(new, skip_special_tokens=True)
        looped += sum(map(loops, written))
        right = [
            int(last_number(text) == own[number // samples].answer)
            for number, text in enumerate(written)
        ]
        found[task] = [right[i : i + samples] for i in range(0, len(right), samples)]
    total = sum(len(one) * samples for one in found.values())
    found["health"] = [[looped, total - ended, total]]
    return found


def last_number(text: str) -> float | None:
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def loops(text: str) -> bool:
    """Return whether the last 16 words of an answer occur in it three times."""
    words = text.split()
    return len(words) >= 48 and f" {text} ".count(" ".join(words[-16:])) >= 3


def text_losses(
    model: Any, tokenizer: Any, folder: Path, limit: int | None = None
) -> dict[str, float]:
    """Return the mean loss of answers, and of general text."""
    found = {}
    for name in (*DOMAINS, "instructions", "general"):
        rows = [json.loads(line) for line in (folder / f"{name}-test.jsonl").open()][:limit]
        if name == "general":
            ids = [tokenizer(r["text"], add_special_tokens=False)["input_ids"] for r in rows]
            encoded = [([tokenizer.pad_token_id], one[:MOST_OF_DOCUMENT]) for one in ids]
        else:
            encoded = [chat(tokenizer, row) for row in rows]
            encoded = [one for one in encoded if len(one[0]) + len(one[1]) <= 1024]
        found[name] = sum(answer_losses(model, encoded)) / sum(len(a) for _, a in encoded)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("folder", "tasks", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument("--samples", type=int, default=4, help="of each GSM8K problem")
    parser.add_argument("--limit", type=int, help="most questions, problems and rows of text")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    asked = list(questions(options.tasks, "test"))
    boolq = [one for one in asked if one.task == "boolq"][:MOST_BOOLQ]
    asked = [one for one in asked if one.task != "boolq"] + boolq
    posed = problems(options.tasks)
    if options.limit:
        asked = asked[:: max(1, len(asked) // options.limit)]
        posed = posed[:: max(1, len(posed) // options.limit)]
    for path in options.models:
        began = time.monotonic()
        tokenizer = AutoTokenizer.from_pretrained(path)
        implementation = "eager" if options.device == "cpu" else "grouped_mm"
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, experts_implementation=implementation
        )
        model = model.to(options.device).eval()
        line: dict[str, Any] = {
            "model": str(path),
            "loss": text_losses(model, tokenizer, options.folder, options.limit),
        }
        line["choices"] = choices(model, tokenizer, asked)
        sampled = [one for one in posed if one.task == "gsm8k"]
        greedy = [one for one in posed if one.task != "gsm8k"]
        line["answers"] = answers(model, tokenizer, sampled, options.samples)
        health = line["answers"].pop("health")
        line["answers"] |= answers(model, tokenizer, greedy, 1)
        line["health"] = [health[0], line["answers"].pop("health")[0]]
        line["seconds"] = round(time.monotonic() - began, 1)
        with options.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        means = {k: round(100 * sum(v) / len(v), 1) for k, v in line["choices"].items()}
        for task, own in line["answers"].items():
            means[task] = round(100 * sum(map(sum, own)) / sum(map(len, own)), 1)
        losses = {k: round(v, 3) for k, v in line["loss"].items()}
        print(path, means, losses, line["health"], f"{line['seconds']} s", flush=True)
        del model
        torch.cuda.empty_cache() if options.device != "cpu" else None


if __name__ == "__main__":
    main()
