"""`moemerge testbed`: models of our own to test merging with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from moemerge.cli import testbed_table
from moemerge.cli.console import interruptible, waiting
from moemerge.cli.flags import CommandGroup, Device, Out, Reporting, Resume, add_verb
from moemerge.runtime.journals import saved_path

if TYPE_CHECKING:
    from moemerge.cli.render import NumberTable
    from moemerge.testbed.training import TrainedSet

EXAMPLES = """
  moemerge testbed train --preset tiny --regime soft --arch olmoe specialists/
  moemerge testbed train --preset small --regime plain --arch qwen3_moe \\
      --seed 1 --device cuda specialists/
  moemerge testbed train --preset tiny --resume specialists/
"""

testbed = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Train small specialists, and repeat the experiments with them.",
)


def add_to(app: typer.Typer) -> None:
    add_verb(testbed, train, EXAMPLES)
    testbed_table.add_to(testbed)
    app.add_typer(testbed, name="testbed")


@dataclass(frozen=True)
class Training:
    """What is trained."""

    preset: Annotated[
        str, typer.Option(metavar="WORD", help="Size and length: tiny, small or demo.")
    ]
    regime: Annotated[
        str,
        typer.Option(
            metavar="WORD",
            help="soft: routers move much and weights little; plain: ordinary fine-tuning.",
        ),
    ] = "soft"
    arch: Annotated[
        str, typer.Option(metavar="WORD", help="Family of the models: olmoe or qwen3_moe.")
    ] = "olmoe"
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of weights and data.")] = 0
    domain: Annotated[
        list[str] | None,
        typer.Option(metavar="WORD", help="math, code or chat; repeat it (default: all three)."),
    ] = None
    steps_scale: Annotated[
        float, typer.Option(metavar="X", help="Factor on the preset's numbers of steps.")
    ] = 1.0
    device: Device = "auto"


def train(
    out_folder: Out, training: Training, reporting: Reporting, resume: Resume = False
) -> None:
    """Train a base and its math, code and chat specialists into OUT, with text to calibrate."""
    from moemerge.testbed.tasks import DOMAINS
    from moemerge.testbed.training import Job
    from moemerge.testbed.training import train as run

    job = Job(
        out_folder,
        training.preset,
        training.regime,
        training.arch,
        training.seed,
        tuple(training.domain or DOMAINS),
        training.steps_scale,
    )
    left = waiting(saved_path(out_folder), "--resume goes on with what was trained")
    with interruptible(left), reporting.progress() as bar:
        trained = run(job, device=training.device, resume=resume, progress=bar)
    reporting.show(trained.manifest, _table(trained))


def _table(trained: TrainedSet) -> NumberTable:
    """Accuracy of every model on every domain, and how far it moved from the base."""
    from moemerge.cli.render import NumberTable

    manifest, domains = trained.manifest, list(trained.models)
    table = NumberTable(
        ["model", *(f"{name} %" for name in domains), "routers moved", "weights moved"]
    )
    for model, accuracy in manifest["accuracy"].items():
        moved = manifest["moved"].get(model)
        distances = ("", "") if moved is None else (f"{v:.0%}" for v in moved.values())
        shares = (f"{100 * accuracy[name]:.1f}" for name in domains)
        table.add(model, *shares, *distances)
    return table
