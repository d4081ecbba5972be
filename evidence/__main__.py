"""`python -m evidence`: train small models, measure tables, print tables of recorded cells."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from evidence import natural, natural_table, tables, tune
from evidence.cells import Scale
from evidence.data import PRESETS, REGIMES
from evidence.experiments import EXPERIMENTS
from evidence.layout import ARCHITECTURES
from evidence.run import ALL, TableRequest, run_tables
from evidence.seed_tables import main_table, verdicts
from evidence.training import Job, train
from moemerge.errors import MoeMergeError, UsageError
from moemerge.lab.testbed import TrainedSet
from moemerge.lab.testbed.tasks import DOMAINS
from moemerge.runtime.progress import Silent


class Notes(Silent):
    """Prints notes about progress to stderr."""

    def note(self, message: str) -> None:
        print(message, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m evidence", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_train(commands.add_parser("train", help="train a base and its specialists"))
    _add_table(commands.add_parser("table", help="measure tables over several seeds"))
    shown = commands.add_parser("show", help="print tables of recorded cells as Markdown")
    shown.add_argument("cells", type=Path, help="cells.jsonl, or the same compressed with xz")
    shown.add_argument("names", nargs="+", choices=tables.TABLES, metavar="TABLE")
    tune.add_arguments(commands.add_parser("tune", help="compare `moemerge tune` with `train`"))
    natural.add_arguments(commands.add_parser("natural", help="train models on natural text"))
    natural_table.add_arguments(
        commands.add_parser("natural-table", help="merge, repair and measure models of `natural`")
    )
    options = parser.parse_args(arguments)
    run = {
        "train": _train,
        "table": _table,
        "show": _show,
        "tune": _tune,
        "natural": natural.main,
        "natural-table": natural_table.main,
    }[options.command]
    try:
        return run(options)
    except MoeMergeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--preset", required=True, choices=PRESETS)
    parser.add_argument("--regime", default="soft", choices=REGIMES)
    parser.add_argument("--arch", default="olmoe", choices=ARCHITECTURES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--domain", action="append", choices=DOMAINS, help="default: all")
    parser.add_argument("--steps-scale", type=float, default=1.0, help="factor on all steps")
    parser.add_argument("--device", default="auto")


def _train(options: argparse.Namespace) -> int:
    job = Job(
        options.out,
        options.preset,
        options.regime,
        options.arch,
        options.seed,
        tuple(options.domain or DOMAINS),
        options.steps_scale,
    )
    (trained,) = train([job], device=options.device, progress=Notes())
    print(_accuracies(trained))
    return 0


def _accuracies(trained: TrainedSet) -> str:
    lines = []
    for model, accuracy in trained.manifest["accuracy"].items():
        shares = ", ".join(f"{name} {100 * share:.1f} %" for name, share in accuracy.items())
        moved = trained.manifest["moved"].get(model, {})
        changes = "".join(f", {name} moved {share:.0%}" for name, share in moved.items())
        lines.append(f"{model}: {shares}{changes}")
    return "\n".join(lines)


def _add_table(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "experiments",
        nargs="+",
        metavar="EXPERIMENT",
        choices=[*EXPERIMENTS, ALL],
        help=f"{', '.join(EXPERIMENTS)} or {ALL}",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="finished cells are kept here")
    parser.add_argument("--preset", default="small", choices=PRESETS)
    parser.add_argument("--regime", action="append", choices=REGIMES, help="default: soft")
    parser.add_argument("--arch", default="olmoe", choices=ARCHITECTURES)
    parser.add_argument("--seeds", default="0-4", type=parse_seeds, help="such as 0-4 or 0,2,5")
    parser.add_argument("--sets", type=Path, help="folder of trained sets (default: OUT/sets)")
    parser.add_argument("--work", type=Path, help="folder of temporary models, such as /dev/shm")
    parser.add_argument("--methods", default="", help="comma-separated (default: the paper's)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, help="worker processes (default: one per core)")
    parser.add_argument("--problems", type=int, default=Scale.problems, help="per domain")
    parser.add_argument("--rows", type=int, default=Scale.rows, help="text per domain")
    parser.add_argument("--steps-scale", type=float, default=1.0, help="factor on all steps")


def _table(options: argparse.Namespace) -> int:
    scale = replace(
        Scale(),
        problems=options.problems,
        held_out=min(Scale.held_out, options.problems),
        rows=options.rows,
        tuning_steps=max(1, round(options.steps_scale * Scale.tuning_steps)),
    )
    request = TableRequest(
        experiments=tuple(options.experiments),
        out=options.out,
        preset=options.preset,
        regimes=tuple(dict.fromkeys(options.regime or ["soft"])),
        arch=options.arch,
        seeds=options.seeds,
        sets=options.sets,
        work=options.work,
        methods=tuple(name.strip() for name in options.methods.split(",") if name.strip()),
        device=options.device,
        jobs=options.jobs,
        scale=scale,
        steps_scale=options.steps_scale,
    )
    summaries, failures, written = run_tables(request, Notes())
    for summary in summaries:
        print(f"{summary.form.heading}\n\n{main_table(summary).markdown()}")
        print("\n".join(verdicts(summary)))
    print(f"All tables: {written[0]}")
    for failure in failures:
        print(f"failed: {failure.what}: {failure.why}", file=sys.stderr)
    return int(bool(failures))


def parse_seeds(text: str) -> tuple[int, ...]:
    """Return the seeds of a text such as `0-2,5`."""
    seeds: dict[int, None] = {}
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        numbers = (first, last) if dash else (first, first)
        if not all(number.isdecimal() for number in numbers) or int(numbers[0]) > int(numbers[1]):
            raise UsageError(f"--seeds {text}: expected numbers", hint="such as 0-4 or 0,2,5")
        seeds.update(dict.fromkeys(range(int(numbers[0]), int(numbers[1]) + 1)))
    return tuple(seeds)


def _show(options: argparse.Namespace) -> int:
    print("\n\n".join(tables.table(options.cells, name) for name in options.names))
    return 0


def _tune(options: argparse.Namespace) -> int:
    tune.main(options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
