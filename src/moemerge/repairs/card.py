"""The files that moemerge adds to a repaired model: resolved config, report and model card."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moemerge.checkpoint import hub_ids
from moemerge.checkpoint.model_card import (
    CARD_NAME,
    CONFIG_NAME,
    REPORT_NAME,
    in_code,
    in_markdown,
    model_card,
    report_bytes,
    report_file,
)
from moemerge.checkpoint.reader import as_ref
from moemerge.config.documents import MergeDocument, parse_document
from moemerge.config.dump import dump_config
from moemerge.config.faults import parse_settings
from moemerge.config.models import located, named, named_in
from moemerge.config.schema import REPAIRS, RunConfig
from moemerge.config.settings import as_flags
from moemerge.config.yaml_lines import config_for, read_all, read_yaml
from moemerge.errors import MoeMergeError
from moemerge.families.opened import OpenModel
from moemerge.repairs.experts import PRUNING
from moemerge.repairs.inputs import RepairRequest, settings_data
from moemerge.repairs.report import RepairReport
from moemerge.runtime.checksums import update_checksum
from moemerge.runtime.files import read_file, read_object, read_utf8, write_whole
from moemerge.runtime.formatting import with_error
from moemerge.runtime.progress import counted
from moemerge.version import __version__

TUNING = "tuning"  # the part of a fine-tuning in a report
COMPOSITION = "composition"  # the part of `moemerge compose`


def output_files(
    request: RepairRequest[Any], merged: OpenModel, report: RepairReport
) -> dict[str, bytes]:
    """Return resolved config, report and model card of a repaired model."""
    folder = merged.checkpoint.path
    earlier = earlier_report(folder, request.out)
    config, flags = _resolved_config(request, merged, earlier, report)
    texts = (*request.data.values(), *request.check.values())
    whole = not any(isinstance(text, Mapping) for rows in texts for text in rows)
    # The parts of repairs that this one may follow are kept.
    keys = [repair.key for repair in REPAIRS]
    own = report.repair.key
    repairs = keys[: keys.index(own)]
    before = ("merge", COMPOSITION, TUNING, *repairs)
    part = {**report.to_json(), **_named_inputs(report, request.out)}
    parts = {**{name: earlier.get(name) for name in before}, own: part}
    if request.temporary:  # the folders of the merge and of earlier repairs will be removed
        if parts["merge"] is not None:
            place = {**parts["merge"]["output"], "folder": report.output}
            parts["merge"] = {**parts["merge"], "output": place}
        parts |= {n: {**earlier[n], "output": report.output} for n in repairs if n in earlier}
    card = _card(folder / CARD_NAME, earlier, report, config, flags if whole else None)
    return {
        CONFIG_NAME: config.encode(),
        REPORT_NAME: report_file(**parts),
        CARD_NAME: card.encode(),
    }


def _named_inputs(report: RepairReport, out: Path) -> dict[str, Any]:
    """Return the report's models and files as a file in OUT names them."""
    texts = {"data": report.data, "check": report.check}
    return {
        "merged": str(as_ref(report.merged).as_named_in(out)),
        "sources": {n: str(as_ref(m).as_named_in(out)) for n, m in report.sources.items()},
        **{
            key: {n: [named_in(out, f, existing=True) for f in files] for n, files in text.items()}
            for key, text in texts.items()
        },
    }


def _resolved_config(
    request: RepairRequest[Any], merged: OpenModel, earlier: Mapping[str, Any], report: RepairReport
) -> tuple[str, list[str]]:
    """Return a config with which `moemerge run` makes this model again, and the flags it needs.

    It is the config of the merge with the block of the repair. If another tool merged the model,
    or it was repaired before, it is a config that starts from that model.
    """
    written = merged.checkpoint.path / CONFIG_NAME
    needed = dict(earlier.get("merge", {}).get("settings", {}))
    if request.temporary and os.path.isfile(written):
        # Of several merges, only the last is repaired.
        last = read_all(read_utf8(written), str(written))[-1]
        if report.repair.key in last.data:  # not after `prune --repair`
            return config_for(written, request.out), as_flags(needed)
    block = {
        **settings_data(request.settings),
        # A list, since a mapping would add to the merged models.
        "sources": [{name: model} for name, model in report.sources.items()],
        "weights": dict(request.weights) or None,
        "experts": {n: named_in(request.out, str(file)) for n, file in request.experts.items()}
        or None,
        "data": {name: list(files) for name, files in report.data.items()},
        "check": {name: list(files) for name, files in report.check.items()} or None,
    }
    block = {key: value for key, value in block.items() if value is not None}
    # A refit writes floats, or quantises as the merge before it: `run` has one flag for both.
    rounded = block.get("requantize", "same") == "same"
    alike = rounded or "requantize" not in needed
    config = merge_config(written, {report.repair.key: block}) if alike else None
    if config is None:
        needed.pop("requantize", None)
        if rounded and merged.checkpoint.quantisation is not None:
            needed["requantize"] = "same"
        plain = {
            "merge_method": "passthrough",
            "models": [{"model": report.merged}],
            report.repair.key: block,
        }
        config = parse_settings(RunConfig, plain, "the resolved config")
    return dump_config(config, request.out), as_flags(needed)


