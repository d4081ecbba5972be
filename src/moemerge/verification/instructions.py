"""Check verifiable instructions (IFEval) with lm-eval's checkers."""

from __future__ import annotations

import importlib.util
from typing import Any, Final

from moemerge.errors import DataError, UsageError
from moemerge.verification.judgement import RIGHT, Fields, Grade, Judgement, Verifier
from moemerge.verification.workers import WorkerPool

INSTRUCTIONS_SECONDS: Final = 20.0  # per answer
NEEDED: Final = ("lm_eval", "nltk", "langdetect", "immutabledict")


class InstructionsVerifier(Verifier):
    """Checks that a response follows all instructions of its row."""

    name = "instructions"

    def __init__(self, *, workers: int = 1, seconds: float = INSTRUCTIONS_SECONDS) -> None:
        missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise UsageError(
                f"checking instructions needs {', '.join(missing)}, which is not installed",
                hint='pip install "moemerge[eval]"',
            )
        self._pool = WorkerPool("instructions", size=workers, seconds=seconds)
        self._seconds = seconds

    def relevant(self, row: Fields) -> Any:
        names, given = row.get("instruction_id_list"), row.get("kwargs")
        lists = isinstance(names, list) and isinstance(given, list)
        if not lists or not names or len(names) != len(given or ()):
            raise DataError(
                f"no instructions in a row with {', '.join(sorted(row))}",
                hint="a row of IFEval has 'instruction_id_list' and as many 'kwargs'",
            )
        kept = [{k: v for k, v in (one or {}).items() if v is not None} for one in given or ()]
        return [names, kept, str(row.get("prompt", ""))]

    def check(self, row: Fields, response: str) -> Judgement:
        if not response.strip():
            return Judgement(Grade.NO_ANSWER, "an empty response")
        names, given, prompt = self.relevant(row)
        question = {"names": names, "given": given, "prompt": prompt, "response": response}
        answer = self._pool.ask(question)
        if answer is None:
            return Judgement(Grade.TIMEOUT, f"checking took more than {self._seconds:g} s")
        failed = [name for name, right in zip(names, answer["followed"], strict=True) if not right]
        if answer["error"]:
            return Judgement(Grade.UNDECIDED, answer["error"])
        if not failed:
            return RIGHT
        share = f"{len(names) - len(failed)} of {len(names)} instructions followed"
        return Judgement(Grade.WRONG, f"{share}; not {', '.join(failed)}")

    def close(self) -> None:
        self._pool.close()
