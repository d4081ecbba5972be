"""Kill one of several ranks: the others must exit soon with a clear message.

    python -m tools.faults.ranks [--kills 10] [--verb calibrate]

Runs of two and three ranks lose one rank by SIGKILL at a random time after their process group is
set up. The others must exit within 30 s with a moemerge error (torchrun would end them, but is not
used here). OUT must be complete or absent. Then one, two and three ranks repeat or resume the run,
and their results are compared with undisturbed runs. Prints the table of docs/ranks.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import select
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tools.faults.run import content
from tools.fuzz import cases, corpus, harness

LIMIT = 30.0  # seconds until the other ranks must have exited
MEETING = 120.0  # seconds to set up the process group
RANKS = (1, 2, 3)
VERBS = {
    "calibrate": (*corpus.CALIBRATE, "--holdout", "0"),
    "refit": (*cases.REFIT, "--holdout", "0", "--ridge", "0.01"),
    "merge": cases.LINEAR,
    "stats": ("stats", "merged", "out", "--data", "math.jsonl", "-q"),
}
LOST = "another rank ended or could not be reached"


@dataclass(frozen=True)
class Ended:
    code: int
    output: str
    seconds: float  # after the kill, or after the start


@dataclass
class Together:
    """Several ranks of one command."""

    arguments: Sequence[str]
    folder: Path
    ranks: int
    logs: list[Path] = field(default_factory=list)
    children: list[int] = field(default_factory=list)

    def start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for rank in range(self.ranks):
            log = self.folder / "tmp" / f"log-{rank}"
            met = self.folder / "tmp" / f"met-{rank}"
            first = partial(_become_rank, rank, self.ranks, port, met)
            work = harness.work_of(self.arguments, self.folder, first)
            self.logs.append(log)
            self.children.append(harness.start(work, self.folder, log))

    def meet(self) -> None:
        """Wait until all ranks have joined the process group."""
        met = [self.folder / "tmp" / f"met-{rank}" for rank in range(self.ranks)]
        end = time.monotonic() + MEETING
        while self.ranks > 1 and not all(path.exists() for path in met):
            if time.monotonic() > end:
                output = "".join(log.read_text() for log in self.logs if log.exists())
                raise SystemExit(f"{self.arguments}: {self.ranks} ranks did not meet: {output}")
            time.sleep(0.01)

    def wait(self, limit: float) -> list[Ended | None]:
        """Return how each rank ended; None for a rank that had to be killed at the limit."""
        begun = time.monotonic()
        ends: list[Ended | None] = []
        for child, log in zip(self.children, self.logs, strict=True):
            handle = os.pidfd_open(child)
            left = max(0.0, begun + limit - time.monotonic())
            over = not select.select([handle], [], [], left)[0]
            os.close(handle)
            if over:
                os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            output = log.read_text(encoding="utf-8", errors="replace")
            code = os.waitstatus_to_exitcode(status)
            ends.append(None if over else Ended(code, output, time.monotonic() - begun))
        return ends


def _become_rank(rank: int, ranks: int, port: int, met: Path) -> None:
    if ranks == 1:
        return
    from moemerge.runtime import ranks as several

    join = several.Ranks.join

    def join_and_report(device: object) -> object:
        joined = join(device)
        met.touch()
        return joined

    several.Ranks.join = join_and_report
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


class Bench:
    """Kills ranks, resumes the runs and counts the outcomes."""

    def __init__(self, corpus_folder: Path, scratch: Path) -> None:
        self._corpus, self._scratch = corpus_folder, scratch
        self._whole: dict[tuple[str, int], tuple[dict[str, bytes], float]] = {}
        self.table: Counter[tuple[str, str]] = Counter()
        self.bad: list[str] = []
        self.slowest = 0.0

    def whole(self, verb: str, ranks: int) -> tuple[dict[str, bytes], float]:
        """Return the weights of an undisturbed run and its duration in seconds."""
        if (verb, ranks) not in self._whole:
            folder = self._copy(self._corpus, "whole")
            run = Together(VERBS[verb], folder, ranks)
            run.start()
            run.meet()
            begun = time.monotonic()
            run.wait(300.0)
            self._whole[verb, ranks] = content(folder / "out"), time.monotonic() - begun
        return self._whole[verb, ranks]

    def kill(self, verb: str, ranks: int, rng: random.Random) -> None:
        for own in RANKS:
            self.whole(verb, own)
        folder = self._copy(self._corpus, "case")
        run = Together(VERBS[verb], folder, ranks)
        run.start()
        run.meet()
        moment, victim = rng.uniform(0.0, 1.0), rng.randrange(ranks)
        time.sleep(moment * self.whole(verb, ranks)[1])
        with contextlib.suppress(ProcessLookupError):
            os.kill(run.children[victim], signal.SIGKILL)
        ends = run.wait(LIMIT)
        others = [end for rank, end in enumerate(ends) if rank != victim]
        which = f"{verb}, rank {victim} of {ranks} at {moment:.0%}"
        if any(end is None for end in others):
            self._note(verb, "BAD: still running after 30 s", which, "")
            return
        for end in others:
            assert end is not None
            self.slowest = max(self.slowest, end.seconds)
            expected = end.code == 0 or (end.code == 3 and LOST in end.output)
            if not expected or "Traceback" in end.output:
                self._note(verb, f"BAD: exit code {end.code}", which, end.output)
                return
        self._repeat(verb, folder, ranks, which)

    def _repeat(self, verb: str, folder: Path, ranks: int, which: str) -> None:
        if (folder / "out").exists():
            same = content(folder / "out") in [self.whole(verb, own)[0] for own in RANKS]
            self._note(verb, "OUT was whole" if same else "BAD: OUT is another", which, "")
            return
        resumes = (folder / ".out.journal").exists()
        for own in RANKS:
            again = self._copy(folder, "again")
            words = [*VERBS[verb], *(["--resume"] if resumes else [])]
            end = self._run(words, again, own)
            if end is None or end.code != 0 or not (again / "out").exists():
                self._note(verb, f"BAD: {own} ranks", which, "" if end is None else end.output)
                continue
            mine = content(again / "out")
            same = mine == self.whole(verb, own)[0]
            how = f"of {ranks}, resumed" if resumes else f"of {ranks}, begun anew"
            off = "the same bytes" if same else self._off(verb, mine, own)
            self._note(verb, f"{how} by {own}: {off}", which, "")
            left = [p.name for p in again.iterdir() if p.name.startswith(".out")]
            if left:
                self._note(verb, f"BAD: {left[0]} is left", which, "")

    def _off(self, verb: str, mine: dict[str, bytes], ranks: int) -> str:
        """Return the largest difference relative to the change of the tensor."""
        from safetensors.torch import load

        before = {}
        for data in content(self._corpus / "merged").values():
            before |= load(data)
        largest = 0.0
        for name, data in self.whole(verb, ranks)[0].items():
            wanted, got = load(data), load(mine[name])
            for key, value in wanted.items():
                gap = float((value.double() - got[key].double()).norm())
                moved = float((value.double() - before[key].double()).norm())
                largest = max(largest, gap / moved if moved else gap)
        return f"off by 1e{len(f'{1 / largest:.0f}') * -1 + 1 if largest < 1 else 0} at most"

    def _run(self, words: Sequence[str], folder: Path, ranks: int) -> Ended | None:
        run = Together(words, folder, ranks)
        run.start()
        ends = run.wait(300.0)
        return max(ends, key=lambda end: -1 if end is None else end.code)

    def _copy(self, source: Path, name: str) -> Path:
        folder = self._scratch / name
        shutil.rmtree(folder, ignore_errors=True)
        ignored = ("tmp", *([".out.journal"] if source == self._corpus else []))
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns(*ignored))
        (folder / "tmp").mkdir()
        return folder

    def _note(self, verb: str, outcome: str, which: str, output: str) -> None:
        self.table[verb, outcome] += 1
        if outcome.startswith("BAD"):
            self.bad.append(f"{which}: {outcome}: {output.strip()[-300:]}")

    def lines(self) -> Iterator[str]:
        yield "| verb | outcome | times |"
        yield "|---|---|---|"
        for (verb, outcome), times in sorted(self.table.items()):
            yield f"| {verb} | {outcome} | {times} |"
        yield from self.bad
        yield f"the slowest of the others ended {self.slowest:.1f} s after the kill"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="kills per verb")
    parser.add_argument("--verb", choices=list(VERBS), action="append")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path)
    arguments = parser.parse_args()
    harness.warm_up()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="kills-") as scratch:
        where = arguments.corpus or Path(scratch) / "corpus"
        if not where.exists():
            corpus.build(where)
        bench = Bench(where, Path(scratch))
        for verb in arguments.verb or VERBS:
            for number in range(arguments.kills):
                bench.kill(verb, RANKS[1 + number % 2], rng)
        print("\n".join(bench.lines()))
    return int(bool(bench.bad))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    raise SystemExit(main())
