"""The kinds of calibration text that the experiments compare, made from a trained set."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from moemerge.testbed.accuracy import generate
from moemerge.testbed.tasks import DOMAINS, Problem, check_all, problems
from moemerge.testbed.training.data import HARD_SHARE
from moemerge.text.rows import write_rows

# Problems of calibration text, and of tests: any fixed numbers that no training seed uses.
TEXT_SEED = 20_001
TEST_SEED = 20_002
VALIDATION_SEED = 20_003
GENERAL_ROWS = 64  # of the base's text
GENERAL_SEED = 20_004
# A model that answers hardly anything right would leave nothing to calibrate with.
FEWEST_CORRECT = 32
# Drawn for each row of text, so that enough are left when wrong answers are dropped.
DRAWN_PER_ROW = 2


@lru_cache(maxsize=8)
def asked_problems(domain: str, count: int) -> tuple[Problem, ...]:
    """The problems that every model of every table is measured on."""
    return tuple(problems(domain, split="test", count=count, seed=TEST_SEED))


def validation_problems(domain: str, count: int, asked: int) -> list[Problem]:
    """Problems to choose a model by: none that was trained on, none of those `asked` in tests."""
    tested = {p.prompt for p in asked_problems(domain, asked)}
    drawn = problems(domain, split="test", count=2 * count, seed=VALIDATION_SEED)
    return [p for p in drawn if p.prompt not in tested][:count]


def general_text(rows: int) -> list[dict[str, str]]:
    """Text of all domains as the base was pretrained on: easy problems, and a few hard ones."""
    each = -(-rows // len(DOMAINS))
    hard = round(HARD_SHARE * each)
    drawn: list[Problem] = []
    for domain in DOMAINS:
        for count, is_hard in ((each - hard, False), (hard, True)):
            drawn += problems(domain, split="train", count=count, seed=GENERAL_SEED, hard=is_hard)
    random.Random(GENERAL_SEED).shuffle(drawn)
    return [{"text": p.prompt + p.answer} for p in drawn[:rows]]


def kept_text(domain: str, rows: int) -> list[dict[str, str]]:
    """Text of one domain, of the kinds of problem that are asked of it."""
    drawn = problems(domain, split="train", count=rows, seed=GENERAL_SEED)
    return [{"text": p.prompt + p.answer} for p in drawn]


def general_file(folder: Path) -> Path:
    """General text as a file, written where it is not there."""
    file = folder / f"general-{GENERAL_ROWS}.jsonl"
    if not file.exists():
        write_rows(file, general_text(GENERAL_ROWS))
    return file


def held_out_text(domain: str, count: int) -> list[str]:
    """Test problems with their answers: the tokens on which routing is compared."""
    return [p.prompt + p.answer for p in asked_problems(domain, count)]


def write_texts(folder: Path, models: Mapping[str, Path], *, rows: int, device: str) -> None:
    """Write every kind of text of every domain: `folder/KIND-DOMAIN.jsonl`, `rows` rows each.

    `correct` may have fewer rows (the specialist's right answers among twice as many prompts); if
    there are next to none it is topped up with the true answers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for domain, model in models.items():
        asked = problems(domain, split="train", count=DRAWN_PER_ROW * rows, seed=TEXT_SEED)
        written = generate(model, [p.prompt for p in asked], device=device)
        right = check_all(asked, written)
        answered = [replace(p, answer=text) for p, text in zip(asked, written, strict=True)]
        correct = [p for p, ok in zip(answered, right, strict=True) if ok][:rows]
        kinds: dict[str, Sequence[Problem]] = {
            "correct": correct + asked[: max(0, min(FEWEST_CORRECT, rows) - len(correct))],
            "answers": answered[:rows],
            "truth": asked[:rows],
            "prompts": [replace(p, answer="") for p in asked[:rows]],
            "unrelated": _unrelated(domain, rows),
        }
        for kind, texts in kinds.items():
            _write(text_file(folder, kind, domain), texts)


def text_file(folder: Path, kind: str, domain: str) -> Path:
    """Where `write_texts` puts it."""
    return folder / f"{kind}-{domain}.jsonl"


def read_texts(path: Path, domain: str) -> list[Problem]:
    """A file of text as the problems it was made of."""
    problems = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        text, cut = row["text"], row["prompt_length"]
        problems.append(Problem(domain, "", hard=True, prompt=text[:cut], answer=text[cut:]))
    return problems


def _unrelated(domain: str, rows: int) -> list[Problem]:
    """Easy problems of the last other domain: seen in pretraining, no part of what is merged."""
    other = [name for name in DOMAINS if name != domain][-1]
    return problems(other, split="train", count=rows, seed=TEXT_SEED, hard=False)


def _write(path: Path, texts: Sequence[Problem]) -> None:
    rows = [{"text": p.prompt + p.answer, "prompt_length": len(p.prompt)} for p in texts]
    write_rows(path, rows)
