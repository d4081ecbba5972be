"""Merge and repair a set of `evidence.natural`, and measure unseen packages.

`python -m evidence natural-table SET REGIME OUT MODEL...` A MODEL is a merge method followed by
repairs, such as `linear+refit+distill`; `gradient` is refit by gradient steps, `averaged` takes
the routers of `linear`, and `tuned` trains on the next-token loss alone. A repair that ends
in `-base` has the base as a source too, on general text. Settings of a repair follow it, as in
`linear+distill:steps=30:learning_rate=0.001`. `python@0.75` is a specialist with three quarters of
its experts; its repairs have the specialist as their source, and with `-base` on general text too.

OUT has one line for each model: the loss and the top-1 accuracy of every domain, and how many
closing brackets and words it completes, as sums over the rows of each test package. A word of
several tokens is complete if, given its beginning, greedy decoding writes the rest.
`linear+diagnose` is not a model: its line has what `diagnose --swaps`
says about the merge.
"""

from __future__ import annotations

import argparse
import gc
import json
import lzma
import math
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

import moemerge
from evidence.natural import DOMAINS, PAD, SPECIALISTS
from moemerge.errors import MoeMergeError

BASE = "base"
PARAMETERS: Mapping[str, Mapping[str, float]] = {
    "linear": {"weight": 1.0},
    "task_arithmetic": {"weight": 0.6},  # 1/3 is the average of three specialists
    "ties": {"weight": 1.0, "density": 0.6},
    "dare_ties": {"weight": 1.0, "density": 0.6},
    "wudi": {},
    "regmean": {},
}
STATISTICS = ("regmean",)  # methods that need the sources' text
CALIBRATIONS: Mapping[str, Mapping[str, Any]] = {
    "harc": {},
    "exact": {"objective": "exact", "targets": "source-features"},
}
DIAGNOSE = "diagnose"
SOLVED = ("layer", "status", "iterations", "seconds")  # recorded of a calibration's layers
DISTILLED = ("learning_rate", "tried_rates", "kept_step", "held_out")  # recorded of its report
BATCH = 64  # test rows of a forward pass

Sums = dict[str, tuple[float, int, int]]  # by package: summed loss, tokens, tokens predicted right


class SetOfModels:
    """The models of one set and regime, made on demand from merges and repairs."""

    def __init__(self, folder: Path, regime: str, device: str) -> None:
        self.folder, self.regime, self.device = folder, regime, device
        self.work = folder / regime / "work"

    def path(self, name: str) -> Path:
        """Return the folder of a model; merge or repair it first if it does not exist."""
        if name == BASE:
            return self.folder / BASE
        if name in SPECIALISTS:
            return self.folder / self.regime / name
        out = self.work / name
        if not out.exists():
            began = time.monotonic()
            record: dict[str, Any] = {}
            start, _, repair = name.rpartition("+")
            specialist, _, keep = name.partition("@")
            if start:
                record = self._repair(start, repair, out)
            elif keep:
                data = {specialist: self.text(specialist)}
                moemerge.prune(
                    self.path(specialist), out, data=data, keep=float(keep), device=self.device
                )
            else:
                moemerge.merge(self._merge_config(name), out, device=self.device)
            record = {"seconds": round(time.monotonic() - began, 1), **record}
            (out.parent / f"{name}.json").write_text(json.dumps(record))
        return out

    def _merge_config(self, method: str) -> dict[str, Any]:
        parameters = PARAMETERS[method]
        models = [{"model": str(self.path(d)), "parameters": {**parameters}} for d in SPECIALISTS]
        config: dict[str, Any] = {"merge_method": method, "models": models, "dtype": "float32"}
        config["out_dtype"] = "bfloat16"
        if method in STATISTICS:
            config["data"] = {domain: str(self.text(domain)) for domain in SPECIALISTS}
        elif method != "linear":
            config["base_model"] = str(self.path(BASE))
        return config

    def _repair(self, start: str, repair: str, out: Path) -> dict[str, Any]:
        """Repair a model; return what is recorded of a calibration or a distillation."""
        repair, *options = repair.split(":")
        settings = {key: json.loads(value) for key, value in (o.split("=") for o in options)}
        kind, _, with_base = repair.partition("-")
        if with_base not in ("", BASE):
            raise moemerge.MoeMergeError(f"unknown repair {repair!r}")
        specialist, _, pruned = start.partition("+")[0].partition("@")
        common = self._sources([specialist] if pruned else SPECIALISTS)
        if with_base:
            common["sources"][BASE] = self.path(specialist if pruned else BASE)
            common["data"][BASE] = self.text("general")
        model = self.path(start)
        if kind == "averaged":
            moemerge.swap_routers(model, self.path("linear"), out)
        elif kind in CALIBRATIONS:
            solved = moemerge.calibrate(model, out, **common, **CALIBRATIONS[kind], **settings)
            layers = solved.to_json()["layers"]
            return {"layers": [{key: layer[key] for key in SOLVED} for layer in layers]}
        elif kind == "refit":
            moemerge.refit(model, out, **common, **settings)
        elif kind == "gradient":
            moemerge.refit(model, out, **common, solver="gradient", **settings)
        else:
            if kind == "tuned":
                settings["next_token"] = 1.0
            report = moemerge.distill(model, out, **common, **settings).to_json()
            return {"distilled": {key: report[key] for key in DISTILLED}}
        return {}

    def text(self, domain: str) -> Path:
        """Return a domain's calibration text."""
        return self.folder / "text" / f"{domain}.jsonl"

    def _sources(self, domains: Sequence[str] = SPECIALISTS) -> dict[str, Any]:
        sources = {domain: self.path(domain) for domain in domains}
        data = {domain: self.text(domain) for domain in domains}
        return {"sources": sources, "data": data, "device": self.device}

    def diagnosis(self, merge: str) -> dict[str, Any]:
        """Return what `diagnose --swaps` finds: totals of each domain, and losses by swap."""
        found = moemerge.diagnose(self.path(merge), **self._sources(), swaps=True).to_json()
        return {key: found[key] for key in ("totals", "swaps", "seconds")}


