"""Every call that writes OUT, a journal or statistics fails in turn; runs are killed anywhere.

    python tests/faults/run.py [--kills 100]

For a merge, a calibration and a collection of statistics: a first run counts the calls of each
kind, then each of them fails once with each error. OUT must be whole or absent, the message ours,
nothing may be left but a journal; after a kill, a second run must end with the bytes of an
undisturbed one. Prints the table that docs/reliability.md holds.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz import cases, corpus, harness

STATS = ("stats", "merged", "out", "--data", "math.jsonl", "-q")
VERBS = {"merge": cases.LINEAR, "calibrate": cases.CALIBRATE, "stats": STATS}
KILLED = {
    **VERBS,
    "refit": cases.REFIT,
    "swap-routers": cases.SWAP,
    "run": ("run", "run.yml", "out", "-q"),
}
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EINTR)
CALLS = (
    *("open", "write", "pwrite", "pwritev", "ftruncate", "fsync", "fdatasync", "rename"),
    *("replace", "mkdir", "copy_file_range", "posix_fallocate"),
)
SHORT = -1  # stands for a write that writes less than it was given


@dataclass
class Shim:
    """Wraps functions of `os` (and thread starts): counts calls, and lets one of them fail."""

    fails: tuple[str, int, int] | None = None  # which call, its number, the error
    counts: Counter[str] = field(default_factory=Counter)
    ours: Path = field(default_factory=Path)

    def install(self) -> None:
        for name in CALLS:
            if hasattr(os, name):
                setattr(os, name, self._wrapped(name, getattr(os, name)))
        threading.Thread.start = self._wrapped("thread", threading.Thread.start)  # type: ignore[method-assign]
        import io

        # Buffered files: what `open(..., "wb")` gives writes past `os`.
        real = io.open

        def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if set(mode) & set("wax+") and isinstance(file, str | Path) and self._concerns(file):
                self._step("open")
                return _Failing(real(file, mode, *args, **options), self)
            return real(file, mode, *args, **options)

        import builtins

        builtins.open = io.open = opened  # type: ignore[assignment]

    def _concerns(self, path: str | Path) -> bool:
        return os.path.abspath(path).startswith(str(self.ours)) and "/tmp/" not in os.path.abspath(
            path
        ).removeprefix(str(self.ours))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if name == "open" and not (args[1] if len(args) > 1 else 0) & (os.O_WRONLY | os.O_RDWR):
                return real(*args, **options)
            short = self._step(name)
            if short and name in ("write", "pwrite"):
                return real(args[0], memoryview(args[1])[: max(1, len(args[1]) // 2)], *args[2:])
            return real(*args, **options)

        return call

    def _step(self, name: str) -> bool:
        """Count a call; raise where it is the one that fails. Whether it is to be short."""
        number = self.counts[name]
        self.counts[name] += 1
        if self.fails is None or self.fails[:2] != (name, number):
            return False
        if self.fails[2] == SHORT:
            return True
        if name == "thread":
            raise RuntimeError("can't start new thread")
        raise OSError(self.fails[2], os.strerror(self.fails[2]))


class _Failing:
    """A buffered file whose writes can fail."""

    def __init__(self, file: Any, shim: Shim) -> None:
        self._file, self._shim = file, shim

    def write(self, data: Any) -> Any:
        self._shim._step("write")
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Any:
        self._file.__enter__()
        return self

    def __exit__(self, *args: Any) -> Any:
        return self._file.__exit__(*args)


def content(out: Path) -> dict[str, bytes]:
    """The weights or statistics, by file; reports have times in them."""
    files = [out] if out.is_file() else sorted(out.glob("*.safetensors"))
    return {path.name: path.read_bytes() for path in files}


class Bench:
    def __init__(self, corpus_folder: Path, scratch: Path) -> None:
        self._corpus, self._scratch = corpus_folder, scratch
        self.whole: dict[str, dict[str, bytes]] = {}
        self.table: dict[tuple[str, str], Counter[str]] = {}
        self.bad: list[str] = []

    def fresh(self) -> Path:
        folder = self._scratch / "case"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._corpus, folder, ignore=shutil.ignore_patterns("tmp", ".out.journal"))
        (folder / "tmp").mkdir()
        return folder

    def count(self, verb: str, arguments: Sequence[str]) -> Counter[str]:
        folder = self.fresh()
        shim = Shim(ours=folder)
        kept = folder / "tmp" / "counts"

        def first() -> None:
            import atexit

            real_exit = os._exit

            def leave(code: int) -> None:
                kept.write_text("\n".join(f"{name} {n}" for name, n in shim.counts.items()))
                real_exit(code)

            shim.install()
            os._exit = leave  # type: ignore[assignment]
            atexit.register(lambda: None)

        ended = harness.command(arguments, folder, self._scratch / "log", first=first)
        assert ended.code == 0, ended.output
        self.whole[verb] = content(folder / "out")
        pairs = (line.split() for line in kept.read_text().splitlines())
        return Counter({name: int(number) for name, number in pairs})

    def fault(self, verb: str, arguments: Sequence[str], fails: tuple[str, int, int]) -> None:
        folder = self.fresh()
        before = harness.tree(folder)
        shim = Shim(fails, ours=folder)
        ended = harness.command(arguments, folder, self._scratch / "log", first=shim.install)
        outcome = self.judge(verb, ended, before, folder)
        error = "short" if fails[2] == SHORT else errno.errorcode.get(fails[2], "")
        self.note(
            verb,
            f"{fails[0]} {'' if fails[0] == 'thread' else error}".strip(),
            outcome,
            fails,
            ended,
        )

    def judge(self, verb: str, ended: harness.Ended, before: set[str], folder: Path) -> str:
        if ended.hung:
            return "BAD: hang"
        if "Traceback" in ended.output:
            return "BAD: traceback"
        left = {path for path in harness.tree(folder) - before if path.split(os.sep)[0] != "out"}
        left -= {path for path in left if path.startswith((".out.journal", "tmp/moemerge-error"))}
        out = folder / "out"
        if left:
            return f"BAD: left {sorted(left)[0]}"
        if out.exists():
            same = content(out) == self.whole[verb]
            return (
                "done, OUT whole"
                if same and ended.code == 0
                else "BAD: OUT is other than it should be"
            )
        return "our error, no OUT" if ended.code in harness.OURS else f"BAD: exit {ended.code}"

    def kill(self, verb: str, arguments: Sequence[str], rng: random.Random) -> None:
        folder = self.fresh()
        before = harness.tree(folder)
        limit = rng.uniform(0.02, 1.0)
        killed = harness.command(arguments, folder, self._scratch / "log", limit=limit)
        out = folder / "out"
        if out.exists() and content(out) != self.whole[verb]:
            self.note(verb, "kill", "BAD: OUT is other than it should be", limit, killed)
            return
        again = [
            *arguments,
            *(["--resume"] if verb in ("calibrate", "refit") and not out.exists() else []),
        ]
        if out.exists():
            self.note(verb, "kill", "done, OUT whole", limit, killed)
            return
        ended = harness.command(again, folder, self._scratch / "log")
        left = {path for path in harness.tree(folder) - before if path.split(os.sep)[0] != "out"}
        same = ended.code == 0 and content(out) == self.whole[verb] and not left
        outcome = (
            "no OUT; a second run gives the same bytes" if same else f"BAD: {sorted(left)[:1]}"
        )
        self.note(verb, "kill", outcome, limit, ended)

    def note(self, verb: str, what: str, outcome: str, which: object, ended: harness.Ended) -> None:
        self.table.setdefault((verb, what), Counter())[outcome] += 1
        if outcome.startswith("BAD"):
            self.bad.append(f"{verb} {which}: {outcome}: {ended.output.strip()[-200:]}")

    def print(self) -> None:
        print("| verb | fault | outcome | times |\n|---|---|---|---|")
        for (verb, what), outcomes in self.table.items():
            for outcome, times in outcomes.items():
                print(f"| {verb} | {what} | {outcome} | {times} |")
        print("\n".join(self.bad[:40]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--verb", choices=list(VERBS), action="append")
    parser.add_argument("--most", type=int, default=10**6, help="places of each call, evenly taken")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no fault after these")
    parser.add_argument("--corpus", type=Path)
    arguments = parser.parse_args()
    harness.warm_up()
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        where = arguments.corpus or Path(scratch) / "corpus"
        if not where.exists():
            corpus.build(where)
        bench = Bench(where, Path(scratch))
        begun = time.monotonic()
        for verb in arguments.verb or VERBS:
            every_fault(bench, verb, arguments.most, begun + arguments.seconds)
        random_kills(bench, arguments.kills, begun + 2 * arguments.seconds)
        bench.print()
        print(f"{time.monotonic() - begun:.0f} s")
    return int(bool(bench.bad))


def every_fault(bench: Bench, verb: str, most: int, end: float) -> None:
    for call, number in bench.count(verb, VERBS[verb]).items():
        errors = (0,) if call == "thread" else ERRORS
        errors += (SHORT,) if call in ("write", "pwrite") else ()
        for at in range(0, number, max(1, -(-number // most))):
            for error in errors:
                if time.monotonic() < end:
                    bench.fault(verb, VERBS[verb], (call, at, error))


def random_kills(bench: Bench, count: int, end: float) -> None:
    rng = random.Random(1)
    for number in range(count):
        verb = list(KILLED)[number % len(KILLED)]
        if verb not in bench.whole:
            folder = bench.fresh()
            harness.command(KILLED[verb], folder, folder.with_suffix(".log"))
            bench.whole[verb] = content(folder / "out")
        if time.monotonic() < end:
            bench.kill(verb, KILLED[verb], rng)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    raise SystemExit(main())
