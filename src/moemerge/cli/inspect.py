"""`moemerge inspect`, `moemerge ls` and `moemerge schema`: what can be shown without a tensor."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer

from moemerge.cli.console import out, show_json
from moemerge.cli.flags import Json, ModelArgument, add_verb
from moemerge.errors import CheckpointError
from moemerge.runtime.progress import counted

INSPECT_EXAMPLES = """
  moemerge inspect merged/
  moemerge inspect allenai/OLMoE-1B-7B-0125 --json
  moemerge inspect merged/ --verify
"""
LS_EXAMPLES = """
  moemerge ls methods
  moemerge ls wrappers
  moemerge ls architectures --json
"""
SCHEMA_EXAMPLES = """
  moemerge schema > moemerge.schema.json
  moemerge schema --plugin my_methods.py > moemerge.schema.json
"""
Verify = Annotated[
    bool, typer.Option("--verify", help="Compare all files with the checksums in the report.")
]


def add_to(app: typer.Typer) -> None:
    add_verb(app, inspect, INSPECT_EXAMPLES)
    add_verb(app, ls, LS_EXAMPLES)
    add_verb(app, schema, SCHEMA_EXAMPLES)


def inspect(model: ModelArgument, json: Json = False, verify: Verify = False) -> None:
    """Describe MODEL: family, layers, experts, gate, layout, bytes. Reads no tensor.

    With --verify, compare all files of a folder that moemerge has written with its checksums.
    """
    from moemerge import api

    if verify:
        _verify(model, json)
        return
    description = api.inspect(model)
    if json:
        show_json(asdict(description))
        return
    from moemerge.cli.render import description_table

    out.print(description_table(description))


def _verify(model: str, json: bool) -> None:
    from moemerge import api

    result = api.verify(model)
    if json:
        show_json(asdict(result))
    if result.differences:
        raise CheckpointError(
            f"{model} is not as it was written: {result.differences}",
            hint="copy or download the files again, or make the model again",
        )
    if not json:
        out.print(f"{counted(len(result.same), 'file')} as written, by size and CRC-32")


class What(StrEnum):
    methods = "methods"
    wrappers = "wrappers"
    architectures = "architectures"


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
