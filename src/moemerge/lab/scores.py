"""Results of an evaluation: means with standard errors, and every pair of models compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from typing import Any, Final

import numpy as np

from moemerge.lab.generate import Counts
from moemerge.lab.significance import (
    ALPHA,
    Array,
    McNemar,
    drawn_means,
    flipped_means,
    interval,
    mcnemar,
    mean,
    two_sided,
    weighted,
    weighted_mean,
)
from moemerge.lab.text_losses import TextPerplexity, text_headline
from moemerge.runtime.formatting import LEAST_P, p_value

OVERALL: Final = "overall"


@dataclass(frozen=True)
class TaskScores:
    """The score of every model on every problem of one task, from 0 to 1."""

    name: str
    title: str
    domain: str  # if empty, the task is in no average
    problems: tuple[str, ...]
    scores: Array  # (models, problems)
    single: bool  # one sample: every score is 0 or 1
    counts: tuple[Counts, ...] = ()  # of each model's answers
    source: str | None = None  # the data set, for a model card
    metric: str = "accuracy"
    expected: int | None = None  # problems in the full data set
    most_tokens: int | None = None  # the limit of a completion


@dataclass(frozen=True)
class MeanScore:
    """A mean over problems; `error` is the standard error, clustered by problem.

    With a single problem it is None, and the interval is [0, 1].
    """

    mean: float
    error: float | None
    interval: tuple[float, float]


@dataclass(frozen=True)
class PairedDifference:
    """The second model's score minus the first's, problem by problem."""

    first: str
    second: str
    difference: float
    interval: tuple[float, float]
    p: float  # two-sided, by swapping the two models at random on each problem
    won: int  # problems on which the second is better
    lost: int
    mcnemar: McNemar | None = None  # if every score is 0 or 1
    draws: int = 10_000  # behind p

    @property
    def decisive_p(self) -> float:
        """McNemar's exact p if there is one, otherwise that of the draws."""
        return self.p if self.mcnemar is None else self.mcnemar.p

    @property
    def p_text(self) -> str:
        """The decisive p as text; a p that the draws cannot resolve is `< 1e-4`."""
        if self.mcnemar is not None:
            return p_value(self.mcnemar.p)
        return p_value(self.p, max(LEAST_P, 1 / self.draws))

    @property
    def significant(self) -> bool:
        """Return whether the decisive p is below 5 %."""
        return self.decisive_p < ALPHA

    @property
    def standing(self) -> str:
        """What the paired test says of the second model: better than, worse than, or not
        distinguishable from the first.
        """
        if not self.significant:
            return "not distinguishable from"
        return "better than" if self.better else "worse than"

    @property
    def better(self) -> bool:
        """Whether the second model is better by the paired test."""
        return self.significant and self.difference > 0

    def reversed(self) -> PairedDifference:
        """Return the comparison of the first with the second."""
        low, high = self.interval
        exact = self.mcnemar
        return replace(
            self,
            first=self.second,
            second=self.first,
            difference=0.0 - self.difference,  # of a tie +0.0
            interval=(-high, -low),
            won=self.lost,
            lost=self.won,
            mcnemar=exact and replace(exact, gained=exact.lost, lost=exact.gained),
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "p_text": self.p_text, "significant": self.significant}


@dataclass(frozen=True)
class ResultRow:
    """A task, or an average over tasks: each model's score, and every pair compared."""

    name: str
    title: str
    kind: str  # "task", "domain" or "overall"
    tasks: tuple[str, ...]
    scores: Mapping[str, MeanScore]
    pairs: tuple[PairedDifference, ...]

    def compared(self, first: str, second: str) -> PairedDifference:
        """Return the second model compared with the first."""
        found = next(pair for pair in self.pairs if {pair.first, pair.second} == {first, second})
        return found if found.first == first else found.reversed()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "pairs": [pair.to_json() for pair in self.pairs]}


