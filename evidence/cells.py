"""Cells of the tables: how each model is made with moemerge's API, and what is measured.

A cell starts from a trained model or a merge, applies steps (swapped routers, calibration, refit,
fine-tuning) and measures the result. `journal` runs the cells of a set one after the
other: merges are the nodes that cells share; everything else is made inside a cell.
The name of a cell is its key in `cells.jsonl`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import moemerge
from evidence.finetuning import FineTuned, finetune_many
from evidence.forced import generate_forced
from evidence.methods import AVERAGE, EVERY, MergeFiles, merge_config
from evidence.packing import pack
from evidence.scoring import accuracy
from evidence.texts import (
    GENERAL_ROWS,
    general_file,
    general_text,
    held_out_text,
    kept_text,
    read_texts,
    test_set,
    text_file,
    validation_problems,
    write_texts,
)
from moemerge.lab.testbed import BASE, MANIFEST, open_set
from moemerge.lab.testbed.demo import LONGEST_ANSWER, compare_routing
from moemerge.lab.testbed.tasks import DOMAINS, check_all

VALIDATION = 500  # problems per domain for choosing one of several fine-tunings
CHOICE = "choice.json"  # in a model's folder: which fine-tuning was chosen
EXACT_SETTINGS: Mapping[str, Any] = {"targets": "source-features", "objective": "exact"}


@dataclass(frozen=True)
class SetKey:
    """A trained set; a table's rows are repeated over sets that differ only by seed."""

    arch: str
    preset: str
    regime: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arch}-{self.preset}-{self.regime}-{self.seed}"

    def to_json(self) -> Mapping[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Scale:
    """How much is measured, and with how much text routers are calibrated."""

    problems: int = 1500  # per domain
    held_out: int = 400  # of them, on whose text the routing is compared
    rows: int = 512  # calibration text per domain
    tuning_steps: int = 100  # of fine-tuning after a merge


@dataclass(frozen=True)
class Merge:
    """Specialists merged with one of `methods.EVERY`."""

    method: str
    domains: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.method}({','.join(self.domains)})"


