"""`moemerge convert`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from moemerge.cli.flags import ModelArgument, Out, Overwrite, Reporting, add_verb

EXAMPLES = """
  moemerge convert merged/ fused/ --layout fused
  moemerge convert ./model out/ --layout fused --json -
"""


def add_to(app: typer.Typer) -> None:
    add_verb(app, convert, EXAMPLES)


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
