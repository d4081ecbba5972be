"""The demo: merge specialists, see the routing break, calibrate, see it heal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import logging

from moemerge import api
from moemerge.runtime.progress import Progress
from moemerge.testbed.agreement import RoutingAgreement, compare_routing
from moemerge.testbed.tiny import Specialists, make_specialists

METHODS: dict[str, dict[str, Any]] = {
    "TIES": {"merge_method": "ties", "parameters": {"density": 0.6}},
    "WUDI": {"merge_method": "wudi", "parameters": {"steps": 300}},
}
TARGETS = {
    "merged-features": "HARC",
    "source-features": "HARC, source targets",
}
WEIGHTED = frozenset({"ties"})


@dataclass(frozen=True)
class DemoRow:
    """One model of the table."""

    method: str
    routers: str
    agreement: dict[str, RoutingAgreement]  # with each specialist, on its held-out text


def run_demo(folder: Path, progress: Progress, *, seed: int = 0) -> Iterator[DemoRow]:
    """Make everything in `folder` and measure it, row by row."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    specialists = make_specialists(folder / "models", seed=seed)
    for name, settings in METHODS.items():
        config = merge_config(settings, specialists)
        merged = folder / f"{name.lower()}-merged"
        averaged = folder / f"{name.lower()}-averaged-routers"
        api.merge(config, merged, progress=progress)
        yield DemoRow(name, "as merged", _measure(merged, specialists))
        router = {"merge_method": "linear", "parameters": {"weight": 1.0}}
        api.merge({**config, "router": router}, averaged, progress=progress)
        yield DemoRow(name, "averaged", _measure(averaged, specialists))
        for targets, words in TARGETS.items():
            calibrated = folder / f"{name.lower()}-calibrated-{targets}"
            api.calibrate(
                merged,
                calibrated,
                sources=specialists.models,
                data=specialists.data,
                targets=targets,
                progress=progress,
            )
            yield DemoRow(name, words, _measure(calibrated, specialists))


def merge_config(settings: dict[str, Any], specialists: Specialists) -> dict[str, Any]:
    """The config of a merge of all specialists, equally weighted where the method has weights."""
    weights = {"weight": 0.5} if settings["merge_method"] in WEIGHTED else {}
    return {
        **settings,
        "base_model": str(specialists.base),
        "models": [
            {"model": str(path), "name": name, "parameters": weights}
            for name, path in specialists.models.items()
        ],
    }


def _measure(model: Path, specialists: Specialists) -> dict[str, RoutingAgreement]:
    return {
        name: compare_routing(model, path, specialists.held_out[name])
        for name, path in specialists.models.items()
    }
