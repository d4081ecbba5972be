"""`moemerge calibrate` and `moemerge run`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.markup import escape
from typer.core import TyperCommand

from moemerge.cli import options
from moemerge.cli.console import STDOUT, deliver_json, err, out, progress, tell_page
from moemerge.cli.interrupts import interruptible
from moemerge.config.options import MergeOptions
from moemerge.errors import UsageError
from moemerge.runtime.unfinished import journal_path

if TYPE_CHECKING:
    from moemerge.calibration import CalibrationReport

CALIBRATE_EXAMPLES = """
Examples:

    moemerge calibrate merged/ out/ --source math=org/math --data math=math.jsonl \\
        --source code=org/code --data code=code.jsonl

    moemerge calibrate merged/ out/ --source a=A --data a=a.jsonl \\
        --source b=B --data b=b.jsonl --layers last:4 --objective exact --holdout 0.1

    moemerge calibrate merged/ out/ --source a=A --data a=a.jsonl --resume
"""
RUN_EXAMPLES = """
Examples:

    moemerge run ties.yml model/

    moemerge run ties.yml model/ --device cuda --strict --json report.json

    moemerge run ties.yml model/ --resume
"""
DEFAULTS = MergeOptions()


class SettingsCommand(TyperCommand):
    """Tells of every setting what its one declaration says, when help is asked for.

    That declaration lives with torch and pydantic; no other command should wait for them.
    """

    def fields(self) -> Mapping[str, Any]:
        """The settings' declarations by name."""
        from moemerge.config.calibration import CalibrationSettings

        return CalibrationSettings.model_fields

    def format_help(self, ctx: Any, formatter: Any) -> None:
        fields = self.fields()
        for parameter in self.params:
            field = fields.get(parameter.name or "")
            if field is None or parameter.param_type_name != "option":
                continue
            option: Any = parameter
            words = field.description or ""
            # A default of None is told in the description, where it means something.
            untold = field.default is None or field.default is False
            shown = "" if untold else f" (default: {field.default})"
            option.help = words + shown
            choices = [str(value) for value in get_args(field.annotation) if isinstance(value, str)]
            if choices:
                option.metavar = "|".join(choices)
        super().format_help(ctx, formatter)


def add_to(app: typer.Typer) -> None:
    app.command("calibrate", epilog=CALIBRATE_EXAMPLES, cls=SettingsCommand)(calibrate)
    app.command("run", epilog=RUN_EXAMPLES)(run)


