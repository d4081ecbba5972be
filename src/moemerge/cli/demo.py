"""`moemerge demo`: routing breaks and heals, in front of you."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from moemerge.cli import options
from moemerge.cli.console import err, out, progress, show_json
from moemerge.errors import UsageError

EXAMPLES = """
Examples:

    moemerge demo

    moemerge demo demo-output --seed 1 --json
"""
INTRODUCTION = (
    "Two tiny OLMoE specialists (random weights, made now) are merged in two ways, and the "
    "routers of each merge are averaged, or calibrated with 96 rows of each specialist's text."
)
LEGEND = (
    "Against each specialist's own routing, on text that no step has seen. mismatch: expert "
    "choices that differ. tokens: those with any such choice. KL: of the routing distributions."
)


def add_to(app: typer.Typer) -> None:
    app.command("demo", epilog=EXAMPLES)(demo)


def demo(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="Where the models are made.")
    ] = Path("demo-output"),
    seed: Annotated[int, typer.Option("--seed", help="Seed of the specialists.")] = 0,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Make tiny specialists, merge them, calibrate the routers, and compare."""
    from dataclasses import asdict

    from moemerge.testbed.demo import run_demo

    _clear(folder)
    if not quiet:
        err.print(INTRODUCTION)
    with progress(quiet=True) as bar:
        rows = []
        for row in run_demo(folder, bar, seed=seed):
            rows.append(row)
            if not quiet:
                err.print(f"  measured {row.method}, routers: {row.routers}")
    if json:
        show_json([asdict(row) for row in rows])
        return
    from moemerge.cli.render import demo_table

    out.print(demo_table(rows))
    out.print(f"\n{LEGEND}")
    out.print(f"The models and their reports are in {folder}/.", markup=False)


def _clear(folder: Path) -> None:
    """A demo may be run again; anything else in the folder is not ours to remove."""
    marker = folder / ".moemerge-demo"
    if folder.exists() and any(folder.iterdir()):
        if not marker.exists():
            raise UsageError(f"{folder} exists and is no demo", hint="choose another folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    marker.touch()
