"""`moemerge schema`: print the JSON schema of configs for editors."""

from __future__ import annotations

import typer

from moemerge.cli.console import show_json
from moemerge.cli.flags import add_verb

EXAMPLES = """
  moemerge schema > moemerge.schema.json
  moemerge schema --plugin my_methods.py > moemerge.schema.json
"""


def add_to(app: typer.Typer) -> None:
    add_verb(app, schema, EXAMPLES)


def schema() -> None:
    """Print a JSON schema of config files, from which editors complete keys and mark mistakes.

    In VS Code (with its YAML extension) and others, a config's first line names it:
    `# yaml-language-server: $schema=moemerge.schema.json`
    """
    from moemerge import api

    show_json(api.config_schema())
