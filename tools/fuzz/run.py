"""Run many seeded fuzz cases and list the bad ones with their seeds (`make fuzz`).

python -m tools.fuzz.run --count 8000 --seed 1 [--kind rows] [--only SEED] [--controls]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tools.fuzz import cases, corpus, harness


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=list(cases.KINDS), action="append")
    parser.add_argument(
        "--only", type=int, help="run one seed of one kind and print its whole output"
    )
    parser.add_argument(
        "--controls", action="store_true", help="also check that valid files are accepted"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case after this time")
    parser.add_argument(
        "--limit", type=float, default=harness.TIME_LIMIT, help="seconds that a case may take"
    )
    parser.add_argument("--corpus", type=Path, help="folder of the corpus, built if missing")
    arguments = parser.parse_args()
    kinds = arguments.kind or list(cases.KINDS)
    harness.warm_up()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        where = arguments.corpus or Path(scratch) / "corpus"
        if not where.exists():
            corpus.build(where)
        if arguments.only is not None:
            chosen = iter([cases.Case(kinds[0], arguments.only)])
        else:
            chosen = choose(kinds, arguments)
        end = time.monotonic() + arguments.seconds
        chosen = itertools.takewhile(lambda _: time.monotonic() < end, chosen)
        run = functools.partial(
            cases.run, corpus=where, folder=Path(scratch) / "case", limit=arguments.limit
        )
        return report(chosen, run, whole=arguments.only is not None)


def choose(kinds: Sequence[str], arguments: argparse.Namespace) -> Iterator[cases.Case]:
    if arguments.controls:
        yield from controls(kinds)
    for number in range(arguments.count):
        seed = arguments.seed * 1_000_000 + number // len(kinds)
        yield cases.Case(kinds[number % len(kinds)], seed)


def controls(kinds: Sequence[str]) -> Iterator[cases.Case]:
    """Return every command once, on valid files."""
    seen: set[tuple[tuple[str, ...], bool]] = set()
    for name in kinds:
        kind = cases.KINDS[name]
        for at, command in enumerate(kind.commands):
            if (command, kind.journal) not in seen:
                seen.add((command, kind.journal))
                yield cases.Case(name, -1 - at)


def report(
    chosen: Iterator[cases.Case], run: Callable[[cases.Case], cases.Result], *, whole: bool
) -> int:
    """Run the cases, print their outcomes, and return the exit code."""
    counts: dict[str, Counter[str]] = {}
    begun = time.monotonic()
    for case in chosen:
        result = run(case)
        bad = result.bad or (case.seed < 0 and result.outcome != "accepted")
        counts.setdefault(case.kind, Counter())["bad" if bad else result.outcome] += 1
        if bad or whole:
            output = (
                result.ended.output if whole else "".join(result.ended.output.splitlines()[-1:])
            )
            print(f"{case.kind!r} --only {case.seed}: {result.outcome}", flush=True)
            print(f"    {' '.join(result.arguments)}\n    {output[-3000:]}", flush=True)
        if (done := sum(c.total() for c in counts.values())) % 500 == 0:
            print(f"{done} cases, {time.monotonic() - begun:.0f} s", flush=True)
    for kind, counted in counts.items():
        print(f"{kind}: {', '.join(f'{n} {what}' for what, n in sorted(counted.items()))}")
    total = sum(counts.values(), Counter[str]())
    print(f"{total.total()} cases: {dict(total)}, {time.monotonic() - begun:.0f} s")
    return int(total["bad"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
