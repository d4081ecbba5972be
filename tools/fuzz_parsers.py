"""Fuzz every parser in this process, guided by coverage: millions of inputs, none may crash.

    python -m tools.fuzz_parsers --count 10000000 --seed 1 [--target rows] [--seconds 600]

A parser may return or raise a `MoeMergeError`. Anything else, or more than `TIME_LIMIT` seconds, is
a crash; its input is printed and can be run again with `--input`. One execution in `TRACED` is
traced: an input that reaches new lines joins the pool from which inputs are made.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import random
import re
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import moemerge
from moemerge.api.merging import load_config
from moemerge.checkpoint.adapter import open_adapter
from moemerge.checkpoint.folder import open_folder
from moemerge.checkpoint.safetensors_file import read_header
from moemerge.checkpoint.tensors import parse_size
from moemerge.config.coefficients import read_coefficients
from moemerge.errors import MoeMergeError
from moemerge.families.config_check import check_config
from moemerge.lab.evaluation.settings import load_task
from moemerge.lab.experiments.study_file import load_study
from moemerge.repairs.experts import read_experts
from moemerge.runtime.files import parse_object
from moemerge.runtime.journals import LineStore, read_lines
from moemerge.text.rows import TextRow, parse_row
from tools.fuzz import corpus, held_out, mutations

TIME_LIMIT = 5  # seconds of CPU time per execution
TRACED = 50  # one execution in this number is traced
STRUCTURED = 0.05  # share of inputs that are made by changing values, which takes longer
POOL = 400  # inputs of a target that are kept
LARGEST = 3000  # bytes of an input that joins the pool
SRC = str(Path(moemerge.__file__).parent)
Parse = Callable[[bytes], object]
TOKENS = (
    *held_out.NUMBERS,
    *held_out.WORDS,
    *(bit.encode("utf-8", "replace") for bit in mutations.YAML_BITS if len(bit) < 40),
    *(
        b"\n",
        b"\r\n",
        b"\0",
        b"\\ud800",
        b"\xff",
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b'"',
        b"  ",
        b"(?i)",
        b"\\\\1",
        b"9" * 400,
    ),
)
HEAD = {"task": "sums", "seed": 3}  # of a journal's lines
_PIECES = re.compile(rb'"[^"\n]{0,60}"|-?\d+(?:\.\d+)?|\w+')


class SlowParserError(BaseException):
    """An execution took longer than the time limit."""


@dataclass
class Target:
    """A parser, valid inputs, and what was found with them."""

    parse: Parse
    pool: list[bytes]
    share: int  # executions out of the sum of all shares; YAML takes ten times longer than JSON
    structured: mutations.Mutation = mutations.json_values
    lines: set[tuple[str, int, int]] = field(default_factory=set)
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


class Parsers:
    """The parsers as functions of bytes, with their files in a scratch folder."""

    def __init__(self, folder: Path) -> None:
        corpus.write_files(folder)
        self.folder = folder
        self._file = folder / "input"
        self._descriptor = os.memfd_create("header")
        files, _ = open_folder(folder / "code")
        self._shapes = next(iter(files.values())).tensors

    def stored_lines(self) -> bytes:
        with LineStore(self._file, HEAD) as store:
            for number in range(3):
                store.add({"number": number, "text": "one \ud800", "score": 0.5})
        return self._file.read_bytes()

    def header(self, data: bytes) -> object:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, data, 0)
        return read_header(self._descriptor, len(data), Path("x.safetensors"))

    def index(self, data: bytes) -> None:
        (self.folder / "math/model.safetensors.index.json").write_bytes(data)
        files, _ = open_folder(self.folder / "math")
        for opened in files.values():
            opened.close()

    def adapter(self, data: bytes) -> None:
        (self.folder / "adapter/adapter_config.json").write_bytes(data)
        open_adapter(self.folder / "adapter").file.close()

    def config(self, data: bytes) -> object:
        # A text without a line break would be a path.
        return load_config(data.decode("utf-8-sig", "replace") + "\n")

    def task(self, data: bytes) -> object:
        self._file.write_bytes(data)
        return load_task(self._file)

    def study(self, data: bytes) -> object:
        self._file.write_bytes(data)
        return load_study(self._file)

    def coefficients(self, data: bytes) -> object:
        self._file.write_bytes(data)
        return read_coefficients(self._file)

    def size(self, data: bytes) -> object:
        return parse_size(data.decode("utf-8", "replace"))

    def model_config(self, data: bytes) -> None:
        config = parse_object(data.decode("utf-8", "replace"), "config.json")
        check_config(config, self._shapes, "config.json")

    def rows(self, data: bytes) -> None:
        for number, line in enumerate(data.split(b"\n"), 1):
            if line.strip():
                parse_row(TextRow(f"x.jsonl, row {number}", line), columns={"text": "body"})

    def lines(self, data: bytes) -> object:
        self._file.write_bytes(data)
        return read_lines(self._file, HEAD)

    def experts(self, data: bytes) -> object:
        self._file.write_bytes(data)
        return read_experts(self._file)


def targets(folder: Path) -> dict[str, Target]:
    """Return every parser with its valid inputs."""
    parsers = Parsers(folder)
    rows = [*(folder / "rows.jsonl").read_bytes().splitlines(), b'{"body": "x"}']
    configs = [(folder / name).read_bytes() for name in corpus.CONFIGS]
    model, adapter = folder / "code/config.json", folder / "adapter/adapter_config.json"
    experts = b'{"0": [0, 1, [2, 3]], "1": [3, 2, 1, 0]}'
    header = mutations.header_values
    return {
        "rows": Target(parsers.rows, rows, 400),
        "safetensors header": Target(parsers.header, [_header(), _header(3)], 200, header),
        "lines of a journal": Target(parsers.lines, [parsers.stored_lines()], 100),
        "config.json": Target(parsers.model_config, [model.read_bytes()], 60),
        "file of experts": Target(parsers.experts, [experts], 100),
        "adapter config": Target(parsers.adapter, [adapter.read_bytes()], 40),
        "index": Target(parsers.index, [_small_index(folder)], 20),
        "size": Target(parsers.size, [b"5GB", b"1.5 MiB"], 30),
        "YAML config": Target(parsers.config, configs, 20, mutations.yaml_lines),
        "task": Target(parsers.task, [corpus.TASK.encode()], 40, mutations.yaml_lines),
        "study": Target(parsers.study, [corpus.STUDY.encode()], 10, mutations.yaml_lines),
        "coefficients": Target(
            parsers.coefficients, [corpus.COEFFICIENTS.encode()], 30, mutations.yaml_lines
        ),
    }


def _header(tensors: int = 1) -> bytes:
    """Return a small valid safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for number in range(tensors):
        entry = {"dtype": "F32", "shape": [2, 1], "data_offsets": [8 * number, 8 * number + 8]}
        header[f"model.layers.{number}.weight"] = entry
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(8 * tensors)


