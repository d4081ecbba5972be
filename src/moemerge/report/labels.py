"""What models are called where space is short: the end of a path, as much as tells them apart."""

from __future__ import annotations

from collections.abc import Sequence

# Longer labels are cut in the middle where space is short: the ends of a path tell most.
SHORT = 28


def display_names(labels: Sequence[str]) -> list[str]:
    """Of each label its last path component, or so many more that different labels stay different.

    `out/ties` and `out/wudi` become `ties` and `wudi`; `a/merged` and `b/merged` stay as they are.
    The components of both sides of a `model+lora` are counted.
    """
    deepest = max((label.count("/") for label in labels), default=0) + 1
    for depth in range(1, deepest + 1):
        names = [_end(label, depth) for label in labels]
        if len(set(names)) == len(set(labels)):
            return names
    return list(labels)  # such as `out` and `out/`


def _end(label: str, depth: int) -> str:
    ends = ["/".join(part.rstrip("/").split("/")[-depth:]) for part in label.split("+")]
    return "+".join(ends) or label


def short(label: str, limit: int = SHORT) -> str:
    """A label within `limit` characters, its middle left out where it is longer."""
    label = " ".join(label.split())
    if len(label) <= limit:
        return label
    tail = (limit - 1) * 2 // 3
    return f"{label[: limit - 1 - tail]}…{label[-tail:]}"
