"""`moemerge prune`."""

from __future__ import annotations

from moemerge import api
from moemerge.cli.console import interruptible, remaining_work
from moemerge.cli.flags import ModelArgument, Out, Reporting, Texts, given, verb
from moemerge.cli.render import Samples, repair_table, show_samples
from moemerge.config.repair_settings import PruneSettings
from moemerge.config.settings import OutputSettings

EXAMPLES = """
  moemerge prune org/base pruned/ --keep 0.75 --data text=general.jsonl
  moemerge prune org/base pruned/ --keep 0.75 --repair refit \\
      --data math=math.jsonl --data general=general.jsonl
  moemerge prune ./base pruned/ --keep 0.5 --score norm \\
      --data text=general.jsonl
"""


@verb(EXAMPLES)
def prune(
    model: ModelArgument,
    out_folder: Out,
    data: Texts,
    settings: PruneSettings,
    output: OutputSettings,
    reporting: Reporting,
    sample: Samples = None,
) -> None:
    """Remove the experts of MODEL that contribute least on the given text.

    With --repair, the pruned model is then fitted to MODEL on the same text.
    """
    with interruptible(remaining_work(out_folder)), reporting.progress() as bar:
        report = api.prune(
            model, out_folder, data=data, settings=settings, progress=bar, **given(output)
        )
    tables = [repair_table(report.pruning, verbose=reporting.verbose)]
    if report.repair is not None:
        tables += ["", repair_table(report.repair, verbose=reporting.verbose)]
    reporting.show(report.to_json(), *tables, page=output.report)
    show_samples(sample, out_folder, {"MODEL": model}, settings.device, reporting)
