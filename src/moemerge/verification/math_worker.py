"""math-verify, in a process of its own. Started by `mathematics` through `workers`."""

from __future__ import annotations

import logging
from typing import Any

from math_verify import parse, verify

from moemerge.verification.workers import serve


def judge(question: dict[str, Any]) -> dict[str, Any]:
    """Compare a gold answer with the texts that may hold the given one, the first that agrees."""
    # A bare gold would be read only in part: 3\sqrt{13} as 3.
    gold = parse(f"${question['gold']}$", parsing_timeout=None)
    if question.get("bare"):  # which is what was published
        gold = parse(question["gold"], parsing_timeout=None)
    elif not gold:
        return {"grade": "undecided"}
    read = False
    for text in question["texts"]:
        answer = parse(text, parsing_timeout=None)
        read = read or bool(answer)
        if answer and verify(gold, answer, timeout_seconds=None):
            return {"grade": "right"}
    return {"grade": "wrong" if read else "no answer"}


if __name__ == "__main__":
    logging.disable()  # it warns with every call that the limits are ours
    serve(judge)
