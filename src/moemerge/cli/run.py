"""`moemerge run`."""

from __future__ import annotations

import typer

from moemerge.cli.console import interruptible
from moemerge.cli.flags import Config, Out, Reporting, add_verb, given
from moemerge.cli.repairs import remaining_work, repair_table
from moemerge.cli.samples import Samples, show_samples
from moemerge.config.fields import Strict
from moemerge.config.schema import REPAIRS
from moemerge.config.settings import MergeSettings, OutputSettings

EXAMPLES = """
  moemerge run ties.yml model/
  moemerge run ties.yml model/ --device cuda --strict --json report.json
  moemerge run ties.yml model/ --alpha 0.5 --layers last:4
"""


def add_to(app: typer.Typer) -> None:
    add_verb(app, run, EXAMPLES, settings={r.key: r.settings for r in REPAIRS})


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
    from moemerge import api
    from moemerge.cli.render import merge_report

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
