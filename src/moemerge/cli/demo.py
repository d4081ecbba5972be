"""`moemerge demo`: show how merging breaks routing and how repairs restore it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moemerge.cli.console import err, interruptible, out, show_json
from moemerge.cli.flags import Device, Json, Quiet, verb
from moemerge.errors import UsageError

if TYPE_CHECKING:
    from moemerge.lab.testbed.demo import Demo, DemoRow

EXAMPLES = """
  moemerge demo
  moemerge demo demo-output --json
  moemerge demo --path
  moemerge demo demo-output --set my-specialists/
"""
INTRODUCTION = """\
Two specialists of one small {family}, for math and for code, are merged twice.
In every layer a router sends each token to {top_k} of {experts} experts. Computed now:
  solved    percent of {problems} test problems that the model answers right
  rerouted  percent of the specialist's expert choices that the model changes
"""
GROUPS = ("", "", "", "solved", "", "", "rerouted")
HEADINGS = ("model", "routers", "math", "code", "mean", "math", "code")
WIDTHS = (10, 22, 8, 8, 8, 12, 8)
WORDS = 2  # text columns on the left
SOLVED = 3  # columns of accuracies
MARKER = ".moemerge-demo"


@verb(EXAMPLES)
def demo(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="Where the models are made.")
    ] = Path("demo-output"),
    trained: Annotated[
        Path | None,
        typer.Option(
            "--set", metavar="FOLDER", help="Other specialists, from `python -m evidence train`."
        ),
    ] = None,
    problems: Annotated[
        int | None, typer.Option(min=1, help="Test problems of each domain (default: 500).")
    ] = None,
    device: Device = "cpu",
    path: Annotated[
        bool,
        typer.Option("--path", help="Print where the specialists and their text are, and stop."),
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Merge the bundled specialists, calibrate routers, refit linear maps, and compare."""
    from moemerge.lab.testbed import bundled_set, open_set

    specialists = bundled_set() if trained is None else open_set(trained)
    if path:
        out.print(str(specialists.folder), markup=False, soft_wrap=True)
        return

    # These import torch.
    from dataclasses import asdict

    from moemerge import api
    from moemerge.lab.testbed.demo import PROBLEMS, Demo, findings, one_thread

    count = PROBLEMS if problems is None else problems
    _clear(folder)
    what = api.inspect(specialists.base)
    silent = quiet or json
    if not silent:
        words = {"family": what.family, "top_k": what.top_k, "experts": what.experts}
        out.print(INTRODUCTION.format(problems=count, **words), markup=False)
        if out.width >= sum(WIDTHS):
            for headings in (GROUPS, HEADINGS):
                out.print(_line(headings), markup=False, style="bold")
    show = Demo(specialists, folder, device=device, count=count)
    rows: list[DemoRow] = []
    left = f"the models made so far are in {folder}; the next demo there starts over"
    with interruptible(lambda: left), one_thread():
        for row in show.rows():
            if not silent:
                line = _line if out.width >= sum(WIDTHS) else _stacked
                out.print(line(_cells(row, rows)), markup=False)
            rows.append(row)
        page = _page(show, quiet=silent)
    if json:
        content = {"rows": [asdict(row) for row in rows], "findings": findings(rows)}
        show_json({**content, "page": page and str(page), "folder": str(folder)})
    if not silent:
        _conclude(findings(rows), page, folder)


def _conclude(found: Sequence[str], page: Path | None, folder: Path) -> None:
    """Print what the rows show, and where everything is."""
    out.print()
    for text in found:
        out.print(text, markup=False)
    out.print()
    if page is not None:
        out.print(f"Routing layer by layer: {page} (open it in a browser).", markup=False)
    out.print(f"Models, each with its report and card: {folder}/.", markup=False)


def _page(show: Demo, *, quiet: bool) -> Path | None:
    """Write the report page, or print which packages are missing."""
    from moemerge.report.page import require_page

    try:
        require_page()
    except UsageError as error:
        if not quiet:
            err.print(f"No report page: {error}", markup=False)
        return None
    if not quiet:
        err.print("  diagnosing the WUDI merge and its repairs for the report page …", style="dim")
    return show.write_page()


def _cells(row: DemoRow, before: Sequence[DemoRow]) -> list[str]:
    """Return a row of the table; a merge's name is printed once."""
    shown = "" if before and before[-1].model == row.model else row.model
    solved = [f"{100 * value:.1f}" for value in (*row.accuracy.values(), row.mean)]
    rerouted = [f"{100 * a.mismatch:.1f}" for a in row.agreement.values()]
    return [shown, row.routers, *solved, *rerouted]


def _line(cells: Sequence[str]) -> str:
    columns = enumerate(zip(cells, WIDTHS, strict=True))
    words = [text.ljust(w) if n < WORDS else text.rjust(w) for n, (text, w) in columns]
    return "".join(words).rstrip()


def _stacked(cells: Sequence[str]) -> str:
    """Return the same over several lines, for narrow terminals."""
    pairs = [f"{name} {text}" for name, text in zip(HEADINGS, cells, strict=True)][WORDS:]
    solved, rerouted = ", ".join(pairs[:SOLVED]), ", ".join(pairs[SOLVED:])
    name = " ".join(filter(None, cells[:WORDS]))
    return f"{name}\n  solved {solved}\n  rerouted {rerouted}"


def _clear(folder: Path) -> None:
    """Empty the folder of an earlier demo; refuse any other folder that has files."""
    marker = folder / MARKER
    if os.path.exists(folder) and any(folder.iterdir()):
        if not os.path.exists(marker):
            raise UsageError(
                f"{folder} exists and is not a demo folder", hint="choose another folder"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    marker.touch()