@dataclass(frozen=True)
class TokenTexts:
    """Which tokens are closing brackets, or begin or end inside a word; (vocabulary,) each."""

    closing: Tensor
    begins: Tensor
    ends: Tensor

    @classmethod
    def of(cls, texts: Sequence[str], device: torch.device) -> TokenTexts:
        def marks(holds: Callable[[str], bool]) -> Tensor:
            return torch.tensor([holds(text) for text in texts], device=device)

        return cls(
            marks(lambda text: bool(text.strip()) and set(text.strip()) <= set(")]}")),
            marks(lambda text: re.match(r"\w", text) is not None),
            marks(lambda text: re.search(r"\w$", text) is not None),
        )

    def completed(self, ids: Tensor, right: Tensor) -> Tensor:
        """Return (rows, 4): brackets, of these predicted right, words, of these completed.

        `right` (rows, tokens − 1) states which tokens after the first are predicted right.
        """
        closing = self.closing[ids[:, 1:]]
        inside = self.begins[ids[:, 1:]] & self.ends[ids[:, :-1]]  # continues a word
        first = inside & ~pad(inside, (1, 0))[:, :-1]
        word = first.cumsum(1) * inside  # numbered from 1
        wrong = torch.zeros_like(ids).scatter_add(1, word, (inside & ~right).long())[:, 1:] > 0
        words = first.sum(1)
        return torch.stack(
            [closing.sum(1), (closing & right).sum(1), words, words - wrong.sum(1)], 1
        )


@torch.no_grad()
def package_sums(
    model: Any, rows: Sequence[Mapping[str, Any]], texts: TokenTexts
) -> tuple[Sums, dict[str, list[int]]]:
    """Return the next-token loss and top-1 hits of test rows, and `completed`, by package."""
    sums: dict[str, tuple[float, int, int]] = {}
    tasks: dict[str, list[int]] = {}
    ordered = sorted(rows, key=lambda row: len(row["ids"]))
    for start in range(0, len(ordered), BATCH):
        batch = ordered[start : start + BATCH]
        longest = max(len(row["ids"]) for row in batch)
        padded = [row["ids"] + [PAD] * (longest - len(row["ids"])) for row in batch]
        ids = torch.tensor(padded, device=model.device)
        # Padding is at the end, where causal attention does not see it.
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        labels, real = ids[:, 1:], ids[:, 1:] != PAD
        loss = cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        right = (logits.argmax(-1) == labels) & real
        numbers = torch.stack([(loss * real).sum(1), real.sum(1), right.sum(1)], 1).tolist()
        completed = texts.completed(ids, right).tolist()
        for row, (nats, tokens, hits), own in zip(batch, numbers, completed, strict=True):
            package = row["package"]
            found = sums.get(package, (0.0, 0, 0))
            sums[package] = (found[0] + nats, found[1] + int(tokens), found[2] + int(hits))
            tasks[package] = [x + y for x, y in zip(tasks.get(package, [0] * 4), own, strict=True)]
    return sums, tasks


def mean_loss(sums: Sums) -> float:
    return sum(x for x, _, _ in sums.values()) / sum(n for _, n, _ in sums.values())


def accuracy(sums: Sums) -> float:
    return sum(k for _, _, k in sums.values()) / sum(n for _, n, _ in sums.values())


