"""Run commands with too little memory or too few file descriptors (third part of `make faults`).

    python -m tools.faults.limits [--verb merge] [--count 16]

Limits rise until a command succeeds. OUT must be complete or absent, only a journal may remain, and
the message must be a moemerge error. If a library aborts the process (C++ without memory), there is
no message. Then OUT must be absent, and a run without the limit must clean up and succeed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tools.faults.run import DONE, ERROR, VERBS, Bench
from tools.fuzz import corpus, harness

LEAST, MOST = 2**20, 2**31  # bytes of address space on top of the imports
DESCRIPTORS = 30  # on top of the open ones
LAST_RESORT = "the last resort's message, no OUT"
ENDED = "ended by a library, no OUT; a second run succeeds"


def address_space(room: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + room
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def descriptors(room: int) -> None:
    """Set the limit so that `room` more descriptors can be opened; low free numbers come first."""
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    free = (number for number in itertools.count() if number not in used)
    limit = next(itertools.islice(free, room, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def limits(count: int) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Yield the kind of limit, its size as text, and the function that sets it."""
    factor = (MOST / LEAST) ** (1 / max(1, count - 1))
    for number in range(count):
        room = int(LEAST * factor**number)
        yield "memory", f"{room / 2**20:.0f} MiB", partial(address_space, room)
    for number in range(count):
        room = number * DESCRIPTORS // max(1, count - 1)
        yield "descriptors", str(room), partial(descriptors, room)


def judge(bench: Bench, verb: str, first: Callable[[], None], log: Path) -> tuple[str, str]:
    """Run a command under a limit; return the outcome and the end of its output."""
    folder = bench.fresh()
    before = harness.tree(folder)
    ended = harness.command(VERBS[verb], folder, log, first=first)
    output = ended.output.strip()[-200:]
    if ended.code >= 0 or ended.hung:
        outcome = bench.judge(verb, ended, before, folder)
        return (LAST_RESORT if outcome == "BAD: exit 1" else outcome), output
    if (folder / "out").exists():
        return "BAD: OUT of a process that a library ended", output
    again = harness.command(VERBS[verb], folder, log)
    outcome = bench.judge(verb, again, before, folder)
    return (ENDED if outcome == DONE else f"{outcome} in the second run"), again.output[-200:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verb", choices=list(VERBS), action="append")
    parser.add_argument("--count", type=int, default=16, help="number of limits of each kind")
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
            bench.count(verb, VERBS[verb])  # records the output without a limit
            for kind, size, first in limits(arguments.count):
                outcome, output = judge(bench, verb, first, log)
                table.setdefault((verb, kind), Counter())[outcome] += 1
                bad += outcome.startswith("BAD")
                if outcome.startswith("BAD") or outcome == LAST_RESORT:
                    print(f"{verb}, {kind} {size}: {outcome}: {output}", flush=True)
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