def _small_index(folder: Path) -> bytes:
    """Return an index of a few tensors: the others are found in the files."""
    path = folder / "math/model.safetensors.index.json"
    places = json.loads(path.read_bytes())["weight_map"]
    few = dict(list(places.items())[:2] + list(places.items())[-2:])
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": few}).encode()


# --- mutation -----------------------------------------------------------------------------------


def mutated(target: Target, rng: random.Random) -> bytes:
    """Return an input of the pool with a few random changes; some stay well-formed."""
    pool = target.pool
    data = rng.choice(pool)
    if rng.random() < STRUCTURED:
        with contextlib.suppress(Exception):  # the input is no longer well-formed
            return target.structured(data, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4, 8))):
        data = rng.choice(_CHANGES)(data, rng, pool)
    if data[:1] != b"{" and len(data) > 9 and data[8:9] == b"{" and rng.random() < 0.7:
        # A safetensors file: let its length agree with its header again.
        end = data.rfind(b"}") + 1
        data = struct.pack("<Q", max(0, end - 8)) + data[8:]
    return data


def _flip(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    if not data:
        return rng.randbytes(3)
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _token(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(TOKENS) + data[at + rng.choice((0, 0, 1, 4)) :]


def _piece(data: bytes, rng: random.Random, pool: Sequence[bytes]) -> bytes:
    """Replace a word, number or quoted string by a token, or by one of another input."""
    begin = rng.randrange(len(data) + 1)
    found = _PIECES.search(data, begin) or _PIECES.search(data)
    if found is None:
        return _token(data, rng, pool)
    new = rng.choice(TOKENS)
    if rng.random() < 0.3:
        other = rng.choice(pool)
        match = _PIECES.search(other, rng.randrange(len(other) + 1))
        new = match[0] if match else new
    return data[: found.start()] + new + data[found.end() :]


def _span(data: bytes, rng: random.Random, pool: Sequence[bytes]) -> bytes:
    """Delete, repeat or move a span, or insert one of another input."""
    begin = rng.randrange(len(data) + 1)
    end = min(len(data), begin + rng.choice((1, 3, 10, 40)))
    piece = data[begin:end]
    what = rng.randrange(4)
    if what == 0:
        return data[:begin] + data[end:]
    if what == 1:
        return data[:end] + piece * rng.choice((1, 2, 50)) + data[end:]
    if what == 2:
        rest = data[:begin] + data[end:]
        at = rng.randrange(len(rest) + 1)
        return rest[:at] + piece + rest[at:]
    other = rng.choice(pool)
    at = rng.randrange(len(other) + 1)
    return data[:begin] + other[at : at + rng.choice((5, 30, 200))] + data[begin:]


_CHANGES = (_flip, _token, _token, _piece, _piece, _piece, _span)


# --- execution ----------------------------------------------------------------------------------


class Tracer:
    """Collects the line transitions inside the package."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, int, int]] = set()

    def __enter__(self) -> Tracer:
        self.seen = set()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(SRC):
            return None
        before, seen, name = [0], self.seen, f"{code.co_filename}:{code.co_firstlineno}"

        def line(frame: FrameType, event: str, argument: object) -> Any:
            seen.add((name, before[0], frame.f_lineno))
            before[0] = frame.f_lineno
            return line

        return line


def execute(target: Target, data: bytes) -> str:
    """Run one input and return `accepted`, `refused` or the crash."""
    signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT)
    try:
        target.parse(data)
    except MoeMergeError:
        return "refused"
    except (Exception, SlowParserError):
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return "accepted"


def fuzz(target: Target, count: int, rng: random.Random, end: float) -> list[tuple[bytes, str]]:
    """Run `count` inputs and return those that crashed."""
    crashes: list[tuple[bytes, str]] = []
    tracer = Tracer()
    if not target.lines:
        for data in target.pool:
            with tracer:
                outcome = execute(target, data)
            assert outcome == "accepted", f"a valid input: {outcome}"
            target.lines |= tracer.seen
    for number in range(count):
        if number % 256 == 0 and time.monotonic() > end:
            break
        data = mutated(target, rng)
        if number % TRACED:
            outcome = execute(target, data)
        else:
            with tracer:
                outcome = execute(target, data)
            if len(data) < LARGEST and not tracer.seen <= target.lines:
                target.lines |= tracer.seen
                target.pool.append(data)
                if len(target.pool) > POOL:
                    del target.pool[rng.randrange(20, POOL)]  # the first are the valid ones
        if outcome not in ("accepted", "refused"):
            crashes.append((data, outcome))
            outcome = "crash"
        target.outcomes[outcome] += 1
    return crashes


def _too_slow(*_: object) -> None:
    raise SlowParserError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", action="append")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this time")
    parser.add_argument("--input", help="run this input (base64) of the one target")
    arguments = parser.parse_args()
    signal.signal(signal.SIGPROF, _too_slow)
    with tempfile.TemporaryDirectory(prefix="parsers-", dir="/dev/shm") as scratch:
        every = targets(Path(scratch) / "corpus")
        chosen = {name: every[name] for name in arguments.target or every}
        if arguments.input is not None:
            (target,) = chosen.values()
            print(execute(target, base64.b64decode(arguments.input)))
            return 0
        return campaign(chosen, arguments.count, arguments.seed, arguments.seconds)


def campaign(chosen: dict[str, Target], count: int, seed: int, seconds: float) -> int:
    """Fuzz the targets in turns, print a table, and return the exit code."""
    begun = time.monotonic()
    shares = sum(target.share for target in chosen.values())
    found: dict[str, str] = {}
    rounds = max(1, count // 100_000)
    for turn in range(rounds):
        for name, target in chosen.items():
            rng = random.Random(f"{name}/{seed}/{turn}")
            start = time.monotonic()
            number = count * target.share // shares // rounds
            for data, crash in fuzz(target, number, rng, begun + seconds):
                place = crash.strip().splitlines()[-1]
                if f"{name}: {place}" not in found:
                    found[f"{name}: {place}"] = crash
                    print(
                        f"{name}: {crash}\n    --input {base64.b64encode(data).decode()}",
                        flush=True,
                    )
            target.seconds += time.monotonic() - start
        if time.monotonic() > begun + seconds:
            break
        done = sum(target.outcomes.total() for target in chosen.values())
        print(f"{done} executions, {time.monotonic() - begun:.0f} s", flush=True)
    print(
        "| parser | executions | refused | accepted | crashes | transitions of lines | a second |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, target in chosen.items():
        counts, total = target.outcomes, target.outcomes.total()
        print(
            f"| {name} | {total} | {counts['refused']} | {counts['accepted']} | {counts['crash']} "
            f"| {len(target.lines)} | {total / max(1e-9, target.seconds):.0f} |"
        )
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
