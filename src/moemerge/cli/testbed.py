"""`moemerge testbed`: models of our own to test merging with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from moemerge.cli import options, testbed_table
from moemerge.cli.console import deliver_json, out, progress
from moemerge.cli.interrupts import interruptible
from moemerge.runtime.unfinished import saved_path

if TYPE_CHECKING:
    from rich.table import Table

    from moemerge.testbed.training import TrainedSet

EXAMPLES = """
Examples:

    moemerge testbed train --preset tiny --regime soft --arch olmoe --seed 0 specialists/

    moemerge testbed train --preset small --regime plain --arch qwen3_moe --seed 1 \\
        --device cuda specialists/

    moemerge testbed train --preset tiny --regime soft --arch olmoe --seed 0 --resume specialists/
"""

testbed = typer.Typer(
    no_args_is_help=True, help="Train small specialists, and repeat the experiments with them."
)


def add_to(app: typer.Typer) -> None:
    testbed.command("train", epilog=EXAMPLES)(train)
    testbed_table.add_to(testbed)
    app.add_typer(testbed, name="testbed")


def train(
    out_folder: options.Out,
    preset: Annotated[
        str, typer.Option("--preset", metavar="tiny|small|demo", help="Size and length.")
    ],
    regime: Annotated[
        str,
        typer.Option(
            "--regime",
            metavar="soft|plain",
            help="soft: routers move much and weights little; plain: ordinary fine-tuning.",
        ),
    ] = "soft",
    arch: Annotated[
        str, typer.Option("--arch", metavar="olmoe|qwen3_moe", help="Family of the models.")
    ] = "olmoe",
    seed: Annotated[int, typer.Option("--seed", help="Seed of weights and data.")] = 0,
    domain: Annotated[
        list[str] | None,
        typer.Option("--domain", help="math, code or chat; repeat it (default: all three)."),
    ] = None,
    steps_scale: Annotated[
        float, typer.Option("--steps-scale", help="Factor on the preset's numbers of steps.")
    ] = 1.0,
    device: options.Device = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where a killed training ended.")
    ] = False,
    json: options.JsonFile = None,
    quiet: options.Quiet = False,
) -> None:
    """Train a base and its math, code and chat specialists into OUT, with text to calibrate."""
    from moemerge.testbed.tasks import DOMAINS
    from moemerge.testbed.training import train as run

    saved = saved_path(out_folder)

    def left() -> str | None:
        return "--resume goes on with what was trained" if saved.exists() else None

    with interruptible(left), progress(quiet=quiet) as bar:
        trained = run(
            out_folder,
            preset=preset,
            regime=regime,
            arch=arch,
            seed=seed,
            domains=tuple(domain) if domain else DOMAINS,
            steps_scale=steps_scale,
            device=device,
            resume=resume,
            progress=bar,
        )
    if json is not None:
        deliver_json(trained.manifest, json)
    if json != "-":
        out.print(_table(trained))


def _table(trained: TrainedSet) -> Table:
    """Accuracy of every model on every domain, and how far it moved from the base."""
    from rich.table import Table

    told = trained.manifest
    domains = list(trained.models)
    table = Table("model", *(f"{name} %" for name in domains), "routers moved", "weights moved")
    for model, accuracy in told["accuracy"].items():
        moved = told["moved"].get(model)
        distances = ("", "") if moved is None else (f"{v:.0%}" for v in moved.values())
        shares = (f"{100 * accuracy[name]:.1f}" for name in domains)
        table.add_row(model, *shares, *distances)
    return table
