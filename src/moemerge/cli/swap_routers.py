"""`moemerge swap-routers`."""

from __future__ import annotations

from typing import Annotated

import typer

from moemerge.cli import options
from moemerge.cli.console import STDOUT, deliver_json, out, progress

EXAMPLES = """
Examples:

    moemerge swap-routers merged/ --from org/math merged-with-math-routers/

    moemerge swap-routers org/math --from merged/ math-with-merged-routers/ --layers last:4 --link
"""
# Shards are copied unless links are asked for: a folder of its own cannot surprise anybody.
LINK = False


def add_to(app: typer.Typer) -> None:
    app.command("swap-routers", epilog=EXAMPLES)(swap_routers)


def swap_routers(
    model: options.Model,
    out_folder: options.Out,
    donor: Annotated[
        str, typer.Option("--from", metavar="OTHER", help="The model whose routers are taken.")
    ],
    layers: Annotated[
        str, typer.Option("--layers", help="Which layers: all, last:4, 8-15 or 0,2,5-7.")
    ] = "all",
    link: Annotated[
        bool,
        typer.Option(
            "--link/--copy", help="Hard links of the shards without routers, or copies of them."
        ),
    ] = LINK,
    overwrite: options.Overwrite = False,
    json: options.JsonFile = None,
    quiet: options.Quiet = False,
) -> None:
    """Write MODEL with the routers of OTHER to OUT: weights, biases and all that moves a choice.

    With it, whatever you evaluate a model with tells how much of a merge's damage is routing.
    """
    from moemerge import api
    from moemerge.cli.render import facts

    with progress(quiet=quiet) as bar:
        report = api.swap_routers(
            model,
            donor,
            out_folder,
            layers=layers,
            link=link,
            overwrite=overwrite,
            progress=bar,
        )
    if json is not None:
        deliver_json(report.to_json(), json)
    if json != STDOUT:
        numbers = ", ".join(map(str, report.layers))
        rows = [
            ("weights", report.model),
            ("routers", f"{report.routers_of} ({len(report.tensors)} tensors)"),
            ("layers", numbers),
            ("folder", report.output),
        ]
        out.print(facts(rows))
