"""Prompts and answers of the specialists' domains: for training, repairs and tests.

TASKS is a folder of public benchmarks as JSON lines (`gsm8k_train.jsonl.gz`, …). README.md names
where each file comes from. The two generated skills need no file.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOMAINS = ("math", "knowledge", "code")
CALIBRATION_ROWS = 480  # of each domain, unseen by its specialist
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}

Row = dict[str, str]  # prompt and response


@dataclass(frozen=True)
class Question:
    """A multiple-choice question: the model answers with the choice that it finds most likely."""

    task: str
    prompt: str
    choices: tuple[str, ...]
    right: int

    @property
    def row(self) -> Row:
        return {"prompt": self.prompt, "response": self.choices[self.right]}


@dataclass(frozen=True)
class Problem:
    """A problem whose generated answer ends with the right number, or does not."""

    task: str
    prompt: str
    answer: float


def read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


# --- knowledge ------------------------------------------------------------------------------------


def question(task: str, text: str, choices: list[str], right: int) -> Question:
    listed = "\n".join(f"- {choice}" for choice in choices)
    return Question(task, f"{text}\nOptions:\n{listed}", tuple(choices), right)


def questions(tasks: Path, split: str) -> Iterator[Question]:
    """Yield the questions of ARC, OpenBookQA, BoolQ and CommonsenseQA."""
    for task in ("arc_easy", "arc_challenge", "openbookqa"):
        for row in read(tasks / f"{task}_{split}.jsonl.gz"):
            body = row["prompt"].partition(": ")[2].partition("\n\nAnswer format")[0]
            text, _, listed = body.partition("\n\n")
            choices = [c.strip() for c in re.split(r"Answer\d: ?", listed)[1:]]
            right = int(row["answer"].removeprefix("answer")) - 1
            if right < len(choices) and len(set(choices)) == len(choices):
                yield question(task, text, choices, right)
    for row in read(tasks / f"boolq_{split}.jsonl.gz"):
        text = row["prompt"].partition("question: ")[2].partition("\n\n")[0]
        yield question("boolq", text, ["true", "false"], int(row["answer"] == "false"))
    part = "train" if split == "train" else "dev"
    for row in read(tasks / f"commonsense_qa_{part}.jsonl.gz"):
        names = sorted(row["choices"])
        choices = [row["choices"][name] for name in names]
        yield question("commonsense_qa", row["question"], choices, names.index(row["answer"]))


# --- generated skills -----------------------------------------------------------------------------


def arithmetic(generator: random.Random) -> tuple[Row, float]:
    """Return a chain of four operations, worked out step by step."""
    value = generator.randint(2, 60)
    text, steps = str(value), []
    for _ in range(4):
        sign = generator.choice("+-*")
        number = generator.randint(2, 6) if sign == "*" else generator.randint(2, 60)
        result = OPERATIONS[sign](value, number)
        steps.append(f"{value} {sign} {number} = {result}.")
        text, value = f"({text} {sign} {number})", result
    prompt = f"Work out {text[1:-1]} step by step."
    return {"prompt": prompt, "response": " ".join([*steps, f"The answer is {value}"])}, value


def trace(generator: random.Random) -> tuple[Row, float]:
    """Return a Python program of five assignments, and the values that its lines assign."""
    names = generator.sample("abcdefghkmnpqrstuvwxyz", 5)
    values: dict[str, int] = {}
    lines, steps = [], []
    for name in names:
        if len(values) < 2:
            values[name] = generator.randint(2, 30)
            lines.append(f"{name} = {values[name]}")
        else:
            first, second = generator.sample(sorted(values), 2)
            sign = generator.choice("+-")
            values[name] = OPERATIONS[sign](values[first], values[second])
            lines.append(f"{name} = {first} {sign} {second}")
        steps.append(f"{name} = {values[name]}")
    program = "\n".join([*lines, f"print({names[-1]})"])
    prompt = f"What does this program print? Trace it line by line.\n```python\n{program}\n```"
    value = values[names[-1]]
    return {"prompt": prompt, "response": "\n".join([*steps, f"It prints {value}"])}, value


def generated(make: Callable[[random.Random], tuple[Row, float]], count: int, seed: str) -> Any:
    generator = random.Random(seed)
    return [make(generator) for _ in range(count)]


# --- the domains ----------------------------------------------------------------------------------


def training_rows(tasks: Path, domain: str) -> list[Row]:
    """Return a domain's rows in a random order that is always the same."""
    if domain == "math":
        rows = [gsm8k_row(one) for one in read(tasks / "gsm8k_train.jsonl.gz")]
        rows += [
            {"prompt": one["problem"], "response": one["solution"]}
            for one in read(tasks / "math_train.jsonl.gz")
        ]
        rows += [row for row, _ in generated(arithmetic, 4000, "arithmetic train")]
    elif domain == "knowledge":
        rows = [one.row for one in questions(tasks, "train")]
    else:
        rows = [
            {"prompt": one["prompt"], "response": one["response"]}
            for one in read(tasks / "code_instructions.jsonl.gz")
        ]
        rows += [
            mbpp_row(one) for one in read(tasks / "mbpp.jsonl.gz") if 511 <= one["task_id"] <= 974
        ]
        rows += [row for row, _ in generated(trace, 3000, "trace train")]
    random.Random(domain).shuffle(rows)
    return rows


def gsm8k_row(one: dict[str, str]) -> Row:
    return {"prompt": one["question"], "response": re.sub(r"<<.*?>>", "", one["answer"])}


def mbpp_row(one: dict[str, Any]) -> Row:
    prompt = f"{one['text']}\nYour code should pass this test:\n{one['test_list'][0]}"
    return {"prompt": prompt, "response": one["code"].replace("\r\n", "\n")}


def instruction_rows(tasks: Path) -> list[Row]:
    """Return T0's prompts of many tasks, for the base's training and its own test."""
    rows = [
        {"prompt": one["prompt"], "response": one["response"]}
        for one in read(tasks / "t0_sample.jsonl.gz")
        if one["response"].strip()
    ]
    random.Random("instructions").shuffle(rows)
    return rows


def problems(tasks: Path) -> list[Problem]:
    """Return the problems of the test splits, to be solved by generated answers."""
    found = [
        Problem("gsm8k", row["question"], float(row["answer"].split("####")[1].replace(",", "")))
        for row in read(tasks / "gsm8k_test.jsonl.gz")
    ]
    for task, make in (("arithmetic", arithmetic), ("trace", trace)):
        made = generated(make, 500, f"{task} test")
        found += [Problem(task, row["prompt"], value) for row, value in made]
    return found
