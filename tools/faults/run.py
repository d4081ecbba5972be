"""Let every system call that writes fail in turn (first part of `make faults`).

    python -m tools.faults.run [--verb merge] [--most 2]

A first run counts the calls of each kind. Then each call fails once with each error. OUT must be
complete or absent, the message must be a moemerge error, and only a journal may remain. Prints the
table of docs/reliability.md.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.fuzz import cases, corpus, harness

STATS = ("stats", "merged", "out", "--data", "math.jsonl", "-q")
VERBS = {
    "merge": cases.LINEAR,
    "calibrate": cases.CALIBRATE,
    "stats": STATS,
    "refit": cases.REFIT,
}
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EINTR)
CALLS = (
    *("open", "write", "pwrite", "pwritev", "ftruncate", "fsync", "fdatasync", "rename"),
    *("replace", "mkdir", "copy_file_range", "posix_fallocate"),
)
ERROR, DONE = "our error, no OUT", "done, OUT whole"
SHORT = -1  # a write that writes only a part of its data


@dataclass
class Shim:
    """Wrap functions of `os` and thread starts: count the calls and let one of them fail."""

    fails: tuple[str, int, int] | None = None  # call, its number, errno
    counts: Counter[str] = field(default_factory=Counter)
    ours: Path = field(default_factory=Path)

    def install(self) -> None:
        for name in CALLS:
            if hasattr(os, name):
                setattr(os, name, self._wrapped(name, getattr(os, name)))
        threading.Thread.start = self._wrapped("thread", threading.Thread.start)  # type: ignore[method-assign]
        import io

        # Buffered files do not write through `os`.
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
        """Count a call and raise if it must fail; return whether it must be a short write."""
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
    """Return the bytes of the weights or statistics by file name."""
    files = [out] if out.is_file() else sorted(out.glob("*.safetensors"))
    return {path.name: path.read_bytes() for path in files}


class Bench:
    """Runs commands on copies of the corpus, injects faults and judges the outcome."""

    def __init__(self, corpus_folder: Path, scratch: Path) -> None:
        self._corpus, self._scratch = corpus_folder, scratch
        self.whole: dict[str, dict[str, bytes]] = {}
        self.table: dict[tuple[str, str], Counter[str]] = {}
        self.places: Counter[tuple[str, str]] = Counter()  # failed calls by verb and call
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
        self.table.setdefault((verb, fails[0]), Counter())[outcome] += 1
        if outcome.startswith("BAD"):
            self.bad.append(f"{verb} {fails}: {outcome}: {ended.output.strip()[-200:]}")
            print(self.bad[-1], flush=True)

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
            return DONE if same and ended.code == 0 else "BAD: OUT differs"
        return ERROR if ended.code in harness.OURS else f"BAD: exit {ended.code}"

    def print(self) -> None:
        """Print a row for every verb and call with the outcomes of its faults."""
        print(f"| verb | call | places | faults | {ERROR} | {DONE} | otherwise |")
        print("|---" * 7 + "|")
        for verb in dict.fromkeys(verb for verb, _ in self.table):
            total = Counter[str]()
            for (of, call), outcomes in self.table.items():
                if of == verb:
                    total += outcomes
                    print(f"| {verb} | {call} | {self.places[verb, call]} | {_cells(outcomes)} |")
            places = sum(n for (of, _), n in self.places.items() if of == verb)
            print(f"| **{verb}** | all | {places} | {_cells(total)} |")
        print("\n".join(self.bad[:40]))


def _cells(outcomes: Counter[str]) -> str:
    others = outcomes.total() - outcomes[ERROR] - outcomes[DONE]
    return f"{outcomes.total()} | {outcomes[ERROR]} | {outcomes[DONE]} | {others}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verb", choices=list(VERBS), action="append")
    parser.add_argument("--call", choices=[*CALLS, "thread"], action="append")
    parser.add_argument(
        "--most",
        type=int,
        default=10**6,
        help="at most this number of places per call, evenly spaced",
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="start no fault after this time")
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
            calls = arguments.call or [*CALLS, "thread"]
            every_fault(bench, verb, calls, arguments.most, begun + arguments.seconds)
        bench.print()
        print(f"{time.monotonic() - begun:.0f} s")
    return int(bool(bench.bad))


def every_fault(bench: Bench, verb: str, calls: Sequence[str], most: int, end: float) -> None:
    for call, number in bench.count(verb, VERBS[verb]).items():
        if call not in calls:
            continue
        errors = (0,) if call == "thread" else ERRORS
        errors += (SHORT,) if call in ("write", "pwrite") else ()
        for at in range(0, number, max(1, -(-number // most))):
            if time.monotonic() >= end:
                return
            bench.places[verb, call] += 1
            for error in errors:
                bench.fault(verb, VERBS[verb], (call, at, error))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    raise SystemExit(main())
