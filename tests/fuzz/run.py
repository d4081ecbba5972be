"""`make fuzz`: many seeded cases, one after the other; bad ones are listed with their seeds.

python tests/fuzz/run.py --count 8000 --seed 1 [--kind rows] [--only SEED] [--controls]
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz import cases, corpus, harness


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=list(cases.KINDS), action="append")
    parser.add_argument("--only", type=int, help="one seed of one kind, with all that it prints")
    parser.add_argument("--controls", action="store_true", help="the valid files must be accepted")
    parser.add_argument("--held-out", action="store_true", help="mutations that are for measuring")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after these")
    parser.add_argument("--corpus", type=Path, help="use this corpus, or make it there")
    arguments = parser.parse_args()
    kinds = arguments.kind or list(cases.KINDS)
    harness.warm_up()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        where = arguments.corpus or Path(scratch) / "corpus"
        if not where.exists():
            corpus.build(where)
        if arguments.only is not None:
            chosen = iter([cases.Case(kinds[0], arguments.only, arguments.held_out)])
        else:
            chosen = choose(kinds, arguments)
        end = time.monotonic() + arguments.seconds
        chosen = itertools.takewhile(lambda _: time.monotonic() < end, chosen)
        return report(chosen, where, Path(scratch) / "case", whole=arguments.only is not None)


def choose(kinds: Sequence[str], arguments: argparse.Namespace) -> Iterator[cases.Case]:
    if arguments.controls:
        yield from controls(kinds)
    for number in range(arguments.count):
        seed = arguments.seed * 1_000_000 + number // len(kinds)
        yield cases.Case(kinds[number % len(kinds)], seed, arguments.held_out)


def controls(kinds: Sequence[str]) -> Iterator[cases.Case]:
    """Every command with valid files, once: which of them a kind would change does not matter."""
    seen: set[tuple[tuple[str, ...], bool]] = set()
    for name in kinds:
        kind = cases.KINDS[name]
        for at, command in enumerate(kind.commands):
            if (command, kind.journal) not in seen:
                seen.add((command, kind.journal))
                yield cases.Case(name, -1 - at)


def report(chosen: Iterator[cases.Case], corpus: Path, folder: Path, *, whole: bool) -> int:
    """Run the cases and print what came of them; the exit code."""
    counts: dict[str, Counter[str]] = {}
    begun = time.monotonic()
    for case in chosen:
        result = cases.run(case, corpus, folder)
        bad = result.bad or (case.seed < 0 and result.outcome != "accepted")
        counts.setdefault(case.kind, Counter())["bad" if bad else result.outcome] += 1
        if bad or whole:
            said = result.ended.output if whole else "".join(result.ended.output.splitlines()[-1:])
            print(f"{case.kind!r} --only {case.seed}: {result.outcome}", flush=True)
            print(f"    {' '.join(result.arguments)}\n    {said[-3000:]}", flush=True)
    for kind, counted in counts.items():
        print(f"{kind}: {', '.join(f'{n} {what}' for what, n in sorted(counted.items()))}")
    total = sum(counts.values(), Counter[str]())
    print(f"{total.total()} cases: {dict(total)}, {time.monotonic() - begun:.0f} s")
    return int(total["bad"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
