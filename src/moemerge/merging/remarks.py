"""What methods had to say of single units: where they fell back, and by how much."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moemerge.merging.method import Facts

# Kinds of remarks, as the report sorts them.
AVERAGED = "averaged"
FEW_TOKENS = "few_tokens"
UNVISITED = "unvisited"
JITTER = "jitter"
SHOWN = 3  # units named in one notice; the report names all
_WORDS = {
    FEW_TOKENS: "were drawn towards the average, as a model sent them few tokens or none",
    UNVISITED: "were taken from the other models, as no gradient of a model reached them",
    AVERAGED: "were averaged, though the rest is not",
    JITTER: "were solved with jitter",
}


class Remarks:
    """Filled by many threads at once; told in the units' order."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, Facts]] = defaultdict(dict)
        self._lock = threading.Lock()

    def add(self, unit: str, kind: str, facts: Facts) -> None:
        with self._lock:
            self._found[kind][unit] = facts

    def to_json(self) -> dict[str, Any]:
        """By kind: how many units, and what was said of each."""
        return {
            kind: {
                "count": len(units),
                "units": {name: dict(units[name]) for name in sorted(units)},
            }
            for kind, units in sorted(self._found.items())
        }


def remark_notices(remarks: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each kind."""
    for kind, found in remarks.items():
        units: Mapping[str, Facts] = found["units"]
        shown = [f"{name} ({_facts(facts)})" for name, facts in list(units.items())[:SHOWN]]
        more = f", and {found['count'] - SHOWN} more" if found["count"] > SHOWN else ""
        words = _WORDS.get(kind, kind)
        yield f"{found['count']} units {words}: {_joined(shown)}{more}"


def _facts(facts: Facts) -> str:
    return ", ".join(
        f"{value}" if key == "why" else f"{key}: {value}" for key, value in facts.items()
    )


def _joined(parts: Sequence[str]) -> str:
    return ", ".join(parts)
