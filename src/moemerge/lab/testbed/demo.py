"""The demo: merge specialists, calibrate the routers, refit all linear maps, and measure all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moemerge import api
from moemerge.config.faults import parse_settings
from moemerge.config.repair_settings import Targets
from moemerge.config.text_settings import GenerationSettings
from moemerge.lab.engines import CompletionRequest, TransformersEngine
from moemerge.lab.testbed import TrainedSet
from moemerge.lab.testbed.tasks import Problem, check_all, problems
from moemerge.text.rows import write_rows
from moemerge.text.tokens import load_tokenizer, prompt_tokens

LONGEST_ANSWER = 24  # tokens; no correct answer is longer


def generate(
    model: Path,
    prompts: Sequence[str],
    *,
    device: str = "auto",
    max_new_tokens: int = LONGEST_ANSWER,
) -> list[str]:
    """Return a model's greedy completion of each prompt."""
    values = {
        "max_new_tokens": max_new_tokens,
        "temperature": 0.0,
        "device": device,
        "dtype": "float32",
    }
    settings = parse_settings(GenerationSettings, values, "the demo")
    tokenizer = load_tokenizer(model)
    engine = TransformersEngine(model, tokenizer, settings)
    rows = prompt_tokens(prompts, tokenizer)
    wanted = [CompletionRequest(place, 0, tuple(row)) for place, row in enumerate(rows)]
    completions = {done.prompt: done.text for done in engine.generate(wanted)}
    engine.close()
    return [completions[place] for place in range(len(prompts))]


def accuracy(model: Path, problems: Sequence[Problem], *, device: str = "auto") -> list[bool]:
    """Return which problems a model solves."""
    return check_all(problems, generate(model, [p.prompt for p in problems], device=device))


@dataclass(frozen=True)
class RoutingAgreement:
    """How a model's routing differs from a specialist's on the same text."""

    mismatch: float  # share of the specialist's expert choices that the model does not make
    any_mismatch: float  # share of tokens with a mismatch in at least one layer
    kl: float  # mean KL(specialist ‖ model) of the routing distributions
    mismatch_layers: tuple[float, ...]
    kl_layers: tuple[float, ...]
    tokens: int


def compare_routing(
    model: Path,
    specialists: Mapping[str, Path],
    texts: Mapping[str, Sequence[str]],
    *,
    device: str = "auto",
) -> dict[str, RoutingAgreement]:
    """Compare a model's routing with each domain's specialist on the domain's texts."""
    diagnosis = api.diagnose(
        model,
        sources=specialists,
        data={domain: [{"text": text} for text in own] for domain, own in texts.items()},
        device=device,
        dtype="float32",
    )
    agreements = {}
    for domain in specialists:
        total, rows = diagnosis.total(domain), diagnosis.layers_of(domain=domain)
        agreements[domain] = RoutingAgreement(
            mismatch=total.mismatch,
            any_mismatch=total.any_mismatch,
            kl=total.kl,
            mismatch_layers=tuple(row.mismatch for row in rows),
            kl_layers=tuple(row.kl for row in rows),
            tokens=total.tokens,
        )
    return agreements


DOMAINS = ("math", "code")
TITLES = {"wudi": "WUDI", "ties": "TIES"}  # the merges that are shown
# Parameters of each model, math and code, from the appendix of the HARC paper.
PARAMETERS: dict[str, tuple[dict[str, float], ...]] = {
    "linear": ({"weight": 0.5}, {"weight": 0.5}),
    "ties": ({"density": 0.6, "weight": 0.4}, {"density": 0.6, "weight": 0.6}),
    "wudi": ({}, {}),
}
REFITTED = "wudi"  # one refit is enough to show it, and takes as long as three calibrations
PROBLEMS = 500  # per domain
TEST_SEED = 20_002  # of the test problems; no training seed uses it
HELD_OUT = 100  # problems per domain on whose text the routing is compared
ROWS = 256  # rows of calibration text per domain

SPECIALIST = "specialist"
AS_MERGED = "as merged"
AVERAGED = "averaged"
HARC = "HARC"
SOURCE = "HARC, source targets"
REFIT = "refit, all maps"
TARGETS: dict[str, Targets] = {HARC: "merged-features", SOURCE: "source-features"}


@dataclass(frozen=True)
class DemoRow:
    """One model of the table."""

    model: str  # base, a specialist's domain, or a merge's title
    routers: str  # how its routers were made; empty for the base
    folder: str
    accuracy: Mapping[str, float]  # by domain
    agreement: Mapping[str, RoutingAgreement]  # with each specialist on held-out text
    seconds: float  # to make and measure it

    @property
    def mean(self) -> float:
        return sum(self.accuracy.values()) / len(self.accuracy)

    @property
    def mismatch(self) -> float:
        return sum(a.mismatch for a in self.agreement.values()) / len(self.agreement)