def difference(one: Sums, other: Sums) -> tuple[float, float]:
    """Return the difference of two mean losses and its standard error, clustered by package."""
    tokens = sum(n for _, n, _ in one.values())
    mean = mean_loss(one) - mean_loss(other)
    residuals = [one[package][0] - other[package][0] - mean * one[package][1] for package in one]
    clusters = len(residuals)
    spread = clusters / max(1, clusters - 1) * sum(r * r for r in residuals)
    return mean, math.sqrt(spread) / tokens


def test_rows(folder: Path, domain: str) -> list[dict[str, Any]]:
    with lzma.open(folder / "text" / f"{domain}-test.jsonl.xz", "rt") as lines:
        return [json.loads(line) for line in lines]


def measure_models(
    models: SetOfModels, names: Sequence[str], out: Path, discard: bool = False
) -> None:
    """Append one line to `out` for each model that it does not have yet.

    With `discard`, a measured model is deleted if no other is made from it.
    """
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(models.path(BASE) / "tokenizer.json"))
    tokens = [tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())]
    done = (
        {json.loads(line)["model"] for line in out.read_text().splitlines()} if out.exists() else ()
    )
    rows = {domain: test_rows(models.folder, domain) for domain in DOMAINS}
    for name in (BASE, *SPECIALISTS, *names):
        if name in done:
            continue
        line: dict[str, Any] = {"model": name, "regime": models.regime, "set": models.folder.name}
        merge, _, repair = name.rpartition("+")
        if repair == DIAGNOSE:
            append(out, {**line, "diagnosis": models.diagnosis(merge)})
            continue
        try:
            path = models.path(name)
        except MoeMergeError as error:
            print(f"{name}: {error}", flush=True)
            continue
        kwargs = {"experts_implementation": "grouped_mm"} if models.device == "cuda" else {}
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **kwargs)
        model = model.to(models.device).eval()
        record = path.parent / f"{name}.json"
        line |= json.loads(record.read_text()) if record.exists() else {"seconds": None}
        texts = TokenTexts.of(tokens, model.device)
        found = {domain: package_sums(model, rows[domain], texts) for domain in DOMAINS}
        line["domains"] = {domain: sums for domain, (sums, _) in found.items()}
        line["tasks"] = {domain: tasks for domain, (_, tasks) in found.items()}
        del model
        gc.collect()
        append(out, line)
        if discard and "+" in name and not any(one.startswith(f"{name}+") for one in names):
            shutil.rmtree(path)
        losses = {domain: round(mean_loss(sums), 4) for domain, sums in line["domains"].items()}
        print(name, line["seconds"], losses, flush=True)


def append(out: Path, line: Mapping[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class Repaired:
    """A row of the table: one model on the packages that nothing else used."""

    model: str
    loss: float  # mean over the specialists' domains; of a pruned specialist: on its own
    gap: float  # to the specialists, before the repair
    closed: float  # share of the gap to the specialists that the merge or the pruning opened
    error: float  # standard error of `closed`, clustered by package
    accuracy: float  # top-1 accuracy of next tokens, on the same domains as the loss
    untouched: dict[str, float]  # loss of every other domain
    seconds: float | None


def repaired_models(lines: Sequence[Mapping[str, Any]]) -> list[Repaired]:
    """Return the measured models of one set and regime, each compared with what it repairs."""
    lines = [line for line in lines if "domains" in line]
    measured: dict[str, dict[str, Sums]] = {line["model"]: line["domains"] for line in lines}
    seconds = {line["model"]: line["seconds"] for line in lines}

    def mean(
        name: str, domains: Sequence[str], figure: Callable[[Sums], float] = mean_loss
    ) -> float:
        return sum(figure(measured[name][domain]) for domain in domains) / len(domains)

    found = []
    for name, domains in measured.items():
        if name == BASE or name in SPECIALISTS:
            continue
        start = name.partition("+")[0]
        specialist, _, pruned = start.partition("@")
        own = [specialist] if pruned else SPECIALISTS
        gap = mean(start, own) - sum(mean_loss(measured[d][d]) for d in own) / len(own)
        changes = [difference(domains[d], measured[start][d]) for d in own]
        error = math.hypot(*(e for _, e in changes)) / len(changes) / abs(gap)
        untouched = {d: mean_loss(domains[d]) for d in DOMAINS if d not in own}
        loss = mean(name, own)
        closed = (mean(start, own) - loss) / gap
        right = mean(name, own, accuracy)
        found.append(Repaired(name, loss, gap, closed, error, right, untouched, seconds[name]))
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("set", type=Path, metavar="SET")
    parser.add_argument("regime", metavar="REGIME")
    parser.add_argument("out", type=Path, metavar="OUT", help="a file of JSON lines")
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--discard", action="store_true", help="delete repaired models afterwards")


def main(options: argparse.Namespace) -> int:
    models = SetOfModels(options.set, options.regime, options.device)
    measure_models(models, options.models, options.out, options.discard)
    return 0
