"""`moemerge ls`: list methods, wrappers and model families."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from moemerge.cli.console import out, show_json
from moemerge.cli.flags import Json, add_verb

EXAMPLES = """
  moemerge ls methods
  moemerge ls wrappers
  moemerge ls architectures --json
"""


class What(StrEnum):
    methods = "methods"
    wrappers = "wrappers"
    architectures = "architectures"


def add_to(app: typer.Typer) -> None:
    add_verb(app, ls, EXAMPLES)


def ls(what: Annotated[What, typer.Argument(help="What to list.")], json: Json = False) -> None:
    """List the merge methods, the wrappers around them, or the model families."""
    from moemerge import api

    listings = {
        What.methods: api.list_methods,
        What.wrappers: api.list_wrappers,
        What.architectures: api.list_architectures,
    }
    entries = listings[what]()
    if json:
        show_json(entries)
        return
    from moemerge.cli import render

    tables = {
        What.methods: render.methods_table,
        What.wrappers: render.wrappers_table,
        What.architectures: render.families_table,
    }
    out.print(tables[what](entries))
