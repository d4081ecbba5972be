"""`moemerge merge`, `moemerge validate` and `moemerge run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moemerge import api
from moemerge.cli.console import interruptible, remaining_work
from moemerge.cli.flags import Config, Out, Reporting, given, verb
from moemerge.cli.render import Samples, merge_report, repair_table, show_samples
from moemerge.config.fields import Strict
from moemerge.config.schema import REPAIRS
from moemerge.config.settings import MergeSettings, OutputSettings, PlanSettings
from moemerge.errors import UsageError

YAML = (".yml", ".yaml")


def _refuse_swapped(verb: str, config: Path, out_folder: Path) -> None:
    if out_folder.suffix in YAML and out_folder.is_file() and config.suffix not in YAML:
        raise UsageError(
            f"{out_folder} is a config, and it is given as the output",
            hint=f"moemerge {verb} {out_folder} {config}",
        )


DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Plan and check everything, read no tensor.")
]
MERGE_EXAMPLES = """
  moemerge merge ties.yml merged/
  moemerge merge ties.yml merged/ --dry-run
  moemerge merge wudi.yml merged/ --device cuda --out-shard-size 2GB --overwrite
"""
VALIDATE_EXAMPLES = """
  moemerge validate ties.yml
  moemerge validate ties.yml --json -
"""
RUN_EXAMPLES = """
  moemerge run ties.yml model/
  moemerge run ties.yml model/ --device cuda --strict --json report.json
  moemerge run ties.yml model/ --alpha 0.5 --layers last:4
"""


@verb(MERGE_EXAMPLES, several=True)
def merge(
    config: Config,
    out_folder: Out,
    settings: MergeSettings,
    reporting: Reporting,
    dry_run: DryRun = False,
    sample: Samples = None,
) -> None:
    """Merge models as CONFIG states (a mergekit YAML is a valid config) into the folder OUT."""
    _refuse_swapped("merge", config, out_folder)
    if dry_run:
        report = api.validate(config, out_folder, settings=settings)
    else:
        with interruptible(remaining_work(out_folder)), reporting.progress() as bar:
            report = api.merge(config, out_folder, settings=settings, progress=bar)
    table = merge_report(report, verbose=reporting.verbose)
    reporting.show(report.to_json(), table, notices=report.notices)
    if not dry_run:
        models = {model.name: model.reference for model in report.models}
        show_samples(sample, out_folder, models, settings.device, reporting)


@verb(VALIDATE_EXAMPLES)
def validate(config: Config, settings: PlanSettings, reporting: Reporting) -> None:
    """Check a config and its models without reading a tensor, and estimate memory and disk."""
    report = api.validate(config, **given(settings))
    table = merge_report(report, verbose=reporting.verbose)
    reporting.show(report.to_json(), table, notices=report.notices)


@verb(RUN_EXAMPLES, settings={repair.key: repair.settings for repair in REPAIRS})
def run(
    config: Config,
    out_folder: Out,
    settings: MergeSettings,
    output: OutputSettings,
    reporting: Reporting,
    sample: Samples = None,
    **repairs: Strict,
) -> None:
    """Merge as CONFIG requests, then prune and repair as its `prune:`, `calibration:`, `refit:` and
    `distill:` blocks request, into OUT.

    Flags of a repair override its block.
    """
    _refuse_swapped("run", config, out_folder)
    with interruptible(remaining_work(out_folder)), reporting.progress() as bar:
        done = api.run(
            config,
            out_folder,
            settings=settings,
            resume=output.resume,
            report=output.report,
            progress=bar,
            **{key: given(values) for key, values in repairs.items()},
        )
    tables = [merge_report(done.merge, verbose=reporting.verbose)]
    for report in done.repairs:
        tables += ["", repair_table(report, verbose=reporting.verbose)]
    reporting.show(done.to_json(), *tables, notices=done.merge.notices, page=output.report)
    models = {model.name: model.reference for model in done.merge.models}
    show_samples(sample, out_folder, models, settings.device, reporting)
