"""`moemerge ls`: what there is to choose from."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from moemerge.cli.console import out, show_json

EXAMPLES = """
Examples:

    moemerge ls methods

    moemerge ls architectures --json
"""


class What(StrEnum):
    methods = "methods"
    architectures = "architectures"


def add_to(app: typer.Typer) -> None:
    app.command("ls", epilog=EXAMPLES)(ls)


def ls(
    what: Annotated[What, typer.Argument(help="What to list.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the merge methods or the model families."""
    from moemerge import api

    entries = api.list_methods() if what is What.methods else api.list_architectures()
    if json:
        show_json(entries)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in entries[0]:
        table.add_column(column.replace("_", " "), overflow="fold")
    for entry in entries:
        table.add_row(*(_cell(v) for v in entry.values()))
    out.print(table)


def _cell(value: object) -> str:
    from rich.markup import escape

    if isinstance(value, list):
        return escape(", ".join(map(str, value))) or "-"
    return escape("" if value is None else str(value))
