"""`moemerge ls`: what there is to choose from."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from moemerge.cli.console import out, show_json
from moemerge.cli.flags import Json, add_verb

EXAMPLES = """
  moemerge ls methods
  moemerge ls architectures --json
"""


class What(StrEnum):
    methods = "methods"
    architectures = "architectures"


def add_to(app: typer.Typer) -> None:
    add_verb(app, ls, EXAMPLES)


def ls(what: Annotated[What, typer.Argument(help="What to list.")], json: Json = False) -> None:
    """List the merge methods or the model families."""
    from moemerge import api

    entries = api.list_methods() if what is What.methods else api.list_architectures()
    if json:
        show_json(entries)
        return
    from moemerge.cli import render

    table = render.methods_table if what is What.methods else render.families_table
    out.print(table(entries))
