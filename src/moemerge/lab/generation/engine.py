"""The protocol of engines: requested completions, finished completions."""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


class Finish(enum.StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # the model ended it, or a stop text did
    LENGTH = "length"  # cut at the most tokens, or at the end of the context
    FAILED = "failed"  # the engine could not make it


@dataclass(frozen=True)
class CompletionRequest:
    """A requested completion: its prompt, its sample, and the prompt's token ids."""

    prompt: int  # index in the caller's list
    sample: int
    tokens: tuple[int, ...]

    def stream(self, seed: int) -> int:
        """The seed of its random numbers. Other prompts and their order do not change it."""
        content = struct.pack(f"<QQ{len(self.tokens)}q", seed, self.sample, *self.tokens)
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")

    def completed(self, text: str, tokens: int, stops: Sequence[str], *, cut: bool) -> Completion:
        """Return its completion: the text before the first stop text."""
        text, stopped = cut_at_stops(text, stops)
        finish = Finish.LENGTH if cut and not stopped else Finish.STOP
        return Completion(self.prompt, self.sample, text, tokens, finish)

    def failed(self, detail: str) -> Completion:
        return Completion(self.prompt, self.sample, "", 0, Finish.FAILED, detail)


@dataclass(frozen=True)
class Completion:
    """A finished or failed completion."""

    prompt: int
    sample: int
    text: str  # without stop texts and special tokens
    tokens: int  # number of generated tokens
    finish: Finish
    detail: str = ""  # the error, if it failed

    @property
    def has_failed(self) -> bool:
        return self.finish is Finish.FAILED


class Engine(Protocol):
    """Runs one model on prompts and returns completions as they end."""

    name: str

    def generate(self, wanted: Sequence[CompletionRequest], total: int) -> Iterator[Completion]:
        """Yield completions as they end, in any order. `total` includes those of earlier runs."""
        ...

    def close(self) -> None: ...


def cut_at_stops(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Return the text before the first stop text, and whether there was one."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return (text[: min(places)], True) if places else (text, False)
