"""`moemerge stats`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from moemerge.cli import options
from moemerge.cli.calibrate import SettingsCommand, Whole, Word
from moemerge.cli.console import STDOUT, deliver_json, err, out, progress

if TYPE_CHECKING:
    from moemerge.collecting import CollectReport

EXAMPLES = """
Examples:

    moemerge stats org/math math.stats --data math.jsonl

    moemerge stats org/code code.fisher --data code.jsonl --kind fisher --max-tokens 200000

    moemerge stats ./model a.stats --data a.jsonl --data b.jsonl --device cuda --json a.json
"""
SHOWN = 5  # unvisited experts that are named without --verbose


class StatsCommand(SettingsCommand):
    def fields(self) -> Mapping[str, Any]:
        from moemerge.config.collecting import CollectingSettings

        return CollectingSettings.model_fields


def add_to(app: typer.Typer) -> None:
    app.command("stats", epilog=EXAMPLES, cls=StatsCommand)(stats)


OutFile = Annotated[
    Path, typer.Argument(metavar="OUT.stats", help="File to write; appears whole or not.")
]
Data = Annotated[
    list[str],
    typer.Option(
        "--data", metavar="FILE", help="The model's text (.jsonl, .jsonl.gz, .parquet). Repeat it."
    ),
]


def stats(
    model: options.Model,
    out_file: OutFile,
    data: Data,
    kind: Word = None,
    max_tokens: Whole = None,
    max_length: Whole = None,
    limit: Whole = None,
    seed: Whole = None,
    offload: Word = None,
    device: Word = None,
    dtype: Word = None,
    overwrite: options.Overwrite = False,
    json: options.JsonFile = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Gather what `regmean` and `fisher` must know of MODEL, over text of its domain.

    The file serves every later merge of that model, in whatever layout it is stored.
    """
    values: dict[str, Any] = {
        "kind": kind,
        "max_tokens": max_tokens,
        "max_length": max_length,
        "limit": limit,
        "seed": seed,
        "offload": offload,
        "device": device,
        "dtype": dtype,
    }
    from moemerge import api

    with progress(quiet=quiet) as bar:
        report = api.collect_statistics(
            model,
            out_file,
            data=data,
            overwrite=overwrite,
            progress=bar,
            **{name: value for name, value in values.items() if value is not None},
        )
    if json is not None:
        deliver_json(report.to_json(), json)
    if not quiet:
        for notice in report.notices:
            err.print(f"[yellow]note:[/] {escape(notice)}", soft_wrap=True)
    if json != STDOUT:
        out.print(escape("\n".join(_lines(report, verbose=verbose))), soft_wrap=True)


def _lines(report: CollectReport, *, verbose: bool) -> list[str]:
    from moemerge.checkpoint import format_size

    source = report.provenance
    lines = [
        f"{report.kind} statistics of {source.model}: {report.units} units, "
        f"{source.tokens} tokens in {source.sequences} sequences, {report.seconds:.1f} s",
        f"written to {report.output} ({format_size(report.nbytes)})",
    ]
    missed = report.unvisited_experts
    if missed:
        lines.append(f"no token came to {len(missed)} units of experts:")
        lines += [f"  {key}" for key in (missed if verbose else missed[:SHOWN])]
        if not verbose and len(missed) > SHOWN:
            lines.append(f"  and {len(missed) - SHOWN} more (-v names them)")
    return lines
