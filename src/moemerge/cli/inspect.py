"""`moemerge inspect`: describe a model from its headers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from moemerge.cli.console import out, show_json
from moemerge.cli.flags import Json, ModelArgument, add_verb
from moemerge.errors import CheckpointError
from moemerge.runtime.progress import counted

EXAMPLES = """
  moemerge inspect merged/
  moemerge inspect allenai/OLMoE-1B-7B-0125 --json
  moemerge inspect merged/ --verify
"""
Verify = Annotated[
    bool, typer.Option("--verify", help="Compare all files with the checksums in the report.")
]


def add_to(app: typer.Typer) -> None:
    add_verb(app, inspect, EXAMPLES)


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