def _card(
    written: Path,
    earlier: Mapping[str, Any],
    report: RepairReport,
    config: str,
    flags: Sequence[str] | None,
) -> str:
    """Return a new model card; a card that another tool wrote is kept and gets a section.

    `flags` are None if no config makes the model again, since rows came from memory.
    """
    repair = report.repair
    if "merge" not in earlier and os.path.isfile(written):
        old = read_file(written).decode("utf-8", "replace").rstrip("\n")
        made = f"{repair.card_done} with moemerge {__version__}."
        return f"{old}\n\n## {repair.card_title}\n\n{made} {report.card_section}\n"
    own, merge = _named_inputs(report, Path(report.output)), earlier.get("merge", {})
    inputs = merge.get("inputs", {})
    models = [
        f"- `{in_code(str(m.get('model')))}` ({in_markdown(name)}"
        f"{', the base' if m.get('base') else ''})"
        for name, m in inputs.items()
    ] or [
        f"- `{in_code(own['merged'])}` (merged)",
        *(f"- `{in_code(model)}` ({in_markdown(name)})" for name, model in own["sources"].items()),
    ]
    merged = counted(sum(not m.get("base") for m in inputs.values()), "model")
    how = f"{merged} merged with `{merge.get('method')}`" if inputs else "A merged model"
    done = [one.card_summary for one in REPAIRS[: REPAIRS.index(repair)] if one.key in earlier]
    models_used = [m.get("model") for m in inputs.values()] or [*own["sources"].values()]
    return model_card(
        title=Path(report.output).name,
        summary=f"{', '.join([how, *done, repair.card_summary])}.",
        hub_models=[part for m in models_used if m for part in hub_ids(str(m))],
        sections=[("Models", "\n".join(models)), (repair.card_title, report.card_section)],
        config=config,
        flags=flags,
    )


def earlier_report(folder: Path, out: Path | None = None) -> dict[str, Any]:
    """Return the report in a folder, or {} if moemerge neither merged nor pruned it.

    Its paths are those of a file in `out`, or relative to the working directory. A repair only
    repeats it, so a damaged or edited report is ignored.
    """
    try:
        report = read_object(folder / REPORT_NAME)
        if "merge" in report or not isinstance(report.get(PRUNING), dict):
            parse_document(MergeDocument, report.get("merge"), str(folder / REPORT_NAME))
        json.dumps(report, allow_nan=False)  # it is repeated, and NaN is not JSON
    except (MoeMergeError, ValueError):
        return {}
    found: dict[str, Any] = located(report, folder)
    return found if out is None else dict(named(found, out))


def merge_config(path: Path, blocks: Mapping[str, Any]) -> RunConfig | None:
    """Return a merge's config with `blocks` added; None if it is unreadable or has a repair.

    A repair may follow pruning.
    """
    try:
        data = read_yaml(read_utf8(path), str(path)).data
        if any(r.key in data for r in REPAIRS if r.key != PRUNING or PRUNING in blocks):
            return None
        return parse_settings(RunConfig, {**data, **blocks}, str(path))
    except MoeMergeError:
        return None


def add_diagnosis(report: RepairReport, figures: Mapping[str, Any]) -> None:
    """Add figures that were measured afterwards to the report and the card in OUT."""
    folder = Path(report.output)
    path = folder / REPORT_NAME
    document = read_object(path)
    document[report.repair.key]["diagnosis"] = dict(figures)
    write_whole(path, report_bytes(document))
    path = folder / CARD_NAME
    card = read_file(path).decode("utf-8", errors="replace")
    at = card.find("\n## ", card.rfind(f"## {report.repair.card_title}\n") + 1)
    at = len(card) if at < 0 else at + 1
    table = "\n".join(diagnosis_table(figures, report.repair.card_holdout))
    write_whole(path, f"{card[:at].rstrip(chr(10))}\n\n{table}\n\n{card[at:]}".encode())
    update_checksum(path)


def diagnosis_table(figures: Mapping[str, Any], rows: str) -> list[str]:
    """Return Markdown tables of held-out rows, each model on its own features, and check text."""
    lines = (
        []
        if not figures["tokens"]
        else [
            f"What `moemerge diagnose` measures on {rows}, each model on its own features:",
            "",
            "| domain | tokens | mismatch before | after | loss before | after |",
            "|---|---|---|---|---|---|",
        ]
    )
    for name, tokens in figures["tokens"].items():
        shares = (f"{figures[f'mismatch_{end}'][name]:.1%}" for end in ("before", "after"))
        losses = (figures[f"loss_{end}"][name] for end in ("before", "after"))
        cells = [*shares, *("" if loss is None else f"{loss:.4g}" for loss in losses)]
        lines.append(f"| {in_markdown(name)} | {tokens} | {' | '.join(cells)} |")
    if figures["not_held_out"]:
        names = ", ".join(map(in_markdown, figures["not_held_out"]))
        lines += ["", f"No rows of {names} were held out, so nothing is measured there."]
    checked = {name: one for name, one in figures["check"].items() if one is not None}
    if checked:
        lines += [
            "",
            "Next-token loss on check text, which no fit or choice has used (nats a token):",
            "",
            "| check text | tokens | loss before | after | change | the source's |",
            "|---|---|---|---|---|---|",
        ]
    for name, one in checked.items():
        source = "" if one["loss_source"] is None else f"{one['loss_source']:.4g}"
        lines.append(
            f"| {in_markdown(name)} | {one['tokens']} | {one['loss_before']:.4g} | "
            f"{one['loss_after']:.4g} | {with_error(one['change'], one['change_error'])} | "
            f"{source} |"
        )
    return lines
