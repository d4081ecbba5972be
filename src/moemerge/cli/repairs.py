"""The command of a repair, derived from its declaration."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moemerge.cli.console import GOES_ON, interruptible
from moemerge.cli.flags import (
    Checks,
    Experts,
    Out,
    Reporting,
    Sources,
    Texts,
    Weights,
    add_verb,
    given,
    numbers,
)
from moemerge.config.repairs import Repair, RepairSettings
from moemerge.config.settings import OutputSettings
from moemerge.runtime.journals import journal_path, saved_path

if TYPE_CHECKING:
    from moemerge.lockstep.report import RepairReport


def add_repair(app: typer.Typer, repair: Repair, about: str, examples: str) -> None:
    """Add the command of a repair to `app`. Its module has a function `table` for the report."""

    def command(
        merged: Annotated[str, typer.Argument(metavar="MERGED", help="The merged model.")],
        out_folder: Out,
        source: Sources,
        data: Texts,
        settings: RepairSettings,
        output: OutputSettings,
        reporting: Reporting,
        weight: Weights = None,
        check: Checks = None,
        experts: Experts = None,
    ) -> None:
        from moemerge import api

        with interruptible(remaining_work(out_folder)), reporting.progress() as bar:
            report = getattr(api, repair.verb)(
                merged,
                out_folder,
                sources=source,
                data=data,
                weights=numbers("--weight", weight),
                check=check,
                settings=settings,
                progress=bar,
                **({"experts": experts} if experts else {}),
                **given(output),
            )
        table = repair_table(report, verbose=reporting.verbose)
        reporting.show(report.to_json(), table, page=output.report)

    command.__annotations__["settings"] = repair.settings
    command.__doc__ = about
    add_verb(app, command, examples, repair.verb, several=True)


def repair_table(report: RepairReport, *, verbose: bool) -> Any:
    """Return the report of a repair as a table, made by the module of its command."""
    module = importlib.import_module(f"moemerge.cli.{report.repair.verb}")
    return module.table(report, verbose=verbose)


def remaining_work(out_folder: Path) -> Callable[[], str | None]:
    """Return a function that describes, after an interrupt, how to continue."""
    unfinished, before = (journal_path(out_folder), saved_path(out_folder)), _inode(out_folder)

    def remaining() -> str | None:
        if any(folder.exists() for folder in unfinished):
            return GOES_ON
        if _inode(out_folder) not in (None, before):
            return f"{out_folder} is complete; only figures, page or upload are missing"
        return None

    return remaining


def _inode(folder: Path) -> int | None:
    """Return a number that differs for a folder that has replaced another."""
    try:
        return folder.stat().st_ino
    except OSError:  # it does not exist, or cannot: a name too long, a loop of links
        return None
