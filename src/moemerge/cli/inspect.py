"""`moemerge inspect`: describe a model from its headers."""

from __future__ import annotations

from dataclasses import asdict

import typer

from moemerge.cli.console import out, show_json
from moemerge.cli.flags import Json, ModelArgument, add_verb

EXAMPLES = """
  moemerge inspect merged/
  moemerge inspect allenai/OLMoE-1B-7B-0125 --json
"""


def add_to(app: typer.Typer) -> None:
    add_verb(app, inspect, EXAMPLES)


def inspect(model: ModelArgument, json: Json = False) -> None:
    """Describe MODEL: family, layers, experts, gate, layout, bytes. Reads no tensor."""
    from moemerge import api

    description = api.inspect(model)
    if json:
        show_json(asdict(description))
        return
    from moemerge.cli.render import description_table

    out.print(description_table(description))
