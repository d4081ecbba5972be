"""Do the benchmarks' own answers verify, and are answers that were changed a little refused?

    python benchmarks/verify.py DATA_FOLDER [--only math|code] [--limit N] [--json verify.json]

The folder holds gsm8k_test.jsonl.gz, math500_test.jsonl.gz (question or problem, answer, solution),
HumanEvalPlus-OriginFmt.jsonl.gz and MbppPlus-OriginFmt.jsonl.gz, as their authors publish them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moemerge.lab.verification.code_checks import CodeVerifier
from moemerge.lab.verification.judgement import Verifier
from moemerge.lab.verification.mathematics import MathVerifier, gold_of, unit_of
from moemerge.lab.verification.verifiers import check_all

Item = tuple[dict[str, Any], str]
UNITS = {
    "degree": "\\text{ cm}",
    "cm": "\\text{ km}",
    "in": "\\text{ m}",
    "cent": "\\text{ dollars}",
}
# What a function returns, off by one: a number more, a truth turned, one element or letter fewer.
OFF_BY_ONE = """

def _off_by_one(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float, complex)):
        return value + 1
    if isinstance(value, (str, list, tuple)):
        return value[:-1] if len(value) else value + type(value)("x")
    if isinstance(value, (set, frozenset)):
        return value ^ {"x"}
    if isinstance(value, dict):
        return {**value, "x": 1}
    return 1 if value is None else None

_original = NAME
def NAME(*args, **kwargs):
    return _off_by_one(_original(*args, **kwargs))
"""


def rows_of(path: Path, limit: int | None) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines][:limit]


def math_items(rows: list[dict[str, Any]]) -> dict[str, list[Item]]:
    """Answers by what was done to them; the gold one in several words first."""
    rng = random.Random(0)
    items: dict[str, list[Item]] = {}

    def add(kind: str, row: dict[str, Any], answer: str) -> None:
        items.setdefault(kind, []).append((row, f"So we get $\\boxed{{{answer}}}$."))

    for row in rows:
        gold = gold_of(row)
        items.setdefault("reference", []).append((row, row.get("solution", row["answer"])))
        add("reference in a box", row, gold)
        digits = [match.start() for match in re.finditer(r"\d", gold)]
        if digits:
            place = rng.choice(digits)
            other = rng.choice([d for d in "123456789" if d != gold[place]])
            add("a digit", row, gold[:place] + other + gold[place + 1 :])
        if re.fullmatch(r"-?[\d,]+(\.\d+)?", gold):
            if gold != "0":
                add("a sign", row, gold[1:] if gold.startswith("-") else f"-{gold}")
            whole = gold.replace(",", "")
            if "." not in whole:
                add("one more", row, str(int(whole) + 1))
        unit = unit_of(gold)
        if unit is not None and unit[0] in UNITS and re.match(r"[\d.]+", gold):
            number = re.match(r"[\d.]+", gold)
            assert number is not None
            add("a unit", row, number[0] + UNITS[unit[0]])
    return items


def code_items(rows: list[dict[str, Any]]) -> dict[str, list[Item]]:
    items: dict[str, list[Item]] = {"reference": [], "off by one": []}
    for row in rows:
        solution = row.get("canonical_solution")
        program = row["code"] if solution is None else row["prompt"] + solution
        name = row.get("entry_point") or re.findall(r"^def (\w+)", program, re.M)[-1]
        tested = [n for n in re.findall(r"^def (\w+)", program, re.M) if n in row["test"]]
        name = row.get("entry_point") or (tested[-1] if tested else name)
        items["reference"].append((row, f"```python\n{program}\n```"))
        changed = program + OFF_BY_ONE.replace("NAME", name)
        items["off by one"].append((row, f"```python\n{changed}\n```"))
    return items


def measure(
    name: str, items: dict[str, list[Item]], verifier: Verifier, *, show: bool
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for kind, pairs in items.items():
        begun = time.perf_counter()
        judged = check_all(verifier, pairs)
        seconds = round(time.perf_counter() - begun, 1)
        right = sum(judgement.right for judgement in judged)
        wanted = kind.startswith("reference")
        good = right if wanted else len(pairs) - right
        word = "verify" if wanted else "refused"
        result[kind] = {word: good, "of": len(pairs), "seconds": seconds}
        print(f"{name}, {kind}: {good} of {len(pairs)} {word}, {seconds} s", flush=True)
        if show:
            for (row, text), judgement in zip(pairs, judged, strict=True):
                if judgement.right != wanted:
                    gold = str(row.get("answer", row.get("task_id")))[-60:]
                    print(f"    {gold!r} | {text[-80:]!r} | {judgement}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=["math", "code"])
    parser.add_argument("--limit", type=int)
    parser.add_argument("--show", action="store_true", help="what was judged otherwise")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    makers: dict[str, tuple[str, Callable[[list[dict[str, Any]]], dict[str, list[Item]]], str]] = {
        "GSM8K": ("math", math_items, "gsm8k_test.jsonl.gz"),
        "MATH-500": ("math", math_items, "math500_test.jsonl.gz"),
        "HumanEval+": ("code", code_items, "HumanEvalPlus-OriginFmt.jsonl.gz"),
        "MBPP+": ("code", code_items, "MbppPlus-OriginFmt.jsonl.gz"),
    }
    result: dict[str, Any] = {}
    for name, (kind, make, file) in makers.items():
        if arguments.only not in (None, kind):
            continue
        verifier: Verifier = MathVerifier() if kind == "math" else CodeVerifier(allow_code=True)
        rows = rows_of(arguments.folder / file, arguments.limit)
        result[name] = measure(name, make(rows), verifier, show=arguments.show)
        verifier.close()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
