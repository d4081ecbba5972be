"""Every command that writes, as a small run on the fuzzer's corpus, and its output files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.fuzz import cases, situations

GREEDY = ("--samples", "1", "--temperature", "0", "--max-new-tokens", "6")


@dataclass(frozen=True)
class Verb:
    """A command; `again` is appended to resume after a kill, `made` are the files to compare."""

    arguments: tuple[str, ...]
    again: tuple[str, ...] = ()
    made: tuple[str, ...] = ("*.safetensors",)  # patterns inside OUT; ignored if OUT is a file
    grows: bool = False  # OUT keeps finished parts between runs
    out: str = "out"


VERBS: Mapping[str, Verb] = {
    "merge": Verb(cases.LINEAR),
    "calibrate": Verb(cases.CALIBRATE, ("--resume",)),
    "refit": Verb(cases.REFIT, ("--resume",)),
    "run": Verb(("run", "run.yml", "out", "-q"), ("--resume",)),
    "diagnose": Verb((*cases.DIAGNOSE, "--report", "out", "-q")),
    "stats": Verb(("stats", "merged", "out", "--data", "math.jsonl", "-q")),
    "data": Verb(
        ("data", "math", "out.jsonl", "--prompts", "sums.jsonl", "--keep", "all", *GREEDY, "-q"),
        out="out.jsonl",
    ),
    "evaluate": Verb(
        ("evaluate", "math", "code", "--task", "sums.yml", "--out", "out", *GREEDY, "-q"),
        made=("answers/*/*.jsonl",),
        grows=True,
    ),
    "tune": Verb(
        (
            *("tune", "merged", "out", "--data", "sums.jsonl", "--steps", "3", "--batch", "2"),
            *("--save-every", "1", "--device", "cpu", "-q"),
        ),
        ("--resume",),
    ),
    "study": Verb(
        ("study", "study.yml", "out", "--device", "cpu", "--no-figures", "-q"),
        made=("*.md", "*.tex", "*.csv"),
        grows=True,
    ),
    "coefficients": Verb(("coefficients", "acm", "weighed.yml", "out", "-q")),
    "extract": Verb(("extract", "shared", "math", "out", "-q")),
    "swap-routers": Verb(cases.SWAP),
    "distill": Verb(
        (*situations.command("distill"), "--device", "cpu", "--seed", "1", "-q"), ("--resume",)
    ),
    "prune": Verb((*situations.command("prune"), "--repair", "refit", "-q"), ("--resume",)),
    "compose": Verb((*situations.command("compose"), "--device", "cpu", "-q")),
    "convert": Verb((*situations.command("convert"), "-q")),
    "extract-lora": Verb((*situations.command("extract-lora"), "--device", "cpu", "-q")),
    "perplexity": Verb(
        (*situations.command("perplexity"), "-q"), made=("results.json",), grows=True
    ),
}
_TIMES = re.compile(rb'("?\w*seconds"?: *|[\d.]+ s\b|\d{4}-\d\d-\d\d[T ][\d:]+)[\d.e-]*')


def content(verb: Verb, out: Path) -> dict[str, bytes]:
    """Return the files that must be reproducible, by name, with times removed."""
    files = [out] if out.is_file() else [p for each in verb.made for p in sorted(out.glob(each))]
    return {
        str(path.relative_to(out)): path.read_bytes()
        if path.suffix == ".safetensors"
        else _TIMES.sub(b"", path.read_bytes())
        for path in files
    }
