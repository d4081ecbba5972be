"""Problems drawn at random: the same arguments, the same problems."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal

from moemerge.errors import UsageError
from moemerge.registry import did_you_mean
from moemerge.testbed.tasks import arithmetic, chat, programs
from moemerge.testbed.tasks.problem import Problem, ProblemKind, is_test

KINDS: dict[str, tuple[ProblemKind, ...]] = {
    "math": arithmetic.KINDS,
    "code": programs.KINDS,
    "chat": chat.KINDS,
}
DOMAINS = tuple(KINDS)
Split = Literal["train", "test"]
# Draws in a row without a new problem after which a kind counts as used up.
_PATIENCE = 2000


def problems(
    domain: str, *, split: Split, count: int, seed: int, hard: bool = True
) -> list[Problem]:
    """`count` different problems, the domain's (hard or easy) kinds taking turns."""
    if domain not in KINDS:
        raise UsageError(
            f"unknown domain {domain!r}{did_you_mean(domain, DOMAINS)}",
            hint=f"known: {', '.join(DOMAINS)}",
        )
    kinds = [kind for kind in KINDS[domain] if kind.hard == hard]
    sources = [draw(domain, kind, split=split, seed=seed) for kind in kinds]
    found: list[Problem] = []
    while sources and len(found) < count:
        source = sources[len(found) % len(sources)]
        problem = next(source, None)
        if problem is None:
            sources.remove(source)
        else:
            found.append(problem)
    if len(found) < count:
        raise UsageError(
            f"{domain} has only {len(found)} {split} problems of this kind, {count} were asked for"
        )
    return found


def draw(domain: str, kind: ProblemKind, *, split: Split, seed: int) -> Iterator[Problem]:
    """Different problems of one kind, until it is used up."""
    rng = random.Random(f"{domain}/{kind.name}/{split}/{seed}")
    seen: set[str] = set()
    idle = 0
    while idle < _PATIENCE:
        prompt, answer = kind.draw(rng)
        idle += 1
        if prompt in seen or is_test(prompt) != (split == "test"):
            continue
        seen.add(prompt)
        idle = 0
        yield Problem(domain, kind.name, kind.hard, prompt, answer)
