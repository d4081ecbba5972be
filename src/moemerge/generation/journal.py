"""Completions on disk, one line each, in a `LineStore`.

A completion is identified by its prompt's tokens and its sample. A killed run resumes, and a run
with more prompts reuses all completions. A line survives the end of the process; it is not synced.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from moemerge.errors import DataError
from moemerge.generation.engine import Completion, Finish
from moemerge.runtime.journals import LineStore, OtherRunError

COMPLETIONS_KIND: Final = "moemerge completions"
COMPLETIONS_EDITION: Final = 2


class CompletionJournal:
    """Completions of one model with one set of sampling settings (`made_by`)."""

    def __init__(self, path: Path, made_by: Mapping[str, Any], *, restart: bool = False) -> None:
        self.path = path
        self._made_by = dict(made_by)
        self._known: dict[tuple[str, int], Completion] = {}
        head = {"kind": COMPLETIONS_KIND, "edition": COMPLETIONS_EDITION, "made_by": self._made_by}
        try:
            self._file = LineStore(path, head, restart=restart)
        except OtherRunError as error:
            raise self._another_run(error.stored) from error
        try:
            for line in self._file.lines:
                self._remember(line)
        except (ValueError, KeyError, TypeError) as error:
            self._file.close()
            raise DataError(
                f"{path} is damaged ({type(error).__name__}: {error})",
                hint="remove it, or start anew with `overwrite=True`",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def find(self, tokens: Sequence[int], prompt: int, sample: int) -> Completion | None:
        """Return the completion of this prompt and sample, with the prompt's index in the caller's
        list.
        """
        return self.get(prompt_key(tokens), prompt, sample)

    def get(self, key: str, prompt: int, sample: int) -> Completion | None:
        """`find` for a prompt whose key is known."""
        known = self._known.get((key, sample))
        if known is None or known.prompt == prompt:
            return known
        return Completion(prompt, sample, known.text, known.tokens, known.finish, known.detail)

    def finished(self) -> set[tuple[str, int]]:
        """Return the keys and samples of completions that did not fail."""
        done = (item for item in self._known.items() if item[1].finish is not Finish.FAILED)
        return {key for key, _completion in done}

    def add(self, tokens: Sequence[int], completion: Completion) -> None:
        key = prompt_key(tokens)
        self._known[key, completion.sample] = completion
        self._file.add(
            {
                "prompt": key,
                "sample": completion.sample,
                "text": completion.text,
                "tokens": completion.tokens,
                "finish": completion.finish.value,
                "detail": completion.detail,
            }
        )

    def __len__(self) -> int:
        return len(self._known)

    def _another_run(self, stored: Mapping[str, Any]) -> DataError:
        before = stored.get("made_by", {})
        before = before if isinstance(before, dict) else {}
        now = json.loads(json.dumps(self._made_by))
        differing = [
            f"{name} was {before.get(name)!r}, is {now.get(name)!r}"
            for name in {**before, **now}
            if now.get(name) != before.get(name)
        ]
        return DataError(
            f"{self.path} holds completions of another, unfinished run: "
            + ("; ".join(differing) or "written by another version"),
            hint="run that one again to finish it, or start anew with `overwrite=True`",
        )

    def _remember(self, line: Mapping[str, Any]) -> None:
        completion = Completion(
            prompt=-1,
            sample=line["sample"],
            text=line["text"],
            tokens=line["tokens"],
            finish=Finish(line["finish"]),
            detail=line["detail"],
        )
        self._known[line["prompt"], completion.sample] = completion


def prompt_key(tokens: Sequence[int]) -> str:
    """Return a prompt's key in the file: a hash of its tokens."""
    return hashlib.blake2b(struct.pack(f"<{len(tokens)}q", *tokens), digest_size=16).hexdigest()
