"""`moemerge convert` and `moemerge swap-routers`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from moemerge.cli.flags import ModelArgument, Out, Overwrite, Reporting, add_verb
from moemerge.runtime.progress import counted

CONVERT_EXAMPLES = """
  moemerge convert merged/ fused/ --layout fused
  moemerge convert ./model out/ --layout fused --json -
"""
SWAP_EXAMPLES = """
  moemerge swap-routers merged/ --from org/math swapped/
  moemerge swap-routers org/math --from merged/ swapped/ --layers last:4 --link
"""


def add_to(app: typer.Typer) -> None:
    add_verb(app, convert, CONVERT_EXAMPLES)
    add_verb(app, swap_routers, SWAP_EXAMPLES, "swap-routers")


def convert(
    model: ModelArgument,
    out_folder: Out,
    reporting: Reporting,
    layout: Annotated[
        str, typer.Option(metavar="WORD", help="per-expert (as published) or fused (transformers).")
    ],
    overwrite: Overwrite = False,
) -> None:
    """Write MODEL with its experts in another layout to OUT, bit for bit.

    Some engines read only one of the layouts and skip the tensors of the other.
    """
    from moemerge import api
    from moemerge.checkpoint import format_size
    from moemerge.cli.render import facts

    chosen: Any = layout
    with reporting.progress() as bar:
        report = api.convert(model, out_folder, layout=chosen, overwrite=overwrite, progress=bar)
    rows = [
        ("layout", report.layout),
        ("tensors", f"{report.tensors_after:,}, before {report.tensors_before:,}"),
        ("output", format_size(report.output_bytes)),
        ("folder", report.output),
    ]
    reporting.show(report.to_json(), facts(rows), notices=report.notices)


def swap_routers(
    model: ModelArgument,
    out_folder: Out,
    donor: Annotated[
        str, typer.Option("--from", metavar="OTHER", help="The model whose routers are taken.")
    ],
    reporting: Reporting,
    layers: Annotated[
        str, typer.Option(metavar="LAYERS", help="Which layers: all, last:4, 8-15 or 0,2,5-7.")
    ] = "all",
    # Copies by default: later changes to the original must not change OUT.
    link: Annotated[
        bool,
        typer.Option(
            "--link/--copy", help="Hard links of the shards without routers, or copies of them."
        ),
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Write MODEL with the routers of OTHER to OUT: weights, biases and selection biases.

    Evaluating the result shows how much of a merge's damage is routing.
    """
    from moemerge import api
    from moemerge.cli.render import facts

    with reporting.progress() as bar:
        report = api.swap_routers(
            model,
            donor,
            out_folder,
            layers=layers,
            link=link,
            overwrite=overwrite,
            progress=bar,
        )
    rows = [
        ("weights", report.model),
        ("routers", f"{report.routers_of} ({counted(len(report.tensors), 'tensor')})"),
        ("layers", ", ".join(map(str, report.layers))),
        ("folder", report.output),
    ]
    reporting.show(report.to_json(), facts(rows))
