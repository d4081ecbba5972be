"""Score every expert on text: how often it is chosen, and how much it contributes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moemerge.config.repair_settings import ExpertScore
from moemerge.errors import ArchitectureError, NumericalError
from moemerge.families.architecture import RouterInfo
from moemerge.families.opened import OpenModel
from moemerge.forward.input_hooks import ExpertsHook, ExpertView
from moemerge.forward.old_stream import ModelStream
from moemerge.forward.settings import MemoryEstimate, StreamSettings
from moemerge.forward.tokens import routing_of, sort_by_expert
from moemerge.repairs.lockstep.streams import Need, open_streams
from moemerge.runtime.progress import Progress
from moemerge.text.batches import Batch

SAMPLED = 64  # tokens of each expert on which its output is compared with all others, roughly


@dataclass(frozen=True)
class LayerScores:
    """Sums over the tokens that are routed to each expert of a layer, (experts,) float64."""

    tokens: Tensor
    gates: Tensor  # gate weights
    norms: Tensor  # gate weight times the norm of the expert's output
    # Mean over some tokens of an expert (rows) of gate weight times the distance from its output to
    # that of every other expert (columns), (experts, experts); None if they are not compared.
    distances: Tensor | None = None

    def of(self, score: ExpertScore) -> Tensor:
        """Return one score per expert; the highest are kept."""
        if score == "frequency":
            return self.tokens
        if score == "norm":
            return self.norms
        reap = self.norms / self.tokens.clamp_min(1)
        return reap if self.distances is None else _nearest(self.distances, reap)


def _nearest(distances: Tensor, reap: Tensor) -> Tensor:
    """Return the distance of each expert to the nearest one with a higher reap score.

    Of two similar experts, only the lesser has a low score. The first expert of all has the largest
    distance of the layer.
    """
    order = reap.argsort(descending=True, stable=True)
    ranked = distances[order][:, order]
    ahead = torch.ones_like(ranked, dtype=torch.bool).tril(-1)
    nearest = ranked.masked_fill(~ahead, torch.inf).amin(dim=1)
    nearest[0] = distances.max()
    return torch.empty_like(nearest).scatter_(0, order, nearest)


@dataclass
class LayerSums:
    """Sums over the batches of one layer, on the stream's device."""

    sums: Tensor  # tokens, gate weights and weighted norms, (3, experts) float64
    # Weighted distances of sampled tokens, (experts, experts), and their number, (experts,).
    distances: Tensor | None
    sampled: Tensor
    quota: int  # sampled tokens per expert and batch

    @classmethod
    def empty(
        cls, experts: int, device: torch.device, batches: int, score: ExpertScore
    ) -> LayerSums:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        distances = zeros(experts, experts) if score == "similarity" else None
        quota = -(-SAMPLED // max(1, batches))
        return cls(zeros(3, experts), distances, zeros(experts), quota)

    def add(self, module: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> None:
        """Add a batch: its tokens, and the experts and weights of each."""
        experts = self.sums.shape[1]
        order, bounds = sort_by_expert(chosen, experts)
        flat, top_k = weights.reshape(-1), chosen.shape[1]
        for expert in range(experts):
            places = order[bounds[expert] : bounds[expert + 1]]
            if not len(places):
                continue
            inputs = x.index_select(0, places // top_k)
            out, gates = _output(module, expert, inputs), flat.index_select(0, places).double()
            self.sums[0, expert] += len(places)
            self.sums[1, expert] += gates.sum()
            self.sums[2, expert] += (gates * _lengths(out)).sum()
            if self.distances is None:
                continue
            some = slice(0, self.quota)
            self.sampled[expert] += len(gates[some])
            for other in range(experts):
                gap = _lengths(out[some] - _output(module, other, inputs[some]))
                self.distances[expert, other] += (gates[some] * gap).sum()

    def scores(self) -> LayerScores:
        """Return the sums on the host, distances as means."""
        distances = self.distances
        if distances is not None:
            distances = (distances / self.sampled.clamp_min(1)[:, None]).cpu()
        tokens, gates, norms = self.sums.cpu()
        return LayerScores(tokens, gates, norms, distances)


def _output(module: Any, expert: int, x: Tensor) -> Tensor:
    """Return an expert's output in float32 at least, (n, d)."""
    view = ExpertView(module, expert)
    out = view.finish(view.down(view.mid(view.pre(x))))
    return out if out.dtype == torch.float64 else out.float()


def _lengths(rows: Tensor) -> Tensor:
    """Return the norm of each row; in float64, since squares of large numbers overflow."""
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return lengths


@dataclass(frozen=True)
class OneStream:
    """The model, streamed alone."""

    stream: ModelStream

    @property
    def memory(self) -> list[MemoryEstimate]:
        return [self.stream.memory]

    def close(self) -> None:
        self.stream.close()


def score_experts(
    model: OpenModel,
    batches: Sequence[Batch],
    settings: StreamSettings,
    routers: Sequence[RouterInfo],
    score: ExpertScore,
    progress: Progress,
) -> tuple[dict[int, LayerScores], ModelStream]:
    """Return the scores of every layer with a router, and the stream, which has ended."""

    def build(chosen: StreamSettings) -> OneStream:
        return OneStream(ModelStream(model.checkpoint, batches, chosen, progress=progress))

    need = Need("pruning", 0, ["lower `max_tokens` or `max_length`"])
    opened = open_streams(build, lambda _: need, replace(settings, gather=False))
    scores: dict[int, LayerScores] = {}
    with opened.stream as stream:
        hooks = {router.layer: _experts_of(model, stream, router) for router in routers}
        by_path = {hook.path: hook for hook in hooks.values()}
        stream.stop_before(by_path)
        for stop in stream:
            hook = by_path[stop.path]
            module = stream.model.get_submodule(hook.path)
            sums = LayerSums.empty(hook.count, stream.device, len(batches), score)
            for arrival in stop.arrivals:
                with torch.no_grad():
                    sums.add(module, *routing_of(hook.path, arrival.given))
            scores[stop.layer] = sums.scores()
            if not bool(scores[stop.layer].of(score).isfinite().all()):
                raise NumericalError(
                    f"layer {stop.layer}: the outputs of experts are infinite or NaN",
                    hint='try `dtype="float32"`; if that fails too, the model is damaged',
                )
    return scores, stream


def _experts_of(model: OpenModel, stream: ModelStream, router: RouterInfo) -> ExpertsHook:
    """Return the one module with all experts of a layer; refuse other layers."""
    layers = stream.input_hooks.layers
    hooks = [hook for hook in layers[router.layer] if isinstance(hook, ExpertsHook)]
    if len(hooks) != 1 or hooks[0].count != router.rows:
        raise ArchitectureError(
            f"{model.label}: the experts of layer {router.layer} cannot be observed one by one, so "
            f"{model.architecture.model_type} cannot be pruned"
        )
    return hooks[0]
