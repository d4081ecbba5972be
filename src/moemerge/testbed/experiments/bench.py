"""Makes the models of one trained set through the product's own interface, and measures them."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moemerge import api
from moemerge.experiments.summary import pack
from moemerge.testbed.accuracy import LONGEST_ANSWER, accuracy, compare_routing
from moemerge.testbed.experiments.forced import generate_forced
from moemerge.testbed.experiments.recipes import (
    BASE,
    Calibrated,
    Cell,
    Grafted,
    Merged,
    Model,
    Trained,
    Tuned,
    graft_config,
    merge_config,
)
from moemerge.testbed.experiments.texts import (
    asked_problems,
    held_out_text,
    read_texts,
    text_file,
    write_texts,
)
from moemerge.testbed.tasks import check_all
from moemerge.testbed.training import finetune, open_set
from moemerge.testbed.training.sets import MANIFEST

# Of fine-tuning after a merge: a fifth of what made the specialists.
TUNING_LR = 2e-4
# Seconds of one core for the small preset; only their order matters.
MERGING = {"fisher": 15.0, "wudi": 9.0, "regmean": 5.0}
CALIBRATING = 5.0


@dataclass(frozen=True)
class Scale:
    """How much is measured, and with how much text routers are calibrated."""

    problems: int = 1500  # of each domain
    held_out: int = 400  # of them, whose tokens show the routing
    rows: int = 512  # calibration text of each domain
    tuning_steps: int = 100  # of fine-tuning after a merge


@dataclass(frozen=True)
class Bench:
    """Where one set's work is done. Small enough to be sent to a worker process."""

    trained: Path
    folder: Path
    domains: tuple[str, ...]
    scale: Scale
    device: str

    # --- models ---

    def path(self, model: Model) -> Path:
        """The folder a model has, or will have."""
        if isinstance(model, Trained):
            trained = open_set(self.trained)
            return trained.base if model.which == BASE else trained.models[model.which]
        return self.folder / "models" / _slug(model.name)

    def text(self, kind: str, domain: str) -> Path:
        return text_file(self.folder / "texts", kind, domain)

    def prepare(self) -> None:
        """Calibration text of every kind, unless it is there."""
        marker = self.folder / "texts" / f"rows-{self.scale.rows}"
        if not marker.exists():
            models = {domain: self.path(Trained(domain)) for domain in self.domains}
            write_texts(marker.parent, models, rows=self.scale.rows, device=self.device)
            marker.touch()

    def is_given(self, model: Model) -> bool:
        return isinstance(model, Trained)

    def cost(self, model: Model) -> float:
        """About how long a model takes to make."""
        if isinstance(model, Merged):
            return MERGING.get(model.method, 1.0)
        if isinstance(model, Calibrated):
            settings = dict(model.settings)
            factor = 2 if settings.get("targets") == "source-features" else 1
            return CALIBRATING * factor * (2 if settings.get("objective") == "exact" else 1)
        return 1.0

    def make(self, model: Model) -> Path:
        """A model's folder; it and whatever it needs are made where they are not there yet."""
        out = self.path(model)
        if out.exists():
            return out
        for parent in model.parents:
            self.make(parent)
        if isinstance(model, Merged):
            models = {domain: self.path(Trained(domain)) for domain in model.domains}
            texts = {domain: self.text("correct", domain) for domain in model.domains}
            self._merge(merge_config(model.method, self.path(Trained(BASE)), models, texts), out)
        elif isinstance(model, Grafted):
            self._merge(graft_config(self.path(model.weights), self.path(model.routers)), out)
        elif isinstance(model, Calibrated):
            self._calibrate(model, out)
        elif isinstance(model, Tuned):
            self._tune(model, out)
        return out

    def _merge(self, config: Mapping[str, Any], out: Path) -> None:
        # On a CPU in any case: models this small keep no GPU busy, and WUDI's steps the least.
        api.merge(config, out, device="cpu")

    def _calibrate(self, model: Calibrated, out: Path) -> None:
        texts = {domain: self.text(model.text, domain) for domain in model.domains}
        bound: dict[str, Any] = {}
        if model.share < 1:
            fewest = min(len(read_texts(path, domain)) for domain, path in texts.items())
            bound["limit"] = max(1, round(model.share * fewest))
        api.calibrate(
            self.path(model.model),
            out,
            sources={domain: self.path(Trained(domain)) for domain in model.domains},
            data=texts,
            device=self.device,
            **bound,
            **{"holdout": 0.0, **dict(model.settings)},
        )

    def _tune(self, model: Tuned, out: Path) -> None:
        """On both domains' calibration text, as much of each."""
        texts = [read_texts(self.text("correct", domain), domain) for domain in model.domains]
        fewest = min(map(len, texts))
        problems = [problem for own in texts for problem in own[:fewest]]
        steps, device = self.scale.tuning_steps, self.device
        finetune(self.path(model.model), out, problems, steps=steps, lr=TUNING_LR, device=device)

    def remove(self, model: Model) -> None:
        """Take a model off the disk that nothing needs any more."""
        if not isinstance(model, Trained):
            shutil.rmtree(self.path(model), ignore_errors=True)

    # --- measurements ---

    def nodes(self, cell: Cell) -> tuple[Model, ...]:
        return cell.models

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Accuracy and routing of a cell, by domain."""
        begin = time.perf_counter()
        measured = {domain: self._measure(domain, model, cell) for domain, model in cell.runs}
        seconds = round(time.perf_counter() - begin, 2)
        return {"trained": set_digest(self.trained), "domains": measured, "seconds": seconds}

    def _measure(self, domain: str, model: Model, cell: Cell) -> dict[str, Any]:
        folder, source = self.path(model), self.path(Trained(domain))
        asked = asked_problems(domain, self.scale.problems)
        if cell.forced:
            written = generate_forced(
                folder,
                source,
                [p.prompt for p in asked],
                max_new_tokens=LONGEST_ANSWER,
                device=self.device,
            )
            solved = check_all(asked, written)
            routing = {}  # the source's own, by construction
        else:
            solved = accuracy(folder, asked, device=self.device)
            texts = {domain: held_out_text(domain, self.scale.held_out)}
            agreement = compare_routing(folder, {domain: source}, texts, device=self.device)
            routing = asdict(agreement[domain])
        return {
            "problems": len(solved),
            "accuracy": sum(solved) / len(solved),
            "solved": pack(solved),
            **routing,
        }


def set_digest(trained: Path) -> str:
    """Tells one training of a set from another: its manifest has settings, losses and the date."""
    return hashlib.sha256((trained / MANIFEST).read_bytes()).hexdigest()[:16]


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-=.," else "_" for c in name)
