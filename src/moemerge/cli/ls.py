"""`moemerge ls` and `moemerge schema`: list what there is, print the JSON schema of configs."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from moemerge.cli.console import out, show_json
from moemerge.cli.flags import Json, add_verb

LS_EXAMPLES = """
  moemerge ls methods
  moemerge ls wrappers
  moemerge ls architectures --json
"""


class What(StrEnum):
    methods = "methods"
    wrappers = "wrappers"
    architectures = "architectures"


SCHEMA_EXAMPLES = """
  moemerge schema > moemerge.schema.json
  moemerge schema --plugin my_methods.py > moemerge.schema.json
"""


def add_to(app: typer.Typer) -> None:
    add_verb(app, ls, LS_EXAMPLES)
    add_verb(app, schema, SCHEMA_EXAMPLES)


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


def schema() -> None:
    """Print a JSON schema of config files, from which editors complete keys and mark mistakes.

    In VS Code (with its YAML extension) and others, a config's first line names it:
    `# yaml-language-server: $schema=moemerge.schema.json`
    """
    from moemerge import api

    show_json(api.config_schema())