Sources = Annotated[
    list[str],
    typer.Option("--source", metavar="NAME=MODEL", help="A model that was merged. Repeat it."),
]
Data = Annotated[
    list[str],
    typer.Option("--data", metavar="NAME=FILE", help="Its text (.jsonl, .jsonl.gz, .parquet)."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where a killed run ended.")]
# Flags of `CalibrationSettings`: not given means what the config says, or the default there.
Number = Annotated[float | None, typer.Option(show_default=False)]
Whole = Annotated[int | None, typer.Option(show_default=False)]
Word = Annotated[str | None, typer.Option(show_default=False)]
Switch = Annotated[bool, typer.Option("--strict", help="Fail when a layer does not converge.")]


def calibrate(
    merged: Annotated[str, typer.Argument(metavar="MERGED", help="The merged model.")],
    out_folder: options.Out,
    source: Sources,
    data: Data,
    alpha: Number = None,
    gamma: Number = None,
    layers: Word = None,
    curvature: Word = None,
    objective: Word = None,
    targets: Word = None,
    preconditioner: Word = None,
    rtol: Number = None,
    max_steps: Whole = None,
    init: Word = None,
    max_tokens: Whole = None,
    max_length: Whole = None,
    limit: Whole = None,
    seed: Whole = None,
    holdout: Number = None,
    offload: Word = None,
    device: Word = None,
    dtype: Word = None,
    strict: Switch = False,
    resume: Resume = False,
    overwrite: options.Overwrite = False,
    report: options.Page = None,
    json: options.JsonFile = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Solve for the routers of MERGED so that they agree with its sources' routing."""
    values: dict[str, Any] = {
        "alpha": alpha,
        "gamma": gamma,
        "layers": layers,
        "curvature": curvature,
        "objective": objective,
        "targets": targets,
        "preconditioner": preconditioner,
        "rtol": rtol,
        "max_steps": max_steps,
        "init": init,
        "max_tokens": max_tokens,
        "max_length": max_length,
        "limit": limit,
        "seed": seed,
        "holdout": holdout,
        "offload": offload,
        "device": device,
        "dtype": dtype,
        "strict": strict or None,
    }
    sources = {name: models[0] for name, models in named("--source", source, single=True).items()}
    texts = named("--data", data)
    from moemerge import api

    with interruptible(_what_is_left(out_folder)), progress(quiet=quiet) as bar:
        done = api.calibrate(
            merged,
            out_folder,
            sources=sources,
            data=texts,
            overwrite=overwrite,
            resume=resume,
            report=report,
            progress=bar,
            **{name: value for name, value in values.items() if value is not None},
        )
    _show(done.to_json(), done, json=json, verbose=verbose)
    tell_page(report, quiet=quiet)


def run(
    config: options.Config,
    out_folder: options.Out,
    device: Word = None,
    out_shard_size: options.ShardSize = DEFAULTS.out_shard_size,
    seed: Whole = None,
    overwrite: options.Overwrite = DEFAULTS.overwrite,
    lenient: options.Lenient = DEFAULTS.lenient,
    allow_nonfinite: options.AllowNonfinite = DEFAULTS.allow_nonfinite,
    strict: Switch = False,
    resume: Resume = False,
    report: options.Page = None,
    json: options.JsonFile = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Merge as CONFIG says, then calibrate where it has a `calibration:` block, into OUT."""
    from moemerge import api
    from moemerge.cli.render import merge_report

    settings = MergeOptions(
        device=device or DEFAULTS.device,
        out_shard_size=out_shard_size,
        seed=DEFAULTS.seed if seed is None else seed,
        overwrite=overwrite,
        lenient=lenient,
        allow_nonfinite=allow_nonfinite,
    )
    given = {"device": device, "seed": seed, "strict": strict or None}
    with interruptible(_what_is_left(out_folder)), progress(quiet=quiet) as bar:
        done = api.run(
            config,
            out_folder,
            settings,
            resume=resume,
            calibration={name: value for name, value in given.items() if value is not None},
            report=report,
            progress=bar,
        )
    if not quiet:
        for notice in done.merge.notices:
            err.print(f"[yellow]note:[/] {escape(notice)}", soft_wrap=True)
    if json != STDOUT:
        out.print(merge_report(done.merge, verbose=verbose))
    _show(done.to_json(), done.calibration, json=json, verbose=verbose)
    tell_page(report, quiet=quiet)


def named(flag: str, given: list[str], *, single: bool = False) -> dict[str, list[str]]:
    """NAME=VALUE texts by name, in their order."""
    found: dict[str, list[str]] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise UsageError(f"{flag} {text}: expected NAME=VALUE", hint=f"{flag} math=PATH")
        if single and name in found:
            raise UsageError(f"{flag}: {name!r} is given twice", hint="a source has one model")
        found.setdefault(name, []).append(value)
    return found


def _what_is_left(out_folder: Path) -> Callable[[], str | None]:
    """Tells how to go on with an interrupted calibration, or that only the page is missing."""
    journal, before = journal_path(out_folder), _identity(out_folder)

    def left() -> str | None:
        if journal.exists():
            return "--resume goes on with the finished layers kept"
        if _identity(out_folder) not in (None, before):
            return f"{out_folder} is written and whole, only the page is missing"
        return None

    return left


def _identity(folder: Path) -> int | None:
    """Tells a folder from another that took its place."""
    return folder.stat().st_ino if folder.exists() else None


def _show(
    content: dict[str, Any], report: CalibrationReport | None, *, json: str | None, verbose: bool
) -> None:
    if json is not None:
        deliver_json(content, json)
    if report is not None and json != STDOUT:
        from moemerge.cli.calibration_table import calibration_report

        out.print(calibration_report(report, verbose=verbose))
