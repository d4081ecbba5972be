"""Score every expert on text: how often it is chosen, and how much it contributes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moemerge.architectures.architecture import RouterInfo
from moemerge.architectures.opened import OpenModel
from moemerge.errors import ArchitectureError
from moemerge.features.input_hooks import ExpertsHook, ExpertView
from moemerge.features.settings import MemoryEstimate, StreamSettings
from moemerge.features.spill import Offload
from moemerge.features.stream import ModelStream
from moemerge.features.tokens import sort_by_expert
from moemerge.lockstep.streams import Need, open_streams, process_bytes
from moemerge.pruning.settings import ExpertScore
from moemerge.runtime.progress import Progress
from moemerge.text.batches import Batch


@dataclass(frozen=True)
class LayerScores:
    """Sums over the tokens that are routed to each expert of a layer, (experts,) float64."""

    tokens: Tensor
    gates: Tensor  # gate weights
    norms: Tensor  # gate weight times the norm of the expert's output

    def of(self, score: ExpertScore) -> Tensor:
        """Return one score per expert; the highest are kept."""
        if score == "frequency":
            return self.tokens
        return self.norms / self.tokens.clamp_min(1) if score == "reap" else self.norms


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
    progress: Progress,
) -> tuple[dict[int, LayerScores], int]:
    """Return the scores of every layer with a router, and the estimated memory in bytes."""

    def build(offload: Offload) -> OneStream:
        chosen = replace(settings, offload=offload, gather=False)
        return OneStream(ModelStream(model.checkpoint, batches, chosen, progress=progress))

    need = Need("pruning", 0, ["lower `max_tokens` or `max_length`"])
    opened = open_streams(build, lambda _: need, settings)
    scores: dict[int, LayerScores] = {}
    with opened.stream as stream:
        hooks = {router.layer: _experts_of(model, stream, router) for router in routers}
        by_path = {hook.path: hook for hook in hooks.values()}
        stream.stop_before(by_path)
        for stop in stream:
            hook = by_path[stop.path]
            module = stream.model.get_submodule(hook.path)
            sums = torch.zeros(3, hook.count, dtype=torch.float64, device=stream.device)
            for arrival in stop.arrivals:
                if len(arrival.given) < 3:
                    raise ArchitectureError(
                        f"{hook.path} does not receive the routing of its tokens"
                    )
                with torch.no_grad():
                    _add(sums, module, *arrival.given[:3])
            scores[stop.layer] = LayerScores(*sums.cpu())
    return scores, process_bytes(opened.memory, need.extra)


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


def _add(sums: Tensor, module: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> None:
    """Add a batch's tokens, gate weights and weighted norms to the sums of each expert."""
    if chosen.is_floating_point():
        chosen, weights = weights, chosen
    order, bounds = sort_by_expert(chosen, sums.shape[1])
    flat, top_k = weights.reshape(-1), chosen.shape[1]
    for expert in range(sums.shape[1]):
        places = order[bounds[expert] : bounds[expert + 1]]
        if not len(places):
            continue
        view = ExpertView(module, expert)
        out = view.finish(view.down(view.mid(view.pre(x.index_select(0, places // top_k)))))
        wide = out if out.dtype == torch.float64 else out.float()
        gates = flat.index_select(0, places).double()
        sums[0, expert] += len(places)
        sums[1, expert] += gates.sum()
        sums[2, expert] += (gates * wide.norm(dim=1).double()).sum()
