"""Calibration text of every kind that the experiments compare, and test problems."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from evidence.data import HARD_SHARE
from evidence.scoring import generate
from moemerge.lab.testbed.demo import TEST_SEED
from moemerge.lab.testbed.tasks import DOMAINS, Problem, check_all, problems
from moemerge.text.rows import write_rows

# Fixed seeds that no training uses.
TEXT_SEED = 20_001
VALIDATION_SEED = 20_003
GENERAL_ROWS = 64  # rows of general text for the base
GENERAL_SEED = 20_004
# A model with hardly any correct answer would leave no text to calibrate with.
FEWEST_CORRECT = 32
# Problems drawn per row of text, because wrong answers are dropped.
DRAWN_PER_ROW = 2


@lru_cache(maxsize=8)
def test_set(domain: str, count: int) -> tuple[Problem, ...]:
    """Return the test problems of every table."""
    return tuple(problems(domain, split="test", count=count, seed=TEST_SEED))


def validation_problems(domain: str, count: int, test: int) -> list[Problem]:
    """Return problems for model selection that are not among the `test` test problems."""
    tested = {p.prompt for p in test_set(domain, test)}
    drawn = problems(domain, split="test", count=2 * count, seed=VALIDATION_SEED)
    return [p for p in drawn if p.prompt not in tested][:count]


def general_text(rows: int) -> list[dict[str, str]]:
    """Return text of all domains as in pretraining: easy problems and a few hard ones."""
    each = -(-rows // len(DOMAINS))
    hard = round(HARD_SHARE * each)
    drawn: list[Problem] = []
    for domain in DOMAINS:
        for count, is_hard in ((each - hard, False), (hard, True)):
            drawn += problems(domain, split="train", count=count, seed=GENERAL_SEED, hard=is_hard)
    random.Random(GENERAL_SEED).shuffle(drawn)
    return [{"text": p.prompt + p.answer} for p in drawn[:rows]]


def kept_text(domain: str, rows: int) -> list[dict[str, str]]:
    """Return training text of one domain, with the kinds of its test problems."""
    drawn = problems(domain, split="train", count=rows, seed=GENERAL_SEED)
    return [{"text": p.prompt + p.answer} for p in drawn]


def general_file(folder: Path) -> Path:
    """Return the file of general text, and write it if it does not exist."""
    file = folder / f"general-{GENERAL_ROWS}.jsonl"
    if not file.exists():
        write_rows(file, general_text(GENERAL_ROWS))
    return file


def held_out_text(domain: str, count: int) -> list[str]:
    """Return test problems with their answers, on which routing is compared."""
    return [p.prompt + p.answer for p in test_set(domain, count)]


def write_texts(folder: Path, models: Mapping[str, Path], *, rows: int, device: str) -> None:
    """Write `rows` rows of every kind of text of every domain to `folder/KIND-DOMAIN.jsonl`.

    `correct` holds the specialist's correct answers among twice as many prompts, so it may be
    shorter. If hardly any answer is correct, true answers are added.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for domain, model in models.items():
        drawn = problems(domain, split="train", count=DRAWN_PER_ROW * rows, seed=TEXT_SEED)
        written = generate(model, [p.prompt for p in drawn], device=device)
        right = check_all(drawn, written)
        answered = [replace(p, answer=text) for p, text in zip(drawn, written, strict=True)]
        correct = [p for p, ok in zip(answered, right, strict=True) if ok][:rows]
        kinds: dict[str, Sequence[Problem]] = {
            "correct": correct + drawn[: max(0, min(FEWEST_CORRECT, rows) - len(correct))],
            "answers": answered[:rows],
            "truth": drawn[:rows],
            "prompts": [replace(p, answer="") for p in drawn[:rows]],
            "unrelated": _unrelated(domain, rows),
        }
        for kind, texts in kinds.items():
            _write(text_file(folder, kind, domain), texts)


def text_file(folder: Path, kind: str, domain: str) -> Path:
    """Return the file that `write_texts` writes."""
    return folder / f"{kind}-{domain}.jsonl"


def read_texts(path: Path, domain: str) -> list[Problem]:
    """Return the problems in a file of text."""
    problems = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        text, cut = row["text"], row["prompt_length"]
        problems.append(Problem(domain, "", hard=True, prompt=text[:cut], answer=text[cut:]))
    return problems


def _unrelated(domain: str, rows: int) -> list[Problem]:
    """Return easy problems of another domain."""
    other = [name for name in DOMAINS if name != domain][-1]
    return problems(other, split="train", count=rows, seed=TEXT_SEED, hard=False)


def _write(path: Path, texts: Sequence[Problem]) -> None:
    rows = [{"text": p.prompt + p.answer, "prompt_length": len(p.prompt)} for p in texts]
    write_rows(path, rows)
