"""Makes the models of one trained set through the product's own interface, and measures them."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moemerge import api
from moemerge.experiments.problems import pack
from moemerge.testbed.accuracy import (
    LONGEST_ANSWER,
    RoutingAgreement,
    accuracy,
    compare_routing,
)
from moemerge.testbed.experiments.forced import generate_forced
from moemerge.testbed.experiments.merges import EVERY, MergeFiles, graft_config, merge_config
from moemerge.testbed.experiments.recipes import (
    BASE,
    Calibrated,
    Cell,
    Grafted,
    Merged,
    Model,
    Refitted,
    Trained,
    Tuned,
    Tuning,
)
from moemerge.testbed.experiments.texts import (
    asked_problems,
    general_file,
    general_text,
    held_out_text,
    kept_text,
    read_texts,
    text_file,
    validation_problems,
    write_texts,
)
from moemerge.testbed.tasks import check_all
from moemerge.testbed.training import FineTuned, finetune_many, open_set
from moemerge.testbed.training.sets import MANIFEST

VALIDATION = 500  # problems of each domain, by which one of several fine-tunings is taken
CHOICE = "testbed_choice.json"  # in a model's folder: which of several it is, and why
# Seconds of one core for the small preset; only their order matters.
MERGING = {"adamerging": 60.0, "fisher": 15.0, "wudi": 9.0, "doge": 9.0, "regmean": 5.0}
CALIBRATING = 5.0
MEASURING = 2.0
REFITTING = 20.0
TUNING = 8.0


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

    @property
    def measuring(self) -> float:
        return MEASURING

    def urgency(self, model: Model) -> float:
        """About how long a model takes to make: long work first, so that no worker ends alone."""
        if isinstance(model, Merged):
            return MERGING.get(model.method, 1.0)
        if isinstance(model, Calibrated):
            settings = dict(model.settings)
            factor = 2 if settings.get("targets") == "source-features" else 1
            return CALIBRATING * factor * (2 if settings.get("objective") == "exact" else 1)
        if isinstance(model, Refitted):
            return REFITTING
        if isinstance(model, Tuned):
            return TUNING * len(model.tunings)
        return 1.0

    def make(self, model: Model) -> Path:
        """A model's folder; it and whatever it needs are made where they are not there yet."""
        out = self.path(model)
        if out.exists():
            return out
        for parent in model.parents:
            self.make(parent)
        if isinstance(model, Merged):
            self._merge(self._merge_config(model), out)
        elif isinstance(model, Grafted):
            self._merge(graft_config(self.path(model.weights), self.path(model.routers)), out)
        elif isinstance(model, Calibrated):
            self._calibrate(model, out)
        elif isinstance(model, Refitted):
            self._refit(model, out)
        elif isinstance(model, Tuned):
            self._tune(model, out)
        return out

    def _merge_config(self, model: Merged) -> dict[str, Any]:
        """With the files that it names: general text, and coefficients found from text."""
        recipe = EVERY[model.method]
        given = MergeFiles(
            self.path(Trained(BASE)),
            {domain: self.path(Trained(domain)) for domain in model.domains},
            {domain: self.text("correct", domain) for domain in model.domains},
        )
        if recipe.needs_general:
            given = replace(given, general=general_file(self.folder / "texts"))
        if recipe.coefficients is not None:
            out = self.folder / f"{_slug(model.name)}.yml"
            config = merge_config(model.method, given)
            text: dict[str, Any] = dict(given.text)
            api.find_coefficients(
                recipe.coefficients, config, out, data=text, device=self.device, overwrite=True
            )
            given = replace(given, coefficients=out)
        return merge_config(model.method, given)

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
            **self._sources(model, texts),
            device=self.device,
            **bound,
            **{"holdout": 0.0, **dict(model.settings)},
        )

    def _refit(self, model: Refitted, out: Path) -> None:
        texts = {domain: self.text("correct", domain) for domain in model.domains}
        # What it comes to is measured on other text, as for every model.
        given = {
            "measure": False,
            **dict(model.settings),
            "limit": model.rows,
            "device": self.device,
        }
        api.refit(self.path(model.model), out, **self._sources(model, texts), **given)

    def _sources(self, model: Calibrated | Refitted, texts: Mapping[str, Path]) -> dict[str, Any]:
        """The specialists with their text, and the base where it is one more source."""
        data: dict[str, Any] = dict(texts)
        if isinstance(model, Refitted) and model.kept:
            data[BASE] = kept_text(model.kept, model.general)
        elif model.general:
            data[BASE] = general_text(model.general)
        return {"sources": {name: self.path(Trained(name)) for name in data}, "data": data}

    def _tune(self, model: Tuned, out: Path) -> None:
        """On both domains' calibration text, as much of each."""
        texts = [read_texts(self.text("correct", domain), domain) for domain in model.domains]
        fewest = min(map(len, texts))
        problems = [problem for own in texts for problem in own[:fewest]]
        tuned: dict[Tuning, FineTuned] = {}
        for times in dict.fromkeys(tuning.times for tuning in model.tunings):
            own = [tuning for tuning in model.tunings if tuning.times == times]
            steps, rates = times * self.scale.tuning_steps, [tuning.lr for tuning in own]
            made = finetune_many(
                self.path(model.model), problems, rates, steps=steps, device=self.device
            )
            tuned.update(zip(own, made, strict=True))
        shares = self._validated(model, tuned) if len(tuned) > 1 else dict.fromkeys(tuned, 0.0)
        best = max(shares, key=shares.__getitem__)
        tuned[best].write(out)
        if len(tuned) > 1:
            (out / CHOICE).write_text(json.dumps(self._choice(best, shares)))

    def _validated(self, model: Tuned, tuned: Mapping[Tuning, FineTuned]) -> dict[Tuning, float]:
        """The mean share of validation problems that each solves."""
        count, tested = min(VALIDATION, self.scale.problems), self.scale.problems
        asked = [validation_problems(domain, count, tested) for domain in model.domains]
        return {
            tuning: sum(one.accuracy(own) for own in asked) / len(asked)
            for tuning, one in tuned.items()
        }

    def _choice(self, best: Tuning, shares: Mapping[Tuning, float]) -> dict[str, Any]:
        def values_of(tuning: Tuning) -> dict[str, float]:
            return {"steps": tuning.times * self.scale.tuning_steps, "lr": tuning.lr}

        tried = [{**values_of(tuning), "validation": share} for tuning, share in shares.items()]
        return {"chosen": values_of(best), "tried": tried}

    def remove(self, model: Model) -> None:
        """Take a model off the disk that nothing needs any more."""
        if not isinstance(model, Trained):
            shutil.rmtree(self.path(model), ignore_errors=True)

    # --- measurements ---

    def nodes(self, cell: Cell) -> tuple[Model, ...]:
        return cell.models

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Accuracy and routing of a cell, by domain; of untouched domains the accuracy alone."""
        begin = time.perf_counter()
        measure = self._forced if cell.forced else self._solved
        rows = {domain: measure(domain, model) for domain, model in cell.runs}
        if not cell.forced:  # whose routing is the source's, by construction
            for domain, agreement in self._agreements(cell).items():
                rows[domain] |= asdict(agreement)
        measured: dict[str, Any] = {"domains": rows}
        if cell.untouched:
            measured["untouched"] = {d: self._solved(d, model) for d, model in cell.untouched}
        choices = {self.path(model) / CHOICE for _, model in cell.runs}
        for path in choices:
            if path.exists():
                measured["choice"] = json.loads(path.read_bytes())
        seconds = round(time.perf_counter() - begin, 2)
        return {"trained": set_digest(self.trained), **measured, "seconds": seconds}

    def _agreements(self, cell: Cell) -> dict[str, RoutingAgreement]:
        """How each domain is routed beside its specialist; a model is read once for all of its."""
        domains: dict[Model, list[str]] = {}
        for domain, model in cell.runs:
            domains.setdefault(model, []).append(domain)
        found: dict[str, RoutingAgreement] = {}
        for model, own in domains.items():
            sources = {domain: self.path(Trained(domain)) for domain in own}
            texts = {domain: held_out_text(domain, self.scale.held_out) for domain in own}
            found |= compare_routing(self.path(model), sources, texts, device=self.device)
        return found

    def _solved(self, domain: str, model: Model) -> dict[str, Any]:
        asked = asked_problems(domain, self.scale.problems)
        return _accuracy_row(accuracy(self.path(model), asked, device=self.device))

    def _forced(self, domain: str, model: Model) -> dict[str, Any]:
        asked = asked_problems(domain, self.scale.problems)
        written = generate_forced(
            self.path(model),
            self.path(Trained(domain)),
            [p.prompt for p in asked],
            max_new_tokens=LONGEST_ANSWER,
            device=self.device,
        )
        return _accuracy_row(check_all(asked, written))


def _accuracy_row(solved: list[bool]) -> dict[str, Any]:
    return {
        "problems": len(solved),
        "accuracy": sum(solved) / len(solved),
        "solved": pack(solved),
    }


def set_digest(trained: Path) -> str:
    """Tells one training of a set from another: its manifest has settings, losses and the date."""
    return hashlib.sha256((trained / MANIFEST).read_bytes()).hexdigest()[:16]


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-=.," else "_" for c in name)
