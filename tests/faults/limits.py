"""`make faults`, its third part: verbs with too little memory, and with too few descriptors.

    python tests/faults/limits.py [--verb merge] [--count 16]

Limits rise evenly (memory by factors) from next to nothing to where a verb succeeds. OUT must be
whole or absent, nothing may be left but a journal, and the message must be ours. Where a library
ends the process by itself, as C++ does that cannot allocate, no message can be: OUT must be absent,
and a second run without the limit must sweep what is left and succeed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults.run import DONE, ERROR, VERBS, Bench
from fuzz import corpus, harness

LEAST, MOST = 2**20, 2**31  # bytes of address space beyond what importing has taken
DESCRIPTORS = 30  # beyond those that are open
LAST_RESORT = "the last resort's message, no OUT"
ENDED = "ended by a library, no OUT; a second run succeeds"


def address_space(room: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + room
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def descriptors(room: int) -> None:
    """So low that `room` more can be opened: numbers that are free are taken first."""
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    free = (number for number in itertools.count() if number not in used)
    limit = next(itertools.islice(free, room, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def limits(count: int) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Kind, its size in words, and what a child does first."""
    factor = (MOST / LEAST) ** (1 / max(1, count - 1))
    for number in range(count):
        room = int(LEAST * factor**number)
        yield "memory", f"{room / 2**20:.0f} MiB", partial(address_space, room)
    for number in range(count):
        room = number * DESCRIPTORS // max(1, count - 1)
        yield "descriptors", str(room), partial(descriptors, room)


def judge(bench: Bench, verb: str, first: Callable[[], None], log: Path) -> tuple[str, str]:
    """What became of a verb under a limit, and its last words."""
    folder = bench.fresh()
    before = harness.tree(folder)
    ended = harness.command(VERBS[verb], folder, log, first=first)
    said = ended.output.strip()[-200:]
    if ended.code >= 0 or ended.hung:
        outcome = bench.judge(verb, ended, before, folder)
        return (LAST_RESORT if outcome == "BAD: exit 1" else outcome), said
    if (folder / "out").exists():
        return "BAD: OUT of a process that a library ended", said
    again = harness.command(VERBS[verb], folder, log)
    outcome = bench.judge(verb, again, before, folder)
    return (ENDED if outcome == DONE else f"{outcome} in the second run"), again.output[-200:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verb", choices=list(VERBS), action="append")
    parser.add_argument("--count", type=int, default=16, help="limits of each kind")
    arguments = parser.parse_args()
    harness.warm_up()
    table: dict[tuple[str, str], Counter[str]] = {}
    bad = 0
    with tempfile.TemporaryDirectory(prefix="limits-") as scratch:
        where = Path(scratch) / "corpus"
        corpus.build(where)
        bench, log = Bench(where, Path(scratch)), Path(scratch) / "log"
        begun = time.monotonic()
        for verb in arguments.verb or VERBS:
            bench.count(verb, VERBS[verb])  # what it writes without a limit
            for kind, size, first in limits(arguments.count):
                outcome, said = judge(bench, verb, first, log)
                table.setdefault((verb, kind), Counter())[outcome] += 1
                bad += outcome.startswith("BAD")
                if outcome.startswith("BAD") or outcome == LAST_RESORT:
                    print(f"{verb}, {kind} {size}: {outcome}: {said}", flush=True)
    kinds = (ERROR, DONE, LAST_RESORT, ENDED)
    print(f"| verb | limit | runs | {' | '.join(kinds)} | otherwise |")
    print("|---" * (len(kinds) + 4) + "|")
    for (verb, kind), counted in table.items():
        others = counted.total() - sum(counted[each] for each in kinds)
        cells = [counted.total(), *(counted[each] for each in kinds), others]
        print(f"| {verb} | {kind} | {' | '.join(map(str, cells))} |")
    print(f"{bad} bad, {time.monotonic() - begun:.0f} s")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
