"""What the output folder tells about itself: resolved config, report, model card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moemerge.calibration.job import CalibrationJob
from moemerge.calibration.report import CalibrationReport
from moemerge.checkpoint import hub_ids
from moemerge.config.dump import dump_config
from moemerge.config.schema import RunConfig
from moemerge.config.translate import parse_settings
from moemerge.lockstep.earlier import earlier_report, merge_config
from moemerge.lockstep.inputs import settings_data
from moemerge.report.files import (
    CARD_NAME,
    CONFIG_NAME,
    REPORT_NAME,
    model_card,
    report_bytes,
    report_document,
)
from moemerge.runtime.files import read_file, read_utf8

SECTION = "Router calibration"


def output_files(job: CalibrationJob, report: CalibrationReport, version: str) -> dict[str, bytes]:
    """The three files that moemerge adds to a calibrated model."""
    folder = job.merged.checkpoint.path
    earlier = earlier_report(folder)
    config = resolved_config(job, report)
    document = report_document(version, merge=earlier.get("merge"), calibration=report.to_json())
    return {
        CONFIG_NAME: config.encode(),
        REPORT_NAME: report_bytes(document),
        CARD_NAME: calibration_card(folder, earlier, report, config, version).encode(),
    }


# --- config -------------------------------------------------------------------------------------


def resolved_config(job: CalibrationJob, report: CalibrationReport) -> str:
    """The config with which `moemerge run` makes this model again.

    The merge's own config with a `calibration:` block; for a model that another tool merged, or
    that was calibrated before, a config that takes it as it is.
    """
    folder = job.merged.checkpoint.path
    written = folder / CONFIG_NAME
    if job.request.temporary and written.is_file():
        return read_utf8(written)
    block = {
        **settings_data(job.request.settings),
        "sources": dict(report.sources),
        "weights": dict(job.request.weights) or None,
        "data": {name: list(files) for name, files in report.data.items()},
    }
    block = {key: value for key, value in block.items() if value is not None}
    config = merge_config(written, {"calibration": block})
    if config is None:
        plain = {
            "merge_method": "passthrough",
            "models": [{"model": report.merged}],
            "calibration": block,
        }
        config = parse_settings(RunConfig, plain, "the resolved config")
    return dump_config(config, absolute=True)


# --- card ---------------------------------------------------------------------------------------


def calibration_card(
    folder: Path,
    earlier: Mapping[str, Any],
    report: CalibrationReport,
    config: str,
    version: str,
) -> str:
    """A card of our own; a card that somebody else wrote is kept and gets a section."""
    text = calibration_words(report)
    written = folder / CARD_NAME
    if not earlier and written.is_file():
        old = read_file(written).decode("utf-8", "replace").rstrip("\n")
        made = f"Routers calibrated with [moemerge](https://pypi.org/project/moemerge/) {version}."
        return f"{old}\n\n## {SECTION}\n\n{made} {text}\n"
    merge = earlier.get("merge", {})
    inputs = merge.get("inputs", {})
    models = [f"- `{m.get('model')}` ({name})" for name, m in inputs.items()] or [
        f"- `{report.merged}` (merged)",
        *(f"- `{model}` ({name})" for name, model in report.sources.items()),
    ]
    how = f"{len(inputs)} models merged with `{merge.get('method')}`" if inputs else "A merged MoE"
    named = [m.get("model") for m in inputs.values()] or [*report.sources.values()]
    return model_card(
        title=Path(report.output).name,
        summary=f"{how}, its routers calibrated with HARC (Hessian-aware router calibration).",
        hub_models=[part for m in named if m for part in hub_ids(str(m))],
        sections=[("Models", "\n".join(models)), (SECTION, text)],
        config=config,
        version=version,
    )


def calibration_words(report: CalibrationReport) -> str:
    """What was done, and tables of how the routing agrees with the sources'."""
    total, settings = report.totals, report.settings
    damping = (
        f"gamma {settings['gamma']}"
        if settings.get("gamma") is not None
        else f"alpha {settings['alpha']}"
    )
    on, mismatch = "both routers on this model's features", "mismatch, routers alone"
    if settings["targets"] == "source-features":
        on, mismatch = "each model on its own features", "mismatch"
    lines = [
        f"{total['routers']} routers were solved for ({damping}, {settings['curvature']} curvature,"
        f" {settings['objective']} objective, targets: {settings['targets']}); "
        f"{total['converged']} solves converged. All other tensors are as merged. Routing agreement"
        f" with each source, as means over the routers, {on}:",
        *_agreement_table(total, mismatch),
    ]
    if "holdout" in total:
        lines += ["", "The same on rows that no solve has seen:"]
        lines += _agreement_table(total["holdout"], mismatch)
    return "\n".join(lines)


def _agreement_table(total: Mapping[str, Any], mismatch: str) -> list[str]:
    """`mismatch` is what the figure is called: routing has two of them."""
    lines = [
        "",
        f"| domain | tokens | KL before | KL after | {mismatch} before | after |",
        "|---|---|---|---|---|---|",
    ]
    for name, tokens in total["tokens"].items():
        numbers = (
            f"{total['kl_before'].get(name, 0):.4g} | {total['kl_after'].get(name, 0):.4g} | "
            f"{total['mismatch_before'].get(name, 0):.1%} | "
            f"{total['mismatch_after'].get(name, 0):.1%}"
        )
        lines.append(f"| {name} | {tokens} | {numbers} |")
    return lines
