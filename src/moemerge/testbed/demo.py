"""The demo: merge specialists, see routing break, calibrate, see it heal; refit the rest."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from moemerge import api
from moemerge.calibration.settings import Targets
from moemerge.testbed.accuracy import RoutingAgreement, accuracy, compare_routing
from moemerge.testbed.experiments.merges import (
    AVERAGE,
    METHODS,
    MergeFiles,
    graft_config,
    merge_config,
)
from moemerge.testbed.experiments.texts import asked_problems, held_out_text
from moemerge.testbed.training import TrainedSet
from moemerge.text.rows import write_rows

DOMAINS = ("math", "code")
SHOWN = ("wudi", "ties")
REFITTED = "wudi"  # one is enough to see it, and takes as long as three calibrations
PROBLEMS = 500  # of each domain
HELD_OUT = 100  # of them, whose tokens show the routing
ROWS = 256  # of calibration text of each domain

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
    routers: str  # how its routers came about; empty for trained models
    folder: str
    accuracy: Mapping[str, float]  # by domain
    agreement: Mapping[str, RoutingAgreement]  # with each domain's specialist, on held-out text
    seconds: float  # to make and to measure it

    @property
    def mean(self) -> float:
        return sum(self.accuracy.values()) / len(self.accuracy)

    @property
    def mismatch(self) -> float:
        return sum(a.mismatch for a in self.agreement.values()) / len(self.agreement)


class Demo:
    """Everything the demo makes lies in `folder`; the trained models stay where they are."""

    def __init__(
        self, trained: TrainedSet, folder: Path, *, device: str = "auto", problems: int = PROBLEMS
    ) -> None:
        self.folder = folder
        self._base = trained.base
        self._models = {domain: trained.models[domain] for domain in DOMAINS}
        self._data = {domain: trained.data[domain] for domain in DOMAINS}
        self._device = device
        self._problems = {domain: asked_problems(domain, problems) for domain in DOMAINS}
        held_out = min(HELD_OUT, problems)
        self._held_out = {domain: held_out_text(domain, held_out) for domain in DOMAINS}

    def rows(self) -> Iterator[DemoRow]:
        """Make and measure every model, one by one."""
        for name, path in {"base": self._base, **self._models}.items():
            yield self._measured(name, "" if name == "base" else SPECIALIST, path, _Clock())
        averages = self._merge(AVERAGE, "average")
        for method in SHOWN:
            clock = _Clock()
            merged = self._merge(method, f"{method}-merged")
            yield self._measured(METHODS[method].title, AS_MERGED, merged, clock)
            clock = _Clock()
            control = self.folder / f"{method}-averaged-routers"
            api.merge(graft_config(merged, averages), control, device="cpu")
            yield self._measured(METHODS[method].title, AVERAGED, control, clock)
            for label, targets in TARGETS.items():
                clock = _Clock()
                out = self.folder / f"{method}-calibrated-{targets}"
                self._calibrate(merged, out, targets)
                yield self._measured(METHODS[method].title, label, out, clock)
            if method == REFITTED:
                clock = _Clock()
                refitted = self._refit(merged, self.folder / f"{method}-refitted")
                yield self._measured(METHODS[method].title, REFIT, refitted, clock)

    def write_page(self, method: str = SHOWN[0]) -> Path:
        """Diagnose one merge beside its repaired versions, and write what was found as a page."""
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
        given = MergeFiles(self._base, self._models, self._data)
        api.merge(merge_config(method, given), out, device="cpu")
        return out

    def _calibrate(self, merged: Path, out: Path, targets: Targets) -> None:
        api.calibrate(
            merged,
            out,
            sources=self._models,
            data=self._data,
            targets=targets,
            limit=ROWS,
            holdout=0.0,  # the demo measures on problems of its own
            device=self._device,
        )

    def _refit(self, merged: Path, out: Path) -> Path:
        api.refit(
            merged,
            out,
            sources=self._models,
            data=self._data,
            limit=ROWS,
            device=self._device,
            dtype="float32",  # many CPUs are slow at the bfloat16 that is stored
        )
        return out

    def _measured(self, model: str, routers: str, path: Path, clock: _Clock) -> DemoRow:
        solved = {
            domain: accuracy(path, asked, device=self._device)
            for domain, asked in self._problems.items()
        }
        return DemoRow(
            model=model,
            routers=routers,
            folder=str(path),
            accuracy={domain: sum(own) / len(own) for domain, own in solved.items()},
            agreement=compare_routing(path, self._models, self._held_out, device=self._device),
            seconds=clock.seconds,
        )

    def _write_held_out(self, domain: str) -> Path:
        path = self.folder / f"{domain}-held-out.jsonl"
        write_rows(path, ({"text": text} for text in self._held_out[domain]))
        return path


@contextmanager
def one_thread() -> Iterator[None]:
    """Models as small as these only lose time when a second thread has to be woken and waited for,
    and much of it where the cores are busy with something else."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return round(time.perf_counter() - self._start, 2)


# --- in words -----------------------------------------------------------------------------------


def findings(rows: list[DemoRow]) -> list[str]:
    """What the numbers say, whichever way they went."""
    sentences = []
    own = [row.accuracy[row.model] for row in rows if row.routers == SPECIALIST]
    specialists = sum(own) / len(own)
    for method in SHOWN:
        title = METHODS[method].title
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
