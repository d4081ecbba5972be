"""`moemerge diagnose`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from moemerge.cli import options
from moemerge.cli.calibrate import Number, SettingsCommand, Sources, Whole, Word, named
from moemerge.cli.console import STDOUT, deliver_json, out, progress, tell_page

EXAMPLES = """
Examples:

    moemerge diagnose merged/ --source math=org/math --data math=math-test.jsonl \\
        --source code=org/code --data code=code-test.jsonl --report routing.html

    moemerge diagnose merged/ --against calibrated/ --source a=A --data a=a.jsonl \\
        --source b=B --data b=b.jsonl --swaps

    moemerge diagnose merged/ --source a=A --data a=a.jsonl --max-tokens 20000 --json figures.json
"""


class DiagnosisCommand(SettingsCommand):
    def fields(self) -> Mapping[str, Any]:
        from moemerge.config.diagnosis import DiagnosisSettings

        return DiagnosisSettings.model_fields


def add_to(app: typer.Typer) -> None:
    app.command("diagnose", epilog=EXAMPLES, cls=DiagnosisCommand)(diagnose)


Data = Annotated[
    list[str],
    typer.Option(
        "--data",
        metavar="NAME=FILE",
        help="Its text (.jsonl, .jsonl.gz, .parquet), best held out from any calibration.",
    ),
]
Against = Annotated[
    list[str] | None,
    typer.Option("--against", metavar="MODEL", help="Measure this model beside. Repeat it."),
]
Swaps = Annotated[bool | None, typer.Option("--swaps/--no-swaps", show_default=False)]


def diagnose(
    model: options.Model,
    source: Sources,
    data: Data,
    against: Against = None,
    layers: Word = None,
    max_tokens: Whole = None,
    max_length: Whole = None,
    limit: Whole = None,
    seed: Whole = None,
    holdout: Number = None,
    offload: Word = None,
    device: Word = None,
    dtype: Word = None,
    swaps: Swaps = None,
    report: options.Page = None,
    json: options.JsonFile = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Show what a merge did to the routing of MODEL: where, how much, and what to do about it.

    MODEL and each source are run over the same tokens; the choices that the experts' routers make
    are compared layer by layer. It does not matter which tool merged MODEL.
    """
    values: dict[str, Any] = {
        "layers": layers,
        "max_tokens": max_tokens,
        "max_length": max_length,
        "limit": limit,
        "seed": seed,
        "holdout": holdout,
        "offload": offload,
        "device": device,
        "dtype": dtype,
        "swaps": swaps,
    }
    sources = {name: models[0] for name, models in named("--source", source, single=True).items()}
    texts = named("--data", data)
    from moemerge import api

    with progress(quiet=quiet) as bar:
        found = api.diagnose(
            model,
            sources=sources,
            data=texts,
            against=against or (),
            report=report,
            progress=bar,
            **{name: value for name, value in values.items() if value is not None},
        )
    if json is not None:
        deliver_json(found.to_json(), json)
    if json != STDOUT:
        from moemerge.cli.diagnosis_table import diagnosis_report

        out.print(diagnosis_report(found, verbose=verbose))
    tell_page(report, quiet=quiet)
