"""Flags that several verbs share. Their defaults live in the options' own dataclass."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moemerge.cli.console import STDOUT
from moemerge.errors import UsageError

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A merge config (YAML).")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; appears whole or not.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or a hub id org/name@rev.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


def _writable(target: str | None) -> str | None:
    """Told before any work, which would be lost."""
    if target is None or target == STDOUT:
        return target
    path = Path(target)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(
            f"--json {target}: "
            + ("is a folder" if path.is_dir() else f"there is no folder {path.parent}"),
            hint="name a file in a folder that exists, or - for stdout",
        )
    return target


JsonFile = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="FILE", help="Write the report there; - is stdout.", callback=_writable
    ),
]
Page = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="Write an HTML page of the routing there."),
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No progress, no notes.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Say more.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")]
Lenient = Annotated[
    bool,
    typer.Option("--lenient", help="Warn about keys that mergekit would ignore, do not refuse."),
]
ShardSize = Annotated[
    str, typer.Option("--out-shard-size", help="Largest shard, such as 5GB or 500MB.")
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the methods that draw at random.")]
AllowNonfinite = Annotated[
    bool, typer.Option("--allow-nonfinite", help="Merge models that hold NaN or infinity.")
]
