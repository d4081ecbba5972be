"""Commands and tables as a terminal shows them, in the process of the tests."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType
from typer.testing import CliRunner, Result

from moemerge.cli.app import app


def moemerge(*words: object, columns: int = 200) -> Result:
    """`moemerge WORDS`, on a terminal that is wide enough for long paths."""
    runner = CliRunner(env={"COLUMNS": str(columns), "NO_COLOR": "1"})
    return runner.invoke(app, [str(word) for word in words])


def succeed(*words: object) -> Result:
    result = moemerge(*words)
    assert result.exit_code == 0, result.output
    return result


def printed(table: RenderableType, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table, crop=False)
    return console.file.getvalue()
