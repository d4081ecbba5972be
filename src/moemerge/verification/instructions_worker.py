"""lm-eval's checkers of instructions, in a process of their own, since they draw in much else."""

from __future__ import annotations

import os
from typing import Any

# lm-eval fetches NLTK's data on import in the process of rank 0, and says it did where it failed.
os.environ["LOCAL_RANK"] = "1"

from langdetect import DetectorFactory
from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

from moemerge.verification.workers import serve

DetectorFactory.seed = 0  # otherwise a text's language is guessed anew each time
PUNKT = (
    "needs NLTK's sentence splitter, which is not installed: python -m nltk.downloader punkt_tab"
)


def judge(question: dict[str, Any]) -> dict[str, Any]:
    """Whether each instruction is followed; `error` says what kept a checker from telling."""
    followed, error = [], ""
    for name, given in zip(question["names"], question["given"], strict=True):
        try:
            followed.append(_followed(name, given, question["prompt"], question["response"]))
        except LookupError as lacking:
            followed.append(False)
            known = name in INSTRUCTION_DICT
            error = f"{name} {PUNKT}" if known else f"unknown instruction {lacking}"
        except Exception as other:  # a checker may trip over odd texts
            followed.append(False)
            error = f"{name}: {type(other).__name__}: {other}"
    return {"followed": followed, "error": error}


def _followed(name: str, given: dict[str, Any], prompt: str, response: str) -> bool:
    checker = INSTRUCTION_DICT[name](name)
    checker.build_description(**{key: value for key, value in given.items() if value})
    if "prompt" in (checker.get_instruction_args() or {}):
        checker.build_description(prompt=prompt)
    return bool(checker.check_following(response))


if __name__ == "__main__":
    serve(judge)
