"""Kill every command that writes, and run it again (second part of `make faults`).

    python -m tools.faults.kills [--count 100] [--seed 1] [--verb tune]

SIGKILL, SIGTERM or SIGINT comes at a random time. Afterwards OUT must be absent or complete,
and a process that ended by itself has removed its temporary files. A second run, with `--resume` if
the command has it, must produce the bytes of an undisturbed run. No hidden folder, journal or
temporary file may remain.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

from tools.faults import verbs
from tools.fuzz import corpus, harness

LIMIT = 300.0  # seconds for an undisturbed run on a busy machine
ALONE = "ended before the kill, OUT whole"
AGAIN = "no OUT; a second run gives the same bytes"
GROWN = "OUT in part, as it may be; a second run gives the same"


class Killer:
    """Kills commands, repeats them and counts the outcomes."""

    def __init__(self, corpus_folder: Path, scratch: Path, seed: int) -> None:
        self._corpus, self._scratch = corpus_folder, scratch
        self._rng = random.Random(seed)
        self._whole: dict[str, dict[str, bytes]] = {}
        self._seconds: dict[str, float] = {}
        self.table: dict[str, Counter[str]] = {}
        self.bad: list[str] = []

    def learn(self, name: str) -> None:
        """Record the output and the duration of an undisturbed run."""
        verb, folder = verbs.VERBS[name], self._fresh()
        ended = self._run(verb.arguments, folder, LIMIT)
        assert ended.code == 0, f"{name}: {ended.output}"
        self._whole[name] = verbs.content(verb, folder / verb.out)
        assert self._whole[name], name
        self._seconds[name] = ended.seconds

    def kill(self, name: str) -> None:
        if name not in self._whole:
            self.learn(name)
        verb, folder = verbs.VERBS[name], self._fresh()
        before = harness.tree(folder)
        limit = self._rng.uniform(0.02, 1.02) * self._seconds[name]
        by = self._rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
        killed = self._run(verb.arguments, folder, limit, by)
        hidden = [path for path in harness.tree(folder) - before if ".partial" in path]
        if killed.code > 0 and hidden:
            outcome = f"BAD: {by.name} left {hidden[0]}"
        elif "Traceback" in killed.output and limit > 0.3:
            outcome = f"BAD: {by.name} printed a traceback"
        else:
            outcome = self._judge(name, verb, folder, before)
        self.table.setdefault(name, Counter())[outcome] += 1
        print(f"{name}, {by.name} after {limit:.2f} s: {outcome}", flush=True)
        if outcome.startswith("BAD"):
            self.bad.append(f"{name}, {by.name} after {limit:.2f} s: {outcome}")
            print(f"    {killed.output.strip()[-300:]}", flush=True)

    def _judge(self, name: str, verb: verbs.Verb, folder: Path, before: set[str]) -> str:
        out, whole = folder / verb.out, self._whole[name]
        there = out.exists()
        if there and not verb.grows:
            if verbs.content(verb, out) != whole:
                return "BAD: OUT differs"
            left = self._left(folder, before, verb)
            return ALONE if not left else self._swept(verb, folder, before)
        ended = self._run((*verb.arguments, *verb.again), folder, LIMIT)
        if ended.code != 0:
            return f"BAD: the second run ended with {ended.code}: {ended.output.strip()[-200:]}"
        if verbs.content(verb, out) != whole:
            return "BAD: the second run gave another OUT"
        left = self._left(folder, before, verb)
        if left:
            return f"BAD: left {sorted(left)[:3]}"
        return GROWN if there else AGAIN

    def _swept(self, verb: verbs.Verb, folder: Path, before: set[str]) -> str:
        """Check that a run that writes OUT again removes what the killed run left.

        The kill came between the last rename and the end of the process.
        """
        (shutil.rmtree if (folder / verb.out).is_dir() else Path.unlink)(folder / verb.out)
        ended = self._run((*verb.arguments, *verb.again), folder, LIMIT)
        left = self._left(folder, before, verb)
        return ALONE if ended.code == 0 and not left else f"BAD: left {sorted(left)[:3]}"

    def _left(self, folder: Path, before: set[str], verb: verbs.Verb) -> set[str]:
        made = harness.tree(folder) - before
        hidden = {p for p in made if ".partial" in p}  # also inside OUT
        return {p for p in made if p.split("/")[0] != verb.out} | hidden

    def _fresh(self) -> Path:
        folder = self._scratch / "case"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._corpus, folder, ignore=shutil.ignore_patterns("tmp", ".out.journal"))
        (folder / "tmp").mkdir()
        return folder

    def _run(
        self,
        arguments: tuple[str, ...],
        folder: Path,
        limit: float,
        by: signal.Signals = signal.SIGKILL,
    ) -> harness.Ended:
        return harness.command(arguments, folder, self._scratch / "log", limit, ends_by=by)

    def print(self) -> None:
        kinds = [k for k in (AGAIN, GROWN, ALONE) if any(k in c for c in self.table.values())]
        print(f"| verb | kills | {' | '.join(kinds)} | otherwise |")
        print("|---" * (len(kinds) + 3) + "|")
        for name, counted in self.table.items():
            others = counted.total() - sum(counted[kind] for kind in kinds)
            cells = [counted.total(), *(counted[kind] for kind in kinds), others]
            print(f"| {name} | {' | '.join(map(str, cells))} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verb", choices=list(verbs.VERBS), action="append")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no kill after this time")
    parser.add_argument("--corpus", type=Path, help="folder of the corpus, built if missing")
    arguments = parser.parse_args()
    names = arguments.verb or list(verbs.VERBS)
    harness.warm_up()
    with tempfile.TemporaryDirectory(prefix="kills-") as scratch:
        where = arguments.corpus or Path(scratch) / "corpus"
        if not where.exists():
            corpus.build(where)
        killer = Killer(where, Path(scratch), arguments.seed)
        begun = time.monotonic()
        for number in range(arguments.count):
            if time.monotonic() - begun < arguments.seconds:
                killer.kill(names[number % len(names)])
        killer.print()
        total = sum(killer.table.values(), Counter[str]())
        print(f"{total.total()} kills, {len(killer.bad)} bad, {time.monotonic() - begun:.0f} s")
    return int(bool(killer.bad))


if __name__ == "__main__":
    raise SystemExit(main())
