"""What every engine is asked and answers."""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


class Finish(enum.Enum):
    """Why a completion ended."""

    STOP = "stop"  # the model ended it, or a stop text did
    LENGTH = "length"  # cut: the most tokens, or the model's context
    FAILED = "failed"  # the engine could not make it


@dataclass(frozen=True)
class Wanted:
    """One completion that is asked for: which prompt and sample, and the prompt's token ids."""

    prompt: int  # its place in the caller's list
    sample: int
    tokens: tuple[int, ...]

    def stream(self, seed: int) -> int:
        """The seed of its own random numbers: other prompts and their order do not change them."""
        content = struct.pack(f"<QQ{len(self.tokens)}q", seed, self.sample, *self.tokens)
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Completion:
    """What came of one that was wanted."""

    prompt: int
    sample: int
    text: str  # without stop texts and special tokens
    tokens: int  # that were generated for it
    finish: Finish
    detail: str = ""  # what failed


class Engine(Protocol):
    """Runs one model over prompts and gives its completions as they end."""

    name: str

    def generate(self, wanted: Sequence[Wanted], total: int) -> Iterator[Completion]:
        """Completions as they are done, in any order; `total` counts those of runs before too."""
        ...

    def close(self) -> None: ...


def cut_at_stops(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop text in it, and whether there was one."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return (text[: min(places)], True) if places else (text, False)