@dataclass(frozen=True)
class EvaluationReport:
    """All numbers of an evaluation."""

    protocol: str
    settings: Mapping[str, Any]
    models: Mapping[str, str]  # names in tables -> models as given
    tasks: tuple[TaskScores, ...]
    rows: tuple[ResultRow, ...]
    notices: tuple[str, ...] = ()
    seconds: float = 0.0
    # For each merge, which of the other models are its "base" and its "source"s.
    inputs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    perplexity: tuple[TextPerplexity, ...] = ()  # of plain texts

    @property
    def _whole(self) -> ResultRow:
        """The most general row."""
        return next((row for row in self.rows if row.kind == "overall"), self.rows[-1])

    def _comparisons(self) -> Iterator[tuple[PairedDifference, str]]:
        """Yield each merge compared with the first one, its base and its best source; the best
        merge first. The text describes an input, and is empty for the first merge.

        A model that is an input of no other counts as a merge. Two of them are compared by the
        headline.
        """
        row = self._whole
        inputs = {model for kinds in self.inputs.values() for model in kinds}
        first, *later = [model for model in self.models if model not in inputs] or [""]

        def score(model: str) -> float:
            return row.scores[model].mean

        for merge in sorted({**self.inputs, **dict.fromkeys(later)}, key=score, reverse=True):
            kinds = self.inputs.get(merge, {})
            sources = sorted((m for m in kinds if kinds[m] != "base"), key=score)
            words = "its source" if len(sources) == 1 else "the best single source"
            if merge in later and len(self.models) > 2:
                yield row.compared(first, merge), ""
            for model in [*(m for m in kinds if kinds[m] == "base"), *sources[-1:]]:
                yield row.compared(model, merge), "the base" if kinds[model] == "base" else words

    @property
    def verdicts(self) -> list[str]:
        """What the paired test says of each merge against the first one, its base and its best
        source.
        """
        return [_verdict(one, self._whole) for one in self._comparisons()] if self.rows else []

    @property
    def _decisive(self) -> list[tuple[PairedDifference, str]]:
        """The best merge against the first one, and against an input that it is not better than;
        empty if it is better than all.
        """
        found = list(self._comparisons())
        found = [one for one in found if one[0].second == found[0][0].second]
        lost = [(pair, words) for pair, words in found if words and not pair.better]
        return [*((pair, words) for pair, words in found if not words), *lost[:1]] if lost else []

    @property
    def other_verdicts(self) -> list[str]:
        """The verdicts that the headline does not state."""
        if not self.rows:
            return []
        stated = [_verdict(one, self._whole) for one in self._decisive]
        return [text for text in self.verdicts if text not in stated]

    @property
    def headline(self) -> str:
        """Return the most important result in a sentence: that a merge is no better than its base
        or best source, or the most general comparison; for one model, its score.
        """
        if not self.rows:
            return text_headline(self.perplexity[0])
        last = self._whole
        if decisive := self._decisive:
            claims = "; ".join(_claim(one, last) for one in decisive)
            return f"{decisive[0][0].second} is {claims}"
        if not last.pairs:
            model, score = next(iter(last.scores.items()))
            return f"{model} solves {100 * score.mean:.1f}% of {last.title}"
        best = max(last.scores, key=lambda model: last.scores[model].mean)
        if len(last.pairs) > 1:
            # Only models that the paired test separates from the best one are called worse.
            alike = [
                pair.first if pair.second == best else pair.second
                for pair in last.pairs
                if best in (pair.first, pair.second) and not pair.significant
            ]
            shown = f"{100 * last.scores[best].mean:.1f}% of {last.title}"
            if not alike:
                return f"{best} is best: {shown}"
            return (
                f"{best} scores most, {shown}, but is not distinguishable from {', '.join(alike)}"
            )
        pair = last.pairs[0]
        by = f"{100 * abs(pair.difference):.1f} points of {last.title}"
        other = pair.first if best == pair.second else pair.second
        if pair.significant:
            return f"{best} is better than {other}, by {by}"
        return f"{pair.second} is not distinguishable from {pair.first}: they differ by {by}"

    def to_json(self) -> dict[str, Any]:
        return {
            "protocol": self.protocol,
            "settings": dict(self.settings),
            "models": dict(self.models),
            "verdicts": self.verdicts,
            "results": [row.to_json() for row in self.rows],
            "tasks": [self._task(task) for task in self.tasks],
            "perplexity": [text.to_json() for text in self.perplexity],
            "notices": list(self.notices),
            "seconds": round(self.seconds, 3),
        }

    def _task(self, task: TaskScores) -> dict[str, Any]:
        models = list(self.models)
        return {
            "name": task.name,
            "title": task.title,
            "domain": task.domain,
            "metric": task.metric,
            "data": task.source,
            "counts": {m: asdict(c) for m, c in zip(models, task.counts, strict=False)},
            "problems": [
                {"problem": name, **{m: float(task.scores[n, at]) for n, m in enumerate(models)}}
                for at, name in enumerate(task.problems)
            ],
        }


