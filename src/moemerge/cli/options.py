"""Flags that several verbs share. Their defaults live in the options' own dataclass."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A merge config (YAML).")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; appears whole or not.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or a hub id org/name@rev.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write the report there; - is stdout."),
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
