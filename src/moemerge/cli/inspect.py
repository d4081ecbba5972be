"""`moemerge inspect`, `moemerge ls` and `moemerge schema`: what can be shown without a tensor."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

import typer

from moemerge import api
from moemerge.cli import render
from moemerge.cli.console import out, show_json
from moemerge.cli.flags import Json, ModelArgument, verb
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


@verb(INSPECT_EXAMPLES)
def inspect(model: ModelArgument, json: Json = False, verify: Verify = False) -> None:
    """Describe MODEL: family, layers, experts, gate, layout, bytes. Reads no tensor.

    With --verify, compare all files of a folder that moemerge has written with its checksums.
    """
    if verify:
        _verify(model, json)
        return
    description = api.inspect(model)
    if json:
        show_json(asdict(description))
        return
    out.print(render.description_table(description))


def _verify(model: str, json: bool) -> None:
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


What = Literal["methods", "wrappers", "architectures"]


@verb(LS_EXAMPLES)
def ls(what: Annotated[What, typer.Argument(help="What to list.")], json: Json = False) -> None:
    """List the merge methods, the wrappers around them, or the model families."""
    shown = {
        "methods": (api.list_methods, render.methods_table),
        "wrappers": (api.list_wrappers, render.wrappers_table),
        "architectures": (api.list_architectures, render.families_table),
    }
    listing, table = shown[what]
    entries = listing()
    if json:
        show_json(entries)
        return
    out.print(table(entries))


@verb(SCHEMA_EXAMPLES)
def schema() -> None:
    """Print a JSON schema of config files, from which editors complete keys and mark mistakes.

    In VS Code (with its YAML extension) and others, a config's first line names it:
    `# yaml-language-server: $schema=moemerge.schema.json`
    """
    show_json(api.config_schema())