@dataclass(frozen=True)
class Bench:
    """The place where the cells of one trained set are made and measured."""

    trained: Path
    folder: Path
    scale: Scale
    device: str

    # --- what `journal.run_cells` calls ---

    def prepare(self) -> None:
        """Write the calibration text of every kind, unless it exists."""
        marker = self.folder / "texts" / f"rows-{self.scale.rows}"
        if not marker.exists():
            models = open_set(self.trained).models
            write_texts(marker.parent, models, rows=self.scale.rows, device=self.device)
            marker.touch()

    def make(self, node: Merge) -> Path:
        """Merge the specialists, unless the merge exists."""
        out = self.merged(node)
        if not out.exists():
            # On a CPU in any case: models this small do not keep a GPU busy.
            moemerge.merge(self._merge_config(node), out, device="cpu")
        return out

    def remove(self, node: Merge) -> None:
        shutil.rmtree(self.merged(node), ignore_errors=True)

    def measure(self, cell: Cell) -> dict[str, Any]:
        begin = time.perf_counter()
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            measured = cell.measure(self, Path(scratch))
        seconds = round(time.perf_counter() - begin, 2)
        return {"trained": set_digest(self.trained), **measured, "seconds": seconds}

    # --- models and text ---

    def merged(self, merge: Merge) -> Path:
        return self.folder / "models" / merge.name

    def model(self, name: str) -> Path:
        """Return the folder of the base or of a domain's specialist."""
        return self.trained / name

    def text(self, kind: str, domain: str) -> Path:
        return text_file(self.folder / "texts", kind, domain)

    def _merge_config(self, merge: Merge) -> dict[str, Any]:
        """Return the merge config; write general text and coefficients if it needs them."""
        recipe = EVERY[merge.method]
        files = MergeFiles(
            self.model(BASE),
            {domain: self.model(domain) for domain in merge.domains},
            {domain: self.text("correct", domain) for domain in merge.domains},
        )
        if recipe.needs_general:
            files = replace(files, general=general_file(self.folder / "texts"))
        if recipe.coefficients is not None:
            out = self.folder / f"{merge.name}.yml"
            config, text = merge_config(merge.method, files), dict(files.text)
            moemerge.find_coefficients(
                recipe.coefficients, config, out, data=text, device=self.device, overwrite=True
            )
            files = replace(files, coefficients=out)
        return merge_config(merge.method, files)

    # --- measurements ---

    def solved(self, model: Path, domain: str) -> dict[str, Any]:
        test = test_set(domain, self.scale.problems)
        return _accuracy_row(accuracy(model, test, device=self.device))

    def routing(self, model: Path, domains: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        sources = {domain: self.model(domain) for domain in domains}
        texts = {domain: held_out_text(domain, self.scale.held_out) for domain in domains}
        found = compare_routing(model, sources, texts, device=self.device)
        return {domain: asdict(agreement) for domain, agreement in found.items()}


Measure = Callable[[Bench, Path], dict[str, Any]]
# Makes a model from another one: bench, model, the domains of the merge, output folder.
Step = Callable[[Bench, Path, tuple[str, ...], Path], None]


@dataclass(frozen=True)
class Cell:
    """A measurement of one row of a table on one set."""

    name: str
    domains: tuple[str, ...]
    nodes: tuple[Merge, ...]
    measure: Measure = field(compare=False)
    steps: tuple[Step, ...] = field(default=(), compare=False)


def _measure_one(
    domains: tuple[str, ...],
    merge: Merge | None,
    steps: tuple[Step, ...],
    bench: Bench,
    scratch: Path,
) -> dict[str, Any]:
    """Measure one model on all domains, and its accuracy on domains without a source."""
    model = bench.model(BASE) if merge is None else bench.merged(merge)
    for number, step in enumerate(steps):
        out = scratch / f"step-{number}"
        step(bench, model, domains, out)
        model = out
    routing = bench.routing(model, domains)
    rows = {domain: bench.solved(model, domain) | routing[domain] for domain in domains}
    measured: dict[str, Any] = {"domains": rows}
    untouched = {d: bench.solved(model, d) for d in DOMAINS if d not in domains}
    if untouched:
        measured["untouched"] = untouched
    if (model / CHOICE).exists():
        measured["choice"] = json.loads((model / CHOICE).read_bytes())
    return measured


def _measure_each(
    domains: tuple[str, ...],
    model_for: Callable[[Bench, str, Path], Path],
    bench: Bench,
    scratch: Path,
) -> dict[str, Any]:
    """Measure a separate model on each domain."""
    rows = {}
    for domain in domains:
        model = model_for(bench, domain, scratch / domain)
        rows[domain] = bench.solved(model, domain) | bench.routing(model, (domain,))[domain]
    return {"domains": rows}


def _measure_pruned(
    domains: tuple[str, ...], steps: tuple[Step, ...], bench: Bench, scratch: Path
) -> dict[str, Any]:
    """Measure each pruned specialist on its own domain, and all of them on the other domains."""
    rows: dict[str, Any] = {}
    elsewhere: dict[str, list[bool]] = {domain: [] for domain in DOMAINS if domain not in domains}
    for domain in domains:
        model = bench.model(domain)
        for number, step in enumerate(steps):
            out = scratch / domain / str(number)
            step(bench, model, (domain,), out)
            model = out
        rows[domain] = bench.solved(model, domain)
        for other, solved in elsewhere.items():
            test = test_set(other, bench.scale.problems)
            solved += accuracy(model, test, device=bench.device)
    untouched = {domain: _accuracy_row(solved) for domain, solved in elsewhere.items()}
    return {"domains": rows, "untouched": untouched}


def _measure_forced(merge: Merge, bench: Bench, scratch: Path) -> dict[str, Any]:
    """Measure a merge with the routing of each domain's specialist."""
    rows = {}
    for domain in merge.domains:
        test = test_set(domain, bench.scale.problems)
        written = generate_forced(
            bench.merged(merge),
            bench.model(domain),
            [p.prompt for p in test],
            max_new_tokens=LONGEST_ANSWER,
            device=bench.device,
        )
        rows[domain] = _accuracy_row(check_all(test, written))
    return {"domains": rows}


def _accuracy_row(solved: list[bool]) -> dict[str, Any]:
    return {
        "problems": len(solved),
        "accuracy": sum(solved) / len(solved),
        "solved": pack(solved),
    }


def set_digest(trained: Path) -> str:
    """Return a digest of the manifest, which differs between trainings of a set."""
    return hashlib.sha256((trained / MANIFEST).read_bytes()).hexdigest()[:16]


# --- cells --------------------------------------------------------------------------------------


def _one(name: str, merge: Merge, *steps: Step, also: tuple[Merge, ...] = ()) -> Cell:
    measure = partial(_measure_one, merge.domains, merge, steps)
    return Cell(name, merge.domains, (merge, *also), measure, steps)


def base(domains: tuple[str, ...]) -> Cell:
    name = f"{BASE} on {','.join(domains)}"
    return Cell(name, domains, (), partial(_measure_one, domains, None, ()))


def specialists(domains: tuple[str, ...]) -> Cell:
    """Every specialist on its own domain."""
    name = f"specialists({','.join(domains)})"
    return Cell(name, domains, (), partial(_measure_each, domains, _specialist))


def merged(merge: Merge) -> Cell:
    return _one(merge.name, merge)


def averaged_routers(merge: Merge) -> Cell:
    """A merge with plainly averaged routers: the control."""
    average = Merge(AVERAGE, merge.domains)
    name = f"{merge.name} with routers of {average.name}"
    return _one(name, merge, _average_routers, also=(average,))


def source_routers(merge: Merge) -> Cell:
    """A merge, on each domain with the routers of its specialist."""
    measure = partial(_measure_each, merge.domains, partial(_with_source_routers, merge))
    return Cell(f"{merge.name} with source routers", merge.domains, (merge,), measure)


def merged_routers(merge: Merge) -> Cell:
    """Every specialist on its own domain, with the routers of the merge."""
    measure = partial(_measure_each, merge.domains, partial(_with_merged_routers, merge))
    return Cell(f"{merge.name} routers in the sources", merge.domains, (merge,), measure)


def forced_routing(merge: Merge) -> Cell:
    """A merge in which each token is routed as in the domain's specialist."""
    measure = partial(_measure_forced, merge)
    return Cell(f"{merge.name} with forced routing", merge.domains, (merge,), measure)


def calibrated(
    merge: Merge, text: str = "correct", share: float = 1.0, general: int = 0, **settings: Any
) -> Cell:
    """A calibrated merge; `general` rows of general text make the base one more source."""
    words = [f"{key}={value}" for key, value in sorted(settings.items())]
    words += [f"text={text}"] if text != "correct" else []
    words += [f"share={share:g}"] if share != 1.0 else []
    words += [f"base={general}"] if general else []
    step = partial(_calibrate, text=text, share=share, general=general, settings=settings)
    return _one(f"{merge.name} calibrated[{','.join(words)}]", merge, step)


def refitted(
    merge: Merge, rows: int | None = None, general: int = 0, kept: str = "", **settings: Any
) -> Cell:
    """A refitted merge; the base's text is of the domain `kept`, or of all domains."""
    words = [f"{key}={value}" for key, value in sorted(settings.items())]
    words += [f"rows={rows}"] if rows is not None else []
    words += [f"base={general}"] if general else []
    words += [f"kept={kept}"] if kept else []
    step = partial(_refit, rows=rows, general=general, kept=kept, settings=settings)
    return _one(f"{merge.name} refitted[{','.join(words)}]", merge, step)


def distilled(cell: Cell, general: int = 0, **settings: Any) -> Cell:
    """The model of a cell, distilled from the specialists and, on `general` rows, the base."""
    words = [f"{key}={value}" for key, value in sorted(settings.items())]
    words += [f"base={general}"] if general else []
    step = partial(_distill, general=general, settings=settings)
    return _one(f"{cell.name} distilled[{','.join(words)}]", cell.nodes[0], *cell.steps, step)


@dataclass(frozen=True)
class Tuning:
    """A fine-tuning: a multiple of the usual steps, and a learning rate."""

    times: int
    lr: float


# A fifth of the specialists' learning rate.
USUAL = Tuning(1, 2e-4)
SWEEP = (USUAL, Tuning(1, 1e-3), Tuning(4, 2e-4), Tuning(4, 1e-3))


def tuned(cell: Cell, tunings: tuple[Tuning, ...] = (USUAL,)) -> Cell:
    """The model of a cell, fine-tuned on the calibration text of all its domains.

    Of several fine-tunings, the one that solves most validation problems is measured.
    """
    sweep = "|".join(f"{tuning.times}x{tuning.lr:g}" for tuning in tunings)
    name = f"{cell.name} tuned" + (f"[{sweep}]" if tunings != (USUAL,) else "")
    return _one(name, cell.nodes[0], *cell.steps, partial(_tune, tunings=tunings))


def pruned(
    domains: tuple[str, ...], keep: float, score: str = "reap", repair: str | None = None
) -> Cell:
    """Specialists with a share of their experts; `repair` is one of `PRUNED_REPAIRS`."""
    words = [f"keep={keep:g}"] + ([f"score={score}"] if score != "reap" else [])
    name = f"specialists({','.join(domains)}) pruned[{','.join(words)}]"
    steps: tuple[Step, ...] = (partial(_prune, keep=keep, score=score),)
    if repair is not None:
        name, steps = f"{name} {repair}", (*steps, PRUNED_REPAIRS[repair])
    return Cell(name, domains, (), partial(_measure_pruned, domains, steps), steps)


# --- steps --------------------------------------------------------------------------------------


def _specialist(bench: Bench, domain: str, out: Path) -> Path:
    return bench.model(domain)


def _with_source_routers(merge: Merge, bench: Bench, domain: str, out: Path) -> Path:
    moemerge.swap_routers(bench.merged(merge), bench.model(domain), out)
    return out


def _with_merged_routers(merge: Merge, bench: Bench, domain: str, out: Path) -> Path:
    moemerge.swap_routers(bench.model(domain), bench.merged(merge), out)
    return out


def _average_routers(bench: Bench, model: Path, domains: tuple[str, ...], out: Path) -> None:
    moemerge.swap_routers(model, bench.merged(Merge(AVERAGE, domains)), out)


def _calibrate(
    bench: Bench,
    model: Path,
    domains: tuple[str, ...],
    out: Path,
    *,
    text: str,
    share: float,
    general: int,
    settings: Mapping[str, Any],
) -> None:
    data: dict[str, Any] = {domain: bench.text(text, domain) for domain in domains}
    limit = {}
    if share < 1:
        fewest = min(len(read_texts(path, domain)) for domain, path in data.items())
        limit = {"limit": max(1, round(share * fewest))}
    if general:
        data[BASE] = general_text(general)
    sources = {name: bench.model(name) for name in data}
    keywords: dict[str, Any] = {"holdout": 0.0, **limit, **settings, "device": bench.device}
    moemerge.calibrate(model, out, sources=sources, data=data, **keywords)


def _refit(
    bench: Bench,
    model: Path,
    domains: tuple[str, ...],
    out: Path,
    *,
    rows: int | None,
    general: int,
    kept: str,
    settings: Mapping[str, Any],
    original: bool = False,
) -> None:
    """Refit to the specialists; the base, or the original, is the source of the other text."""
    data: dict[str, Any] = {domain: bench.text("correct", domain) for domain in domains}
    if general:
        data[BASE] = kept_text(kept, general) if kept else general_text(general)
    sources = {name: bench.model(name) for name in data}
    if original:
        sources[BASE] = bench.model(domains[0])
    # `measure` is off: every cell is measured on other text anyway.
    keywords: dict[str, Any] = {"measure": False, **settings, "limit": rows}
    moemerge.refit(model, out, sources=sources, data=data, device=bench.device, **keywords)


def _distill(
    bench: Bench,
    model: Path,
    domains: tuple[str, ...],
    out: Path,
    *,
    general: int,
    settings: Mapping[str, Any],
) -> None:
    data: dict[str, Any] = {domain: bench.text("correct", domain) for domain in domains}
    if general:
        data[BASE] = general_text(general)
    sources = {name: bench.model(name) for name in data}
    keywords: dict[str, Any] = {"measure": False, **settings}
    moemerge.distill(model, out, sources=sources, data=data, device=bench.device, **keywords)


def _prune(
    bench: Bench, model: Path, domains: tuple[str, ...], out: Path, *, keep: float, score: Any
) -> None:
    data = {domain: bench.text("correct", domain) for domain in domains}
    moemerge.prune(
        model, out, data=data, keep=keep, score=score, device=bench.device, measure=False
    )


def _tune(
    bench: Bench,
    model: Path,
    domains: tuple[str, ...],
    out: Path,
    *,
    tunings: tuple[Tuning, ...],
) -> None:
    """Fine-tune on equal numbers of rows of each domain, and keep the best model."""
    texts = [read_texts(bench.text("correct", domain), domain) for domain in domains]
    fewest = min(map(len, texts))
    problems = [problem for own in texts for problem in own[:fewest]]
    models: dict[Tuning, FineTuned] = {}
    for times in dict.fromkeys(tuning.times for tuning in tunings):
        own = [tuning for tuning in tunings if tuning.times == times]
        steps, rates = times * bench.scale.tuning_steps, [tuning.lr for tuning in own]
        made = finetune_many(model, problems, rates, steps=steps, device=bench.device)
        models.update(zip(own, made, strict=True))
    if len(models) == 1:
        models.popitem()[1].write(out)
        return
    count, tested = min(VALIDATION, bench.scale.problems), bench.scale.problems
    validation = [validation_problems(domain, count, tested) for domain in domains]
    shares = {
        tuning: sum(one.accuracy(own) for own in validation) / len(validation)
        for tuning, one in models.items()
    }
    best = max(shares, key=shares.__getitem__)
    models[best].write(out)

    def values(tuning: Tuning) -> dict[str, float]:
        return {"steps": tuning.times * bench.scale.tuning_steps, "lr": tuning.lr}

    tried = [{**values(tuning), "validation": share} for tuning, share in shares.items()]
    (out / CHOICE).write_text(json.dumps({"chosen": values(best), "tried": tried}))


_refit_alone = partial(_refit, rows=None, general=0, kept="")
# Repairs of a pruned specialist, with the specialist as the source.
PRUNED_REPAIRS: Mapping[str, Step] = {
    "calibrated": partial(
        _calibrate, text="correct", share=1.0, general=0, settings=EXACT_SETTINGS
    ),
    "refitted": partial(_refit_alone, settings={}),
    "gradient": partial(_refit_alone, settings={"solver": "gradient"}),
    "refitted, chat": partial(
        _refit, rows=None, general=GENERAL_ROWS, kept="chat", settings={}, original=True
    ),
    "tuned": partial(_tune, tunings=SWEEP),
    "routers distilled": partial(_distill, general=0, settings={"only": "routers"}),
}
