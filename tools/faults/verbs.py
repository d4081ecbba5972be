"""Every command that writes, as a small run on the fuzzer's corpus, and its output files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.fuzz import cases, harness

QUESTIONS = ("what is one plus two", "compute two plus two", "why", "how is x equal to y", "what")
GREEDY = ("--samples", "1", "--temperature", "0", "--max-new-tokens", "6")
TASK = (
    "title: Sums\ndomain: math\ndata: sums.jsonl\nverify: exact\nmax_new_tokens: 6\nproblems: 5\n"
)
KEPT = (
    "merge_method: emr\nbase_model: base\nmodels:\n  - {model: math, name: math}\n"
    "  - {model: code, name: code}\ntasks: {keep: emr}\n"
)
WEIGHED = (
    "merge_method: task_arithmetic\nbase_model: base\nmodels:\n  - {model: math, name: math}\n"
    "  - {model: code, name: code}\nparameters: {weight: 1.0}\n"
    "data: {math: math.jsonl, code: code.jsonl}\n"
)
STUDY = (
    "title: Two\nbase: base\nsources: {math: math, code: code}\n"
    "data: {math: math.jsonl, code: code.jsonl}\n"
    "merges:\n  average: {merge_method: linear, parameters: {weight: 0.5}}\n"
    "repairs:\n  HARC: {calibrate: {max_tokens: 60}}\n"
    "evaluate: {tasks: [sums.yml], samples: 1, temperature: 0, limit: 3}\n"
    "diagnose: {limit: 2, holdout: 0.0}\n"
)


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
}
_TIMES = re.compile(rb'("?\w*seconds"?: *|[\d.]+ s\b|\d{4}-\d\d-\d\d[T ][\d:]+)[\d.e-]*')


def extend(corpus: Path) -> None:
    """Add the files that only these commands need to the fuzzer's corpus."""
    rows = [{"prompt": text, "response": "one", "answer": "one"} for text in QUESTIONS]
    (corpus / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = {"sums.yml": TASK, "kept.yml": KEPT, "weighed.yml": WEIGHED, "study.yml": STUDY}
    for name, text in texts.items():
        (corpus / name).write_text(text)
    merge = ("merge", "kept.yml", "shared", "-q")
    ended = harness.command(merge, corpus, corpus.with_suffix(".log"))
    assert ended.code == 0, ended.output


def content(verb: Verb, out: Path) -> dict[str, bytes]:
    """Return the files that must be reproducible, by name, with times removed."""
    files = [out] if out.is_file() else [p for each in verb.made for p in sorted(out.glob(each))]
    return {
        str(path.relative_to(out)): path.read_bytes()
        if path.suffix == ".safetensors"
        else _TIMES.sub(b"", path.read_bytes())
        for path in files
    }
