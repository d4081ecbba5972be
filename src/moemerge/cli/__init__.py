"""The command line: verbs, flags, exit codes. The only room that prints or sets up logging."""

from __future__ import annotations


def main() -> None:
    """Entry point of the `moemerge` command."""
    from moemerge.cli.app import app

    app(prog_name="moemerge")
