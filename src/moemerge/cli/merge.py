"""`moemerge merge` and `moemerge validate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from moemerge.cli import options
from moemerge.cli.console import STDOUT, deliver_json, err, out, progress
from moemerge.config.options import MergeOptions
from moemerge.runtime.startup import lasting_objects

if TYPE_CHECKING:
    from moemerge.merging.report import MergeReport

MERGE_EXAMPLES = """
Examples:

    moemerge merge ties.yml merged/

    moemerge merge ties.yml merged/ --dry-run

    moemerge merge wudi.yml merged/ --device cuda --out-shard-size 2GB --overwrite
"""
VALIDATE_EXAMPLES = """
Examples:

    moemerge validate ties.yml

    moemerge validate ties.yml --json -
"""
DEFAULTS = MergeOptions()


def add_to(app: typer.Typer) -> None:
    app.command("merge", epilog=MERGE_EXAMPLES)(merge)
    app.command("validate", epilog=VALIDATE_EXAMPLES)(validate)


def merge(
    config: options.Config,
    out_folder: options.Out,
    device: options.Device = DEFAULTS.device,
    out_shard_size: options.ShardSize = DEFAULTS.out_shard_size,
    seed: options.Seed = DEFAULTS.seed,
    overwrite: options.Overwrite = DEFAULTS.overwrite,
    lenient: options.Lenient = DEFAULTS.lenient,
    allow_nonfinite: options.AllowNonfinite = DEFAULTS.allow_nonfinite,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Plan and check everything, read no tensor.")
    ] = False,
    json: options.JsonFile = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Merge models as CONFIG says (a mergekit YAML is a valid config) into the folder OUT."""
    with lasting_objects():
        from moemerge import api

    settings = MergeOptions(
        device=device,
        out_shard_size=out_shard_size,
        seed=seed,
        overwrite=overwrite,
        lenient=lenient,
        allow_nonfinite=allow_nonfinite,
    )
    with progress(quiet=quiet) as bar:
        if dry_run:
            report = api.validate(config, settings, out=out_folder)
        else:
            report = api.merge(config, out_folder, settings, progress=bar)
    _show(report, json=json, quiet=quiet, verbose=verbose)


def validate(
    config: options.Config,
    lenient: options.Lenient = DEFAULTS.lenient,
    json: options.JsonFile = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Check all that can be refused without reading a tensor, and estimate memory and disk."""
    with lasting_objects():
        from moemerge import api

    report = api.validate(config, MergeOptions(lenient=lenient))
    _show(report, json=json, quiet=quiet, verbose=verbose)


def _show(report: MergeReport, *, json: str | None, quiet: bool, verbose: bool) -> None:
    if not quiet:
        for notice in report.notices:
            err.print(f"[yellow]note:[/] {escape(notice)}", soft_wrap=True)
    if json is not None:
        deliver_json(report.to_json(), json)
    if json == STDOUT:
        return
    from moemerge.cli.render import merge_report

    out.print(merge_report(report, verbose=verbose))
