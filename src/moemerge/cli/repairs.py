"""The commands of the repairs: `moemerge calibrate`, `refit`, `distill` and `prune`."""

from __future__ import annotations

from typing import Annotated

import typer

from moemerge import api
from moemerge.cli.console import interruptible, remaining_work
from moemerge.cli.flags import (
    Checks,
    Experts,
    ModelArgument,
    Out,
    Reporting,
    Sources,
    Texts,
    Weights,
    given,
    verb,
)
from moemerge.cli.render import Samples, repair_table, show_samples
from moemerge.config.repair_settings import PruneSettings
from moemerge.config.repairs import Repair, RepairSettings
from moemerge.config.schema import REPAIRS
from moemerge.config.settings import OutputSettings

# Description and examples of each command. `repair_tables` has a function VERB_report for each.
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


def _add_repair(repair: Repair) -> None:
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
        with interruptible(remaining_work(out_folder)), reporting.progress() as bar:
            report = getattr(api, repair.verb)(
                merged,
                out_folder,
                sources=source,
                data=data,
                weights=weight,
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
    verb(examples, repair.verb, several=True)(command)


for declared in REPAIRS:
    if declared.verb in COMMANDS:  # `prune` takes other arguments
        _add_repair(declared)


PRUNE_EXAMPLES = """
  moemerge prune org/base pruned/ --keep 0.75 --data text=general.jsonl
  moemerge prune org/base pruned/ --keep 0.75 --repair refit \\
      --data math=math.jsonl --data general=general.jsonl
  moemerge prune ./base pruned/ --keep 0.5 --score norm \\
      --data text=general.jsonl
"""


@verb(PRUNE_EXAMPLES)
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
