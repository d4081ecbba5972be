"""The commands of the repairs: `moemerge calibrate`, `refit` and `distill`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moemerge import cli
from moemerge.cli.console import GOES_ON, STDOUT, interruptible, out
from moemerge.cli.flags import (
    ADVANCED,
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
from moemerge.config.schema import REPAIRS
from moemerge.config.settings import OutputSettings
from moemerge.errors import UsageError
from moemerge.runtime import ranks
from moemerge.runtime.journals import journal_path, saved_path

if TYPE_CHECKING:
    from moemerge.lockstep.report import RepairReport

# Description and examples of each command. `routing_table` has a function VERB_report for each.
COMMANDS = {
    "calibrate": (
        "Solve for the routers of MERGED so that they agree with its sources' routing.",
        """
  moemerge calibrate merged/ out/ \\
      --source math=org/math --data math=math.jsonl \\
      --source code=org/code --data code=code.jsonl \\
      --source base=org/base --data base=general.jsonl
  moemerge calibrate merged/ out/ --source a=A --data a=a.jsonl \\
      --source b=B --data b=b.jsonl --weight b=2 --layers last:4
  moemerge calibrate merged/ out/ --source a=A --data a=a.jsonl \\
      --check a=b.jsonl
""",
    ),
    "refit": (
        "Refit every linear map of MERGED to the outputs of its sources.",
        """
  moemerge refit merged/ out/ \\
      --source math=org/math --data math=math.jsonl \\
      --source code=org/code --data code=code.jsonl \\
      --source base=org/base --data base=general.jsonl
  moemerge refit merged/ out/ --source a=A --data a=a.jsonl \\
      --source b=B --data b=b.jsonl --weight b=2 \\
      --parts attention,experts --ridge 0.01
  moemerge refit merged/ out/ --source a=A --data a=a.jsonl \\
      --check a=b.jsonl
""",
    ),
    "distill": (
        "Train MERGED on the next-token distributions of its sources, each on its own text.",
        """
  moemerge distill merged/ out/ \\
      --source math=org/math --data math=math.jsonl \\
      --source code=org/code --data code=code.jsonl \\
      --source base=org/base --data base=general.jsonl
  moemerge distill merged/ out/ --source a=A --data a=a.jsonl \\
      --source b=B --data b=b.jsonl --steps 60 --learning-rate 1e-4
  moemerge distill merged/ out/ --source a=A --data a=a.jsonl \\
      --check a=b.jsonl
""",
    ),
}


def add_to(app: typer.Typer) -> None:
    verbs = [cli.asked] if cli.asked in COMMANDS else COMMANDS
    for repair in REPAIRS:
        if repair.verb in verbs:  # `prune` takes other arguments
            _add_repair(app, repair)


def _add_repair(app: typer.Typer, repair: Repair) -> None:
    about, examples = COMMANDS[repair.verb]

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
        sample: Samples = None,
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
        models = {"MERGED": merged, **source}
        show_samples(sample, out_folder, models, settings.device, reporting)

    command.__annotations__["settings"] = repair.settings
    command.__doc__ = about
    add_verb(app, command, examples, repair.verb, several=True)


def repair_table(report: RepairReport, *, verbose: bool) -> Any:
    """Return the report of a repair as a table."""
    from moemerge.cli import routing_table

    return getattr(routing_table, f"{report.repair.verb}_report")(report, verbose=verbose)


def remaining_work(out_folder: Path) -> Callable[[], str | None]:
    """Return a function that describes, after an interrupt, how to continue."""
    unfinished, before = (journal_path(out_folder), saved_path(out_folder)), _inode(out_folder)

    def remaining() -> str | None:
        if any(os.path.exists(folder) for folder in unfinished):
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


BUILT_IN = ["The capital of France is", "2 + 2 ="]  # with -v and without --sample


def _not_empty(prompts: list[str] | None) -> list[str] | None:
    """Refuse an empty prompt before the work starts."""
    if prompts and not all(prompt.strip() for prompt in prompts):
        raise UsageError("--sample: the prompt is empty", hint="write some text after it")
    return prompts


Samples = Annotated[
    list[str] | None,
    typer.Option(
        "--sample",
        metavar="PROMPT",
        callback=_not_empty,
        help="Finally print a short completion by each model (-v: of two built-in prompts). "
        "Repeat it.",
        rich_help_panel=ADVANCED,
    ),
]


def show_samples(
    prompts: list[str] | None,
    result: Path,
    others: Mapping[str, str],
    device: str,
    reporting: Reporting,
) -> None:
    """Print a short greedy completion of each prompt by the result and each other model."""
    prompts = prompts or (BUILT_IN if reporting.verbose else None)
    if not prompts or reporting.quiet or reporting.json == STDOUT or not ranks.leads():
        return
    from moemerge import api

    with reporting.progress() as bar:
        models = {"OUT": str(result), **others}
        made = api.sample(models, prompts, device=device, progress=bar)
    for name, texts in made.items():
        for prompt, text in zip(prompts, texts, strict=False):
            out.print(f"{name}: {prompt!r} -> {text!r}", markup=False, soft_wrap=True)
