"""What the output folder tells about itself: resolved config, report, model card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moemerge.checkpoint import hub_ids
from moemerge.config.dump import dump_config
from moemerge.config.schema import RunConfig
from moemerge.config.translate import parse_settings
from moemerge.lockstep.earlier import earlier_report, merge_config
from moemerge.lockstep.inputs import settings_data
from moemerge.refitting.prepare import RefitJob
from moemerge.refitting.report import RefitReport
from moemerge.report.files import (
    CARD_NAME,
    CONFIG_NAME,
    REPORT_NAME,
    model_card,
    report_bytes,
    report_document,
)
from moemerge.runtime.files import read_file, read_utf8

SECTION = "Refit"
EARLIER = ("merge", "calibration")  # parts of a report that stay true


def output_files(job: RefitJob, report: RefitReport, version: str) -> dict[str, bytes]:
    """The three files that moemerge adds to a refitted model."""
    folder = job.merged.checkpoint.path
    earlier = earlier_report(folder)
    config = resolved_config(job, report)
    parts = {name: earlier.get(name) for name in EARLIER}
    document = report_document(version, **parts, refit=report.to_json())
    return {
        CONFIG_NAME: config.encode(),
        REPORT_NAME: report_bytes(document),
        CARD_NAME: _card(folder, earlier, report, config, version).encode(),
    }


def resolved_config(job: RefitJob, report: RefitReport) -> str:
    """The config with which `moemerge run` makes this model again.

    The merge's own config with a `refit:` block; for a model that another tool merged, or that was
    repaired before, a config that takes it as it is.
    """
    written = job.merged.checkpoint.path / CONFIG_NAME
    if job.request.temporary and written.is_file():
        return read_utf8(written)
    block = {
        **settings_data(job.request.settings),
        "sources": dict(report.sources),
        "weights": dict(job.request.weights) or None,
        "data": {name: list(files) for name, files in report.data.items()},
    }
    block = {key: value for key, value in block.items() if value is not None}
    found = merge_config(written, {"refit": block})
    if found is None:
        plain = {
            "merge_method": "passthrough",
            "models": [{"model": report.merged}],
            "refit": block,
        }
        found = parse_settings(RunConfig, plain, "the resolved config")
    return dump_config(found)


def _card(
    folder: Path, earlier: Mapping[str, Any], report: RefitReport, config: str, version: str
) -> str:
    """A card of our own; a card that somebody else wrote is kept and gets a section."""
    text = refit_words(report)
    written = folder / CARD_NAME
    if not earlier and written.is_file():
        old = read_file(written).decode("utf-8", "replace").rstrip("\n")
        made = f"Refitted with [moemerge](https://pypi.org/project/moemerge/) {version}."
        return f"{old}\n\n## {SECTION}\n\n{made} {text}\n"
    merge = earlier.get("merge", {})
    inputs = merge.get("inputs", {})
    models = [f"- `{m.get('model')}` ({name})" for name, m in inputs.items()] or [
        f"- `{report.merged}` (merged)",
        *(f"- `{model}` ({name})" for name, model in report.sources.items()),
    ]
    how = (
        f"{len(inputs)} models merged with `{merge.get('method')}`" if inputs else "A merged model"
    )
    named = [m.get("model") for m in inputs.values()] or [*report.sources.values()]
    return model_card(
        title=Path(report.output).name,
        summary=f"{how}, its linear maps refitted in closed form to what the sources give.",
        hub_models=[part for m in named if m for part in hub_ids(str(m))],
        sections=[("Models", "\n".join(models)), (SECTION, text)],
        config=config,
        version=version,
    )


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def refit_words(report: RefitReport) -> str:
    """What was done, and a table of what is left of each kind of map's error."""
    total = report.totals
    settings = report.settings
    texts = ", ".join(f"{name} ({tokens} tokens)" for name, tokens in report.tokens.items())
    lines = [
        f"{total['maps']} linear maps and {total['routers']} routers were fitted to what each "
        f"source gives on its own text: {texts}. Ridge {settings['ridge']}, parts "
        f"{', '.join(settings['parts'])}; {total['kept']} maps stay as merged, since rows held out "
        "would have lost. What is left of each kind of map's error, as means over the maps:",
        "",
        "| map | error left, calibration rows | rows held out |",
        "|---|---|---|",
        *(
            f"| {kind} | {left:.1%} | {_share(total['error_left']['held_out'].get(kind))} |"
            for kind, left in total["error_left"]["calibration"].items()
        ),
    ]
    if total["drift_after"]:
        lines += ["", "| domain | drift as merged | drift refitted |", "|---|---|---|"]
        for name, after in total["drift_after"].items():
            before = total["drift_before"].get(name)
            shown = "" if before is None else f"{before:.3g}"
            lines.append(f"| {name} | {shown} | {after:.3g} |")
    return "\n".join(lines)
