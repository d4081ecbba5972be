"""Held-out mutations: they measure robustness and were not used to improve it.

They know no format, only tokens. They splice files, replace numbers and quoted strings, and move,
reverse or repeat spans.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

NUMBERS = (
    b"0",
    b"-0",
    b"-7",
    b"4",
    b"5",
    b"17",
    b"255",
    b"65536",
    b"4294967295",
    b"1e9",
    b"-1e-9",
    b"1E400",
    b"0.1",
    b"1e-400",
    b"123456789012345678901234567890",
    b"2.5",
    b"00",
    b"1_0",
    b"0x1F",
    b"NaN",
    b"-Infinity",
)
WORDS = (
    b"null",
    b"true",
    b"false",
    b'""',
    b"[]",
    b"{}",
    b'"\\u0000"',
    b'"\\udfff"',
    b'"\\ud83d\\ude00"',
    b"''",
    b"[[[[]]]]",
    b'"${HOME}"',
    b'"%s%n"',
    b'"; rm -rf /"',
    b'"\\u001b]0;x\\u0007"',
    b'"C:\\\\x"',
    b"!!x",
    b"&a",
    b"*a",
    b"-",
    b":",
    b'"BF16"',
    b'"I64"',
    b'"mixtral"',
    b'"qwen3_moe"',
    b'"llama"',
    b'"WordPiece"',
    b'"BPE"',
    b'"gelu"',
    b'"yarn"',
)
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_WORD = re.compile(rb'"[^"\n]{1,60}"')


def numbers(data: bytes, rng: random.Random, _: bytes) -> bytes:
    return _exchange(_NUMBER, data, rng, lambda: rng.choice(NUMBERS))


def words(data: bytes, rng: random.Random, _: bytes) -> bytes:
    return _exchange(_WORD, data, rng, lambda: rng.choice(WORDS))


def foreign_words(data: bytes, rng: random.Random, other: bytes) -> bytes:
    """Replace quoted strings by quoted strings of another file."""
    known = _WORD.findall(other[:200_000]) or [b'"x"']
    return _exchange(_WORD, data, rng, lambda: rng.choice(known))


def _exchange(
    pattern: re.Pattern[bytes], data: bytes, rng: random.Random, value: Callable[[], bytes]
) -> bytes:
    matches = list(pattern.finditer(data[:200_000]))
    if not matches:
        return span(data, rng, b"")
    for match in sorted(
        rng.sample(matches, min(len(matches), rng.choice((1, 1, 2, 5)))), key=lambda m: -m.start()
    ):
        data = data[: match.start()] + value() + data[match.end() :]
    return data


def splice(data: bytes, rng: random.Random, other: bytes) -> bytes:
    """Return the head of this file and the tail of another."""
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


def span(data: bytes, rng: random.Random, _: bytes) -> bytes:
    """Move, reverse, repeat or bit-shift a span."""
    begin = rng.randrange(len(data) + 1)
    end = min(len(data), begin + rng.choice((2, 9, 33, 300)))
    piece = data[begin:end]
    what = rng.randrange(4)
    if what == 0:
        rest = data[:begin] + data[end:]
        at = rng.randrange(len(rest) + 1)
        return rest[:at] + piece + rest[at:]
    if what == 1:
        return data[:begin] + piece[::-1] + data[end:]
    if what == 2:
        return data[:end] + piece * rng.choice((1, 7, 400)) + data[end:]
    return data[:begin] + bytes((byte << 1) & 255 for byte in piece) + data[end:]


def whole(data: bytes, rng: random.Random, other: bytes) -> bytes:
    """Replace the whole file."""
    return rng.choice((other, b"", b"\n", b" ", data[::-1], other[: len(data)]))


MUTATIONS = (numbers, numbers, words, words, foreign_words, splice, span, span, whole)


def mutate(path: Path, corpus: Path, rng: random.Random) -> bytes:
    files = sorted(p for p in corpus.rglob("*") if p.is_file())
    return rng.choice(MUTATIONS)(path.read_bytes(), rng, rng.choice(files).read_bytes())
