"""What became of the prompts and their answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moemerge.generation.counts import Counts


@dataclass(frozen=True)
class DataReport:
    """What `moemerge data` read, left out, asked, and kept."""

    output: str
    keep: str
    verify: str
    read: int  # rows of all files
    repeated: int  # prompts left out as repetitions of others
    contaminated: Mapping[str, int]  # prompts left out, by the benchmark that holds them too
    prompts: int  # that were taken
    answers: Counts
    by_group: Mapping[str, Counts]
    kept: int
    kept_by_group: Mapping[str, int]
    reused: int  # completions of a run before
    tokens: int  # generated in this run
    seconds: float
    generating_seconds: float
    notices: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "output": self.output,
            "keep": self.keep,
            "verify": self.verify,
            "read": self.read,
            "repeated": self.repeated,
            "contaminated": dict(self.contaminated),
            "prompts": self.prompts,
            "answers": self.answers.to_json(),
            "by_group": {name: counts.to_json() for name, counts in self.by_group.items()},
            "kept": self.kept,
            "kept_by_group": dict(self.kept_by_group),
            "reused": self.reused,
            "tokens": self.tokens,
            "tokens_per_second": round(self.tokens / max(self.generating_seconds, 1e-9), 1),
            "seconds": round(self.seconds, 3),
            "notices": list(self.notices),
        }
