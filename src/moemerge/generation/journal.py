"""The file that completions wait in: one line each, written as they come.

A completion is found again by its prompt's tokens and its sample, so a run that was killed goes on
where it was, and one with more prompts than before reuses what is there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

from moemerge.errors import DataError
from moemerge.generation.engine import Completion, Finish

KIND: Final = "moemerge completions"
EDITION: Final = 1


class CompletionJournal:
    """Completions of one model under one way of drawing (`made_by`). One process at a time."""

    def __init__(self, path: Path, made_by: Mapping[str, Any], *, restart: bool = False) -> None:
        self.path = path
        self._made_by = dict(made_by)
        self._known: dict[tuple[str, int], Completion] = {}
        self._file: IO[bytes] = path.open("ab+")
        try:
            self._lock()
            self._read(restart=restart)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def find(self, tokens: Sequence[int], prompt: int, sample: int) -> Completion | None:
        """What is there of this prompt and sample, for the prompt's place in the caller's list."""
        return self.get(prompt_key(tokens), prompt, sample)

    def get(self, key: str, prompt: int, sample: int) -> Completion | None:
        """`find` for a prompt whose key is known."""
        known = self._known.get((key, sample))
        if known is None or known.prompt == prompt:
            return known
        return Completion(prompt, sample, known.text, known.tokens, known.finish, known.detail)

    def finished(self) -> set[tuple[str, int]]:
        """The keys and samples of completions that need not be made again."""
        done = (item for item in self._known.items() if item[1].finish is not Finish.FAILED)
        return {key for key, _completion in done}

    def add(self, tokens: Sequence[int], completion: Completion) -> None:
        key = prompt_key(tokens)
        self._known[key, completion.sample] = completion
        self._write(
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

    def _write(self, line: Mapping[str, Any]) -> None:
        # A text cut within a character may hold halves of it, which JSON can and UTF-8 cannot say.
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"{self.path} is being written by another run",
                hint="wait for it, or give this one another output",
            ) from None

    def _read(self, *, restart: bool) -> None:
        self._file.seek(0)
        content = b"" if restart else self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        # What stands behind the last whole line was being written when its run was killed.
        self._file.truncate(len(whole))
        head = {"kind": KIND, "edition": EDITION, "made_by": self._made_by}
        if not whole:
            self._write(head)
            return
        lines = whole.splitlines()
        try:
            self._check(json.loads(lines[0]), head)
            for line in lines[1:]:
                self._remember(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self.path} is damaged ({type(error).__name__}: {error})",
                hint="delete it, or start anew with `overwrite=True`",
            ) from error

    def _check(self, stored: Mapping[str, Any], head: Mapping[str, Any]) -> None:
        if stored == json.loads(json.dumps(head)):
            return
        before = stored.get("made_by", {}) if isinstance(stored, dict) else {}
        differing = [
            f"{name} was {before.get(name)!r}, is {self._made_by.get(name)!r}"
            for name in {**before, **self._made_by}
            if json.loads(json.dumps(self._made_by.get(name))) != before.get(name)
        ]
        raise DataError(
            f"{self.path} holds completions of an unfinished run that was another: "
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
    """A prompt's name in the file: a hash of its tokens."""
    return hashlib.blake2b(struct.pack(f"<{len(tokens)}q", *tokens), digest_size=16).hexdigest()
