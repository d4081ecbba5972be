"""Problems drawn at random: the same arguments, the same problems."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal

from moemerge.errors import UsageError
from moemerge.registry import did_you_mean
from moemerge.testbed.tasks import arithmetic, chat, programs
from moemerge.testbed.tasks.problem import Family, Problem, is_test

FAMILIES: dict[str, tuple[Family, ...]] = {
    "math": arithmetic.FAMILIES,
    "code": programs.FAMILIES,
    "chat": chat.FAMILIES,
}
DOMAINS = tuple(FAMILIES)
Split = Literal["train", "test"]
# Draws in a row without a new problem after which a family counts as used up.
_PATIENCE = 2000


def problems(
    domain: str, *, split: Split, count: int, seed: int, hard: bool = True
) -> list[Problem]:
    """`count` different problems, the domain's (hard or easy) families taking turns."""
    if domain not in FAMILIES:
        raise UsageError(
            f"unknown domain {domain!r}{did_you_mean(domain, DOMAINS)}",
            hint=f"known: {', '.join(DOMAINS)}",
        )
    families = [family for family in FAMILIES[domain] if family.hard == hard]
    sources = [draw(domain, family, split=split, seed=seed) for family in families]
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


def draw(domain: str, family: Family, *, split: Split, seed: int) -> Iterator[Problem]:
    """Different problems of one family, until it is used up."""
    chance = random.Random(f"{domain}/{family.name}/{split}/{seed}")
    seen: set[str] = set()
    idle = 0
    while idle < _PATIENCE:
        prompt, answer = family.draw(chance)
        idle += 1
        if prompt in seen or is_test(prompt) != (split == "test"):
            continue
        seen.add(prompt)
        idle = 0
        yield Problem(domain, family.name, family.hard, prompt, answer)