def _verdict(compared: tuple[PairedDifference, str], row: ResultRow) -> str:
    return f"{compared[0].second} is {_claim(compared, row)}"


def _claim(compared: tuple[PairedDifference, str], row: ResultRow) -> str:
    pair, words = compared
    named = words if words.endswith(f" {pair.first}") else f"{words}, {pair.first}"
    return (
        f"{pair.standing} {named if words else pair.first}: "
        f"{100 * pair.difference:+.1f} points of {row.title} (p {pair.p_text})"
    )


def compare_models(
    tasks: Sequence[TaskScores], models: Sequence[str], *, draws: int, seed: int
) -> tuple[ResultRow, ...]:
    """Return the rows of the table: each domain's tasks and their average, then the mean of all."""
    drawn = [_Drawn(task, len(models), draws, seed, place) for place, task in enumerate(tasks)]
    rows: list[ResultRow] = []
    domains = list(dict.fromkeys(task.domain for task in tasks if task.domain))
    averaged = [one for one in drawn if one.task.domain]
    for domain in domains:
        own = [one for one in drawn if one.task.domain == domain]
        for one in own:
            name, title = one.task.name, one.task.title
            rows.append(_row(models, [one], [1.0], (name, title, "task")))
        if len(own) > 1:
            title = f"{domain} average"
            rows.append(_row(models, own, [1 / len(own)] * len(own), (domain, title, "domain")))
    if len(domains) > 1:
        sizes = [sum(o.task.domain == one.task.domain for o in averaged) for one in averaged]
        weights = [1 / (len(domains) * size) for size in sizes]
        rows.append(_row(models, averaged, weights, (OVERALL, OVERALL, "overall")))
    for one in drawn:
        if not one.task.domain:
            rows.append(_row(models, [one], [1.0], (one.task.name, one.task.title, "task")))
    return tuple(rows)


class _Drawn:
    """Resampled means of a task. Averages over tasks use the same draws."""

    def __init__(self, task: TaskScores, models: int, draws: int, seed: int, place: int) -> None:
        self.task = task
        rng = np.random.default_rng([seed, place])
        pairs = list(combinations(range(models), 2))
        self.differences = np.array(
            [task.scores[second] - task.scores[first] for first, second in pairs]
        ).reshape(len(pairs), task.scores.shape[1])
        self.means = drawn_means(task.scores, draws, rng)  # (draws, models)
        self.flipped = flipped_means(self.differences, draws, rng)  # (draws, pairs)
        self.summaries = [mean(row) for row in task.scores.tolist()]


def _row(
    models: Sequence[str],
    drawn: Sequence[_Drawn],
    weights: Sequence[float],
    words: tuple[str, str, str],
) -> ResultRow:
    means = weighted([one.means for one in drawn], weights)
    flipped = weighted([one.flipped for one in drawn], weights)
    single = any(len(one.task.problems) == 1 for one in drawn)
    scores = {}
    for place, model in enumerate(models):
        whole = weighted_mean(weights, [one.summaries[place] for one in drawn])
        spread = (0.0, 1.0) if single else interval(means[:, place])
        scores[model] = MeanScore(whole.value, whole.error, spread)
    pairs = []
    for place, (first, second) in enumerate(combinations(range(len(models)), 2)):
        gaps = [one.differences[place] for one in drawn]
        observed = math.fsum(w * float(g.mean()) for w, g in zip(weights, gaps, strict=True))
        pairs.append(
            PairedDifference(
                first=models[first],
                second=models[second],
                difference=observed,
                interval=(-1.0, 1.0) if single else interval(means[:, second] - means[:, first]),
                p=two_sided(observed, flipped[:, place]),
                won=sum(int((g > 0).sum()) for g in gaps),
                lost=sum(int((g < 0).sum()) for g in gaps),
                mcnemar=_mcnemar(drawn, first, second),
                draws=len(means),
            )
        )
    name, title, kind = words
    names = tuple(one.task.name for one in drawn)
    return ResultRow(name, title, kind, names, scores, tuple(pairs))


def _mcnemar(drawn: Sequence[_Drawn], first: int, second: int) -> McNemar | None:
    """Return McNemar's test if it applies: one task, each problem right or wrong."""
    if len(drawn) != 1 or not drawn[0].task.single:
        return None
    scores = drawn[0].task.scores
    return mcnemar([bool(v) for v in scores[first]], [bool(v) for v in scores[second]])
