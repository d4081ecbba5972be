"""Does it pay to choose the kept experts by the loss, before or after the repair?

    python -m evidence.selection docs/data/selection.json

Bundled specialists lose a third or half of their experts. The candidates are the experts that
`reap` keeps, those that a greedy search by the loss of the pruned model keeps, and random changes
of `reap`'s scores. Every candidate is refitted. The loss that chooses is of answers that no repair
reads.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import moemerge
from evidence.layout import EOS
from evidence.pruning import EXPERTS, read_problems
from moemerge.lab.testbed import bundled_set
from moemerge.lab.testbed.demo import PROBLEMS, accuracy, draw_test_problems, one_thread
from moemerge.lab.testbed.tasks import Problem

KEPT = (16, 12)
ROWS = 512  # for the scores and the repair
CHOOSING = slice(744, 1000)  # rows whose answers' loss chooses
CHANGES = 6  # random candidates
NOISE = 0.5  # standard deviation of the logarithm of a random candidate's scores

Choice = Mapping[int, Sequence[int]]  # kept experts of every layer


class Network:
    """A specialist in float32 from which experts can be removed."""

    def __init__(self, folder: Path, rows: Sequence[Problem]) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.layers = [layer.mlp for layer in self.model.model.layers]
        self.weights = [
            (mlp.gate.weight.data, mlp.experts.gate_up_proj.data, mlp.experts.down_proj.data)
            for mlp in self.layers
        ]
        ids, starts = [], []
        for row in rows:
            ids.append(torch.tensor(self.tokenizer(row.prompt + row.answer + EOS)["input_ids"]))
            starts.append(len(self.tokenizer(row.prompt)["input_ids"]))
        self.ids = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        self.labels = torch.full_like(self.ids, -100)
        for row_ids, labels, start in zip(ids, self.labels, starts, strict=True):
            labels[start : len(row_ids)] = row_ids[start:]

    def keep(self, layer: int, experts: Sequence[int]) -> None:
        mlp, (gate, gate_up, down) = self.layers[layer], self.weights[layer]
        mlp.gate.weight.data = gate[experts]
        mlp.experts.gate_up_proj.data, mlp.experts.down_proj.data = gate_up[experts], down[experts]
        mlp.experts.num_experts = len(experts)

    @torch.no_grad()
    def loss(self) -> float:
        """Return the mean loss of the answers' tokens. Padding follows a row, so it is not seen."""
        logits: Tensor = self.model(input_ids=self.ids).logits[:, :-1]
        return float(
            nn.functional.cross_entropy(logits.flatten(0, 1), self.labels[:, 1:].flatten())
        )

    def save(self, folder: Path, choice: Choice) -> Path:
        for layer, experts in choice.items():
            self.keep(layer, experts)
        self.model.config.num_experts = len(choice[0])
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        return folder


def greedy(network: Network, count: int) -> Choice:
    """Remove, layer by layer, the expert without which the loss is lowest."""
    choice = {}
    for layer in range(len(network.layers)):
        kept = list(range(EXPERTS))
        while len(kept) > count:
            losses = {}
            for expert in kept:
                network.keep(layer, [other for other in kept if other != expert])
                losses[expert] = network.loss()
            kept.remove(min(losses, key=losses.__getitem__))
        network.keep(layer, kept)
        choice[layer] = kept
    return choice


def changed(scores: Mapping[str, Sequence[float]], count: int, seed: int) -> Choice:
    """Return the experts with the highest scores after a random factor on each."""
    generator = torch.Generator().manual_seed(seed)
    choice = {}
    for layer, values in scores.items():
        factors = torch.exp(NOISE * torch.randn(EXPERTS, generator=generator))
        ranked = (torch.tensor(values) * factors).argsort(descending=True)
        choice[int(layer)] = sorted(ranked[:count].tolist())
    return choice


def measure(domain: str, count: int, folder: Path) -> list[dict[str, Any]]:
    """Return loss and solved problems of every candidate, before and after a refit."""
    trained = bundled_set()
    source = trained.models[domain]
    rows = read_problems(domain)
    texts = rows[CHOOSING]
    data = [{"prompt": row.prompt, "response": row.answer} for row in rows[:ROWS]]
    problems = draw_test_problems(domain, PROBLEMS)
    shared: dict[str, Any] = {"data": {domain: data}, "device": "cpu", "dtype": "float32"}
    pruned = moemerge.prune(source, folder / "reap", keep=count / EXPERTS, measure=False, **shared)
    kept = {int(layer): list(own) for layer, own in pruned.pruning.kept.items()}
    candidates: dict[str, Choice] = {"reap": kept}
    candidates["greedy"] = greedy(Network(source, texts), count)
    for seed in range(CHANGES):
        candidates[f"changed {seed}"] = changed(pruned.pruning.scores, count, seed)
    measured = []
    for name, choice in candidates.items():
        network = Network(source, texts)
        start = network.save(folder / f"{name}-pruned", choice)
        experts = folder / f"{name}.json"
        experts.write_text(json.dumps({str(layer): own for layer, own in choice.items()}))
        repaired = folder / f"{name}-repaired"
        moemerge.refit(
            start, repaired, sources={domain: source}, experts={domain: experts}, **shared
        )
        row = {"domain": domain, "kept": count, "candidate": name}
        for state, path in (("pruned", start), ("repaired", repaired)):
            row[f"{state}_loss"] = round(Network(path, texts).loss(), 4)
            row[f"{state}_solved"] = sum(accuracy(path, problems, device="cpu"))
        measured.append(row)
        print(row, flush=True)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    measured: list[dict[str, Any]] = []
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        for count in KEPT:
            for domain in ("math", "code"):
                place = Path(folder) / f"{domain}-{count}"
                place.mkdir()
                measured += measure(domain, count, place)
                document = {
                    "version": moemerge.__version__,
                    "date": time.strftime("%Y-%m-%d"),
                    "problems": PROBLEMS,
                    "correlation": correlation(measured),
                    "measured": measured,
                }
                options.out.write_text(json.dumps(document, indent=1) + "\n")


def correlation(measured: Sequence[Mapping[str, Any]]) -> float:
    """Return the correlation of loss and solved problems after the repair, inside each setting."""
    pairs: list[tuple[float, float]] = []
    for setting in {(row["domain"], row["kept"]) for row in measured}:
        own = [row for row in measured if (row["domain"], row["kept"]) == setting]
        means = [
            sum(row[key] for row in own) / len(own) for key in ("repaired_loss", "repaired_solved")
        ]
        pairs += [
            (row["repaired_loss"] - means[0], row["repaired_solved"] - means[1]) for row in own
        ]
    product = sum(a * b for a, b in pairs)
    norms = math.sqrt(sum(a * a for a, _ in pairs) * sum(b * b for _, b in pairs))
    return round(product / norms, 2) if norms else 0.0


if __name__ == "__main__":
    main()
