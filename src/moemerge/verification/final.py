"""Where in a text its final answer stands."""

from __future__ import annotations

import re
from typing import Final

_BOX: Final = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MARK: Final = re.compile(r"####[ \t]*([^\n]*)")
_PHRASE: Final = re.compile(r"\banswer\s*(?:is|:|=)+\s*:?\s*", re.I)
# A clause ends with its line or its sentence; the dot of 3.5 ends neither.
_END: Final = re.compile(r"\n|[.!?](?=\s|$)")


def boxed(text: str) -> list[str]:
    """The contents of every \\boxed{...}, braces balanced; one that never closes is left out."""
    return [
        content
        for match in _BOX.finditer(text)
        if (content := _balanced(text, match.end())) is not None
    ]


def _balanced(text: str, start: int) -> str | None:
    depth = 1
    for place in range(start, len(text)):
        if text[place] == "\\":
            continue
        escaped = text[place - 1] == "\\"
        if text[place] == "{" and not escaped:
            depth += 1
        elif text[place] == "}" and not escaped:
            depth -= 1
            if depth == 0:
                return text[start:place]
    return None


def stated(text: str) -> str | None:
    """What follows the last `####` or "the answer is"; None where neither stands."""
    marks = _MARK.findall(text)
    if marks and marks[-1].strip():
        return str(marks[-1]).strip()
    phrases = list(_PHRASE.finditer(text))
    if not phrases:
        return None
    rest = text[phrases[-1].end() :]
    end = _END.search(rest)
    clause = rest[: end.start()] if end else rest
    return clause.strip(" *_`") or None


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
