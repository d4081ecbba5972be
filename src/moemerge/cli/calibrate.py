"""`moemerge calibrate` and `moemerge run`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from moemerge.cli.console import interruptible
from moemerge.cli.flags import (
    Config,
    Out,
    Reporting,
    Sources,
    Texts,
    Weights,
    add_verb,
    given,
    numbers,
)
from moemerge.config.calibration import CalibrationSettings
from moemerge.config.refit import RefitSettings
from moemerge.config.settings import MergeSettings, OutputSettings
from moemerge.runtime.journals import journal_path

CALIBRATE_EXAMPLES = """
  moemerge calibrate merged/ out/ \\
      --source math=org/math --data math=math.jsonl \\
      --source code=org/code --data code=code.jsonl \\
      --source base=org/base --data base=general.jsonl
  moemerge calibrate merged/ out/ --source a=A --data a=a.jsonl \\
      --source b=B --data b=b.jsonl --weight b=2 --layers last:4
  moemerge calibrate merged/ out/ --source a=A --data a=a.jsonl --resume
"""
RUN_EXAMPLES = """
  moemerge run ties.yml model/
  moemerge run ties.yml model/ --device cuda --strict --json report.json
  moemerge run ties.yml model/ --alpha 0.5 --layers last:4
  moemerge run ties.yml model/ --resume
"""


def add_to(app: typer.Typer) -> None:
    add_verb(app, calibrate, CALIBRATE_EXAMPLES, several=True)
    add_verb(app, run, RUN_EXAMPLES)


def calibrate(
    merged: Annotated[str, typer.Argument(metavar="MERGED", help="The merged model.")],
    out_folder: Out,
    source: Sources,
    data: Texts,
    settings: CalibrationSettings,
    output: OutputSettings,
    reporting: Reporting,
    weight: Weights = None,
) -> None:
    """Solve for the routers of MERGED so that they agree with its sources' routing."""
    from moemerge import api
    from moemerge.cli.routing_table import calibration_report

    with interruptible(what_is_left(out_folder)), reporting.progress() as bar:
        done = api.calibrate(
            merged,
            out_folder,
            sources=source,
            data=data,
            weights=numbers("--weight", weight),
            settings=settings,
            progress=bar,
            **given(output),
        )
    table = calibration_report(done, verbose=reporting.verbose)
    reporting.show(done.to_json(), table, page=output.report)


def run(
    config: Config,
    out_folder: Out,
    settings: MergeSettings,
    calibration: CalibrationSettings,
    refit: RefitSettings,
    output: OutputSettings,
    reporting: Reporting,
) -> None:
    """Merge as CONFIG says, then repair as its `calibration:` or `refit:` block says, into OUT.

    Flags of the repair beat the block.
    """
    from moemerge import api
    from moemerge.cli.render import merge_report
    from moemerge.cli.routing_table import calibration_report, refit_report

    with interruptible(what_is_left(out_folder)), reporting.progress() as bar:
        done = api.run(
            config,
            out_folder,
            settings=settings,
            calibration=given(calibration),
            refit=given(refit),
            resume=output.resume,
            report=output.report,
            progress=bar,
        )
    tables = [merge_report(done.merge, verbose=reporting.verbose)]
    if done.calibration is not None:
        tables += ["", calibration_report(done.calibration, verbose=reporting.verbose)]
    if done.refit is not None:
        tables += ["", refit_report(done.refit, verbose=reporting.verbose)]
    reporting.show(done.to_json(), *tables, notices=done.merge.notices, page=output.report)


def what_is_left(out_folder: Path) -> Callable[[], str | None]:
    """Tells how to go on after an interrupt, or that only what follows OUT is missing."""
    journal, before = journal_path(out_folder), _identity(out_folder)

    def left() -> str | None:
        if journal.exists():
            return "--resume goes on with the finished layers kept"
        if _identity(out_folder) not in (None, before):
            return f"{out_folder} is written and whole; only figures, page or upload are missing"
        return None

    return left


def _identity(folder: Path) -> int | None:
    """Tells a folder from another that took its place."""
    return folder.stat().st_ino if folder.exists() else None