class Demo:
    """Makes and measures the demo's models; all output goes to `folder`."""

    def __init__(
        self, trained: TrainedSet, folder: Path, *, device: str = "auto", count: int = PROBLEMS
    ) -> None:
        self.folder = folder
        self._base = trained.base
        self._models = {domain: trained.models[domain] for domain in DOMAINS}
        self._data = {domain: trained.data[domain] for domain in DOMAINS}
        self._device = device
        self._problems = {domain: draw_test_problems(domain, count) for domain in DOMAINS}
        self._held_out = {domain: own[:HELD_OUT] for domain, own in self._problems.items()}

    def rows(self) -> Iterator[DemoRow]:
        """Make and measure every model, one by one."""
        averages = self._merge("linear", "average")
        start = time.perf_counter()
        for model, routers, path in self._made(averages):
            yield self._measured(model, routers, path, start)
            start = time.perf_counter()

    def _made(self, averages: Path) -> Iterator[tuple[str, str, Path]]:
        """Yield each model, how its routers were made, and its folder."""
        yield "base", "", self._base
        for name, path in self._models.items():
            yield name, SPECIALIST, path
        for method, title in TITLES.items():
            merged = self._merge(method, f"{method}-merged")
            yield title, AS_MERGED, merged
            control = self.folder / f"{method}-averaged-routers"
            api.swap_routers(merged, averages, control)
            yield title, AVERAGED, control
            for label, targets in TARGETS.items():
                out = self.folder / f"{method}-calibrated-{targets}"
                # The demo measures on its own test problems, not on held-out rows.
                self._repair(api.calibrate, merged, out, targets=targets, holdout=0.0)
                yield title, label, out
            if method == REFITTED:
                out = self.folder / f"{method}-refitted"
                # The stored bfloat16 is slow on many CPUs.
                self._repair(api.refit, merged, out, dtype="float32")
                yield title, REFIT, out

    def write_page(self, method: str = REFITTED) -> Path:
        """Diagnose a merge and its repaired versions, and write the report page."""
        texts = {domain: self._write_held_out(domain) for domain in DOMAINS}
        page = self.folder / "report.html"
        api.diagnose(
            self.folder / f"{method}-merged",
            sources=self._models,
            data=texts,
            against=[
                self.folder / f"{method}-averaged-routers",
                *(self.folder / f"{method}-calibrated-{t}" for t in TARGETS.values()),
                *([self.folder / f"{method}-refitted"] if method == REFITTED else []),
            ],
            report=page,
            device=self._device,
        )
        return page

    def _merge(self, method: str, name: str) -> Path:
        out = self.folder / name
        models = [
            {"model": str(path), "name": name, "parameters": own}
            for (name, path), own in zip(self._models.items(), PARAMETERS[method], strict=True)
        ]
        config: dict[str, Any] = {
            "merge_method": method,
            "models": models,
        }
        if method != "linear":
            config["base_model"] = str(self._base)
        api.merge(config, out, device="cpu")
        return out

    def _repair(self, job: Callable[..., object], merged: Path, out: Path, **settings: Any) -> None:
        data, device = self._data, self._device
        job(merged, out, sources=self._models, data=data, limit=ROWS, device=device, **settings)

    def _measured(self, model: str, routers: str, path: Path, start: float) -> DemoRow:
        solved = {
            domain: accuracy(path, own, device=self._device)
            for domain, own in self._problems.items()
        }
        texts = {d: [p.prompt + p.answer for p in own] for d, own in self._held_out.items()}
        return DemoRow(
            model=model,
            routers=routers,
            folder=str(path),
            accuracy={domain: sum(own) / len(own) for domain, own in solved.items()},
            agreement=compare_routing(path, self._models, texts, device=self._device),
            seconds=round(time.perf_counter() - start, 2),
        )

    def _write_held_out(self, domain: str) -> Path:
        path = self.folder / f"{domain}-held-out.jsonl"
        held_out = self._held_out[domain]
        write_rows(path, ({"prompt": p.prompt, "response": p.answer} for p in held_out))
        return path


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: for models this small, waking a second one costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def draw_test_problems(domain: str, count: int) -> list[Problem]:
    """Return the test problems that every model is measured on."""
    return problems(domain, split="test", count=count, seed=TEST_SEED)


# --- summary ------------------------------------------------------------------------------------


def findings(rows: list[DemoRow]) -> list[str]:
    """Return sentences that state the gains and losses."""
    sentences = []
    own = [row.accuracy[row.model] for row in rows if row.routers == SPECIALIST]
    specialists = sum(own) / len(own)
    for title in TITLES.values():
        by = {row.routers: row for row in rows if row.model == title}
        merged, averaged, harc, source = (by[n] for n in (AS_MERGED, AVERAGED, HARC, SOURCE))
        sentences.append(
            f"{title}: merging changed {merged.mismatch:.0%} of the specialists' expert choices "
            f"and cost {_points(specialists - merged.mean)} of the {_points(specialists)} points "
            f"they score. HARC wins {_points(harc.mean - merged.mean)} of them back, with source "
            f"targets {_points(source.mean - merged.mean)}; routers merely averaged, the control, "
            f"{_points(averaged.mean - merged.mean)}."
        )
        if REFIT in by:
            gained = _points(by[REFIT].mean - merged.mean)
            sentences.append(f"{title}: refitting every linear map wins {gained}.")
    return sentences


def _points(share: float) -> str:
    return f"{100 * share:.1f}"
