"""Prune experts: score those of every layer on text, and write the model without the others.

A score is a function of sums over the tokens that are routed to each expert: `SCORES`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from moemerge.checkpoint import CheckpointWriter, check_output, require_space
from moemerge.checkpoint.model_card import REPORT_NAME, in_code
from moemerge.checkpoint.patch import DEFAULT_SHARD_BYTES, other_files
from moemerge.config.repair_settings import PRUNE, PruningSettings
from moemerge.errors import ArchitectureError, DataError, NumericalError
from moemerge.families.architecture import RouterInfo
from moemerge.families.opened import OpenModel, open_model
from moemerge.forward.input_hooks import ExpertsHook, ExpertView
from moemerge.forward.known_configs import require_loadable
from moemerge.forward.settings import StreamSettings, batch_tokens, forward_dtype
from moemerge.forward.stream import ModelStream
from moemerge.forward.tokens import routing_of, sort_by_expert
from moemerge.forward.walk import Member, open_walk
from moemerge.repairs.card import output_files
from moemerge.repairs.experts import EXPERTS, config_with_experts
from moemerge.repairs.inputs import RepairRequest, check_names, read_text
from moemerge.repairs.report import RepairReport
from moemerge.repairs.routers import MERGED, require_same_family
from moemerge.repairs.slicing import kept_count, pruned_routers, require_sliceable, sliced_tensors
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.progress import Progress
from moemerge.runtime.ranks import alone, own_device
from moemerge.text.batches import make_batches
from moemerge.text.domains import Domain
from moemerge.text.rows import check_files

SAMPLED: Final = (
    64  # tokens of each expert on which its output is compared with all others, roughly
)
COPIERS: Final = 4  # threads that copy tensors


# --- scores ---------------------------------------------------------------------------------------


@dataclass
class ExpertSums:
    """Sums over the tokens that are routed to each expert of a layer, (experts,) float64."""

    tokens: Tensor
    gates: Tensor  # gate weights
    norms: Tensor  # gate weight times the norm of the expert's output
    # Mean over some tokens of an expert (rows) of gate weight times the distance from its output to
    # that of every other expert (columns), (experts, experts); None if they are not compared.
    distances: Tensor | None = None


def reap(sums: ExpertSums) -> Tensor:
    """Return the mean of gate weight times output norm over an expert's tokens (REAP)."""
    return sums.norms / sums.tokens.clamp_min(1)


def norm(sums: ExpertSums) -> Tensor:
    """Return the sum of gate weight times output norm."""
    return sums.norms


def frequency(sums: ExpertSums) -> Tensor:
    """Return how many tokens are routed to each expert."""
    return sums.tokens


def similarity(sums: ExpertSums) -> Tensor:
    """Return the distance of each expert to the nearest one with a higher REAP score.

    Of two similar experts, only the lesser has a low score. The first expert of all has the largest
    distance of the layer.
    """
    assert sums.distances is not None
    order = reap(sums).argsort(descending=True, stable=True)
    ranked = sums.distances[order][:, order]
    ahead = torch.ones_like(ranked, dtype=torch.bool).tril(-1)
    nearest = ranked.masked_fill(~ahead, torch.inf).amin(dim=1)
    nearest[0] = sums.distances.max()
    return torch.empty_like(nearest).scatter_(0, order, nearest)


SCORES: Final[dict[str, Callable[[ExpertSums], Tensor]]] = {  # the highest are kept
    "reap": reap,
    "norm": norm,
    "frequency": frequency,
    "similarity": similarity,
}


def sum_experts(
    module: Any, batches: Sequence[tuple[Tensor, Tensor, Tensor]], experts: int, *, compare: bool
) -> ExpertSums:
    """Sum over batches of inputs (tokens, d), chosen experts and their weights (tokens, k).

    With `compare`, the outputs of all experts are compared on some tokens of each.
    """
    device = batches[0][0].device
    sums = torch.zeros(3, experts, dtype=torch.float64, device=device)
    distances = torch.zeros(experts, experts, dtype=torch.float64, device=device)
    sampled = torch.zeros(experts, dtype=torch.float64, device=device)
    some = slice(0, -(-SAMPLED // len(batches)))
    for x, chosen, weights in batches:
        order, bounds = sort_by_expert(chosen, experts)
        for expert in range(experts):
            places = order[bounds[expert] : bounds[expert + 1]]
            if not len(places):
                continue
            inputs = x.index_select(0, places // chosen.shape[1])
            gates = weights.reshape(-1).index_select(0, places).double()
            out = _output(module, expert, inputs)
            sums[0, expert] += len(places)
            sums[1, expert] += gates.sum()
            sums[2, expert] += (gates * _lengths(out)).sum()
            if compare:
                sampled[expert] += len(gates[some])
                for other in range(experts):
                    gap = _lengths(out[some] - _output(module, other, inputs[some]))
                    distances[expert, other] += (gates[some] * gap).sum()
    means = (distances / sampled.clamp_min(1)[:, None]).cpu() if compare else None
    tokens, gates, norms = sums.cpu()
    return ExpertSums(tokens, gates, norms, means)


def _output(module: Any, expert: int, x: Tensor) -> Tensor:
    """Return an expert's output in float32 at least, (n, d)."""
    view = ExpertView(module, expert)
    out = view.finish(view.down(view.mid(view.pre(x))))
    return out if out.dtype == torch.float64 else out.float()


def _lengths(rows: Tensor) -> Tensor:
    """Return the norm of each row; in float64, since squares of large numbers overflow."""
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return lengths


# --- pruning --------------------------------------------------------------------------------------


def prune(request: RepairRequest[PruningSettings], progress: Progress) -> PruneReport:
    """Prune into `request.out`, which appears complete or not at all.

    The sources are not run: they are measured afterwards, and repairs fit to them.
    """
    start, settings = time.perf_counter(), request.settings
    model = _checked_model(request)
    count, routers = kept_count(model, settings.keep), pruned_routers(model)
    sliced_tensors(model, {r.layer: range(count) for r in routers})  # refuses unknown layouts
    text = request.text or read_text(model, request.data, request.data, settings)
    device = own_device(resolve_device(settings.device))
    stream = StreamSettings(device, forward_dtype(settings.dtype, model, device), settings.offload)
    domains = [
        Domain(domain.name, domain.rows) for domain in text.domains
    ]  # held-out rows stay out
    batches = make_batches(domains, batch_tokens=batch_tokens(model, device))
    score = SCORES[settings.score]
    sums: dict[int, ExpertSums] = {}
    kept: dict[int, list[int]] = {}
    with open_walk(
        {MERGED: Member(model.checkpoint)},
        batches,
        stream,
        job="pruning",
        last_layer=max(router.layer for router in routers),
        hints=["lower `max_tokens` or `max_length`"],
        progress=progress,
    ) as walk:
        hooks = {router.layer: _experts_of(model, walk.lead, router) for router in routers}
        by_layer = {router.layer: router for router in routers}
        for number in walk:
            if number not in hooks:
                continue
            hook = hooks[number]
            stop = walk.lead.run_to([hook.path])
            assert stop is not None
            with torch.no_grad():
                sums[number] = sum_experts(
                    walk.lead.module(hook.path),
                    [routing_of(hook.path, arrival.given) for arrival in stop.arrivals],
                    hook.count,
                    compare=settings.score == "similarity",
                )
            scores = score(sums[number])
            if not bool(scores.isfinite().all()):
                raise NumericalError(
                    f"layer {number}: the outputs of experts are infinite or NaN",
                    hint='try `dtype="float32"`; if that fails too, the model is damaged',
                )
            kept[number] = kept_experts(by_layer[number], count, sums[number], scores)
        seconds = time.perf_counter() - start
        notices = (*text.notices, *_unreached(sums), *_dropped(model))
        report = PruneReport(
            **RepairReport.run_fields(request, stream, walk.lead.stopwatch, seconds),
            offload=walk.lead.memory.offload,
            memory=walk.process_bytes,
            resumed=0,
            layers=(),
            notices=notices,
            tokens={domain.name: domain.tokens for domain in domains},
            experts_before=routers[0].rows,
            experts_after=count,
            kept={str(layer): experts for layer, experts in kept.items()},
            scores={
                str(layer): [float(f"{value:.6g}") for value in score(one).tolist()]
                for layer, one in sums.items()
            },
            removed={
                str(layer): 1 - float(sums[layer].gates[experts].sum() / sums[layer].gates.sum())
                for layer, experts in kept.items()
            },
        )
    for notice in notices:
        progress.note(notice)
    _write(request, model, kept, report)
    return report


def _checked_model(request: RepairRequest[PruningSettings]) -> OpenModel:
    """Open the model; refuse what the headers show, before any work."""
    alone("pruning")
    check_names(request.sources, request.data)
    check_files(request.data)
    model = open_model(MERGED, request.merged)
    for name, source in request.sources.items():
        require_same_family(model, open_model(name, source))
    kept_count(model, request.settings.keep)
    require_sliceable(model)
    require_loadable(model)
    check_output(request.out, overwrite=request.overwrite, inputs=model.checkpoint.folders)
    require_space(request.out, model.checkpoint.total_bytes)
    return model


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


def kept_experts(router: RouterInfo, count: int, sums: ExpertSums, scores: Tensor) -> list[int]:
    """Return the experts with the highest scores, ascending; the same number of each group."""
    reached = int((sums.tokens > 0).sum())
    if reached < count:
        raise DataError(
            f"layer {router.layer}: the text reaches {reached} of {router.rows} experts, and "
            f"{count} must be kept, so the others cannot be ranked",
            hint="give more text, or text of more kinds",
        )
    assert router.gate is not None
    values = scores.tolist()
    groups, size = router.gate.groups, router.rows // router.gate.groups
    kept: list[int] = []
    for group in range(groups):
        members = range(group * size, (group + 1) * size)
        ranked = sorted(members, key=lambda expert: (-values[expert], expert))
        kept += sorted(ranked[: count // groups])
    return kept


def _unreached(sums: Mapping[int, ExpertSums]) -> list[str]:
    """Return a notice if experts were removed because no token reached them."""
    missed = {layer: int((one.tokens == 0).sum()) for layer, one in sums.items()}
    total = sum(missed.values())
    if not total:
        return []
    layers = sum(count > 0 for count in missed.values())
    return [
        f"no token reaches {total} experts in {layers} layers, so they have the lowest score; "
        "other text may need them"
    ]


def _dropped(model: OpenModel) -> list[str]:
    """Return a notice if the checkpoint has layers that the model never runs."""
    layers = {model.architecture.layer_of(name) for name in model.checkpoint.tensors}
    beyond = sorted(n for n in layers if n is not None and n >= model.architecture.num_layers)
    if not beyond:
        return []
    return [
        f"layers {', '.join(map(str, beyond))} (multi-token prediction) are dropped: the model "
        "never runs them here, so their experts have no scores"
    ]


def _write(
    request: RepairRequest[PruningSettings],
    model: OpenModel,
    kept: Mapping[int, Sequence[int]],
    report: PruneReport,
) -> None:
    tensors = sliced_tensors(model, kept)
    with CheckpointWriter(
        request.out,
        [tensor.info for tensor in tensors],
        shard_bytes=DEFAULT_SHARD_BYTES,
        overwrite=request.overwrite,
        inputs=model.checkpoint.folders,
    ) as writer:
        with ThreadPoolExecutor(COPIERS, "moemerge-prune") as pool:
            list(pool.map(lambda tensor: tensor.write(model, writer), tensors))
        config = json.dumps(config_with_experts(model, report.experts_after), indent=2) + "\n"
        added = {"config.json": config.encode(), **output_files(request, model, report)}
        files = {**other_files(model.checkpoint), **model.checkpoint.companions()}
        for name, path in files.items():
            # The index of the original does not describe OUT.
            if name not in added and not name.endswith(".index.json"):
                writer.add_file(path, name)
        for name, data in added.items():
            writer.add_bytes(name, data)
        model.checkpoint.require_unchanged()
        writer.commit()


@dataclass(frozen=True, kw_only=True)
class PruneReport(RepairReport):
    """The part `prune` of `moemerge_report.json`."""

    repair = PRUNE

    tokens: Mapping[str, int]
    experts_before: int
    experts_after: int
    kept: Mapping[str, Sequence[int]]  # experts by layer, in the order of OUT
    scores: Mapping[str, Sequence[float]]  # of all experts by layer
    removed: Mapping[str, float]  # share of the gate weights that removed experts had, by layer

    @property
    def totals(self) -> dict[str, Any]:
        """Return the mean share of the gate weights that removed experts had."""
        return {"removed": math.fsum(self.removed.values()) / len(self.removed)}

    @property
    def card_section(self) -> str:
        return (
            f"{self.experts_after} of {self.experts_before} experts of "
            f"`{in_code(self.merged)}` were kept in each layer, by the score "
            f"`{self.settings['score']}` on {sum(self.tokens.values())} tokens. On this text the "
            f"removed experts had {self.totals['removed']:.1%} of the gate weights. "
            f"`{REPORT_NAME}` lists the kept experts."
        )

    def own_json(self) -> dict[str, Any]:
        return {
            "tokens": dict(self.tokens),
            "experts_before": self.experts_before,
            "experts_after": self.experts_after,
            EXPERTS: {layer: list(experts) for layer, experts in self.kept.items()},
            "scores": {layer: list(scores) for layer, scores in self.scores.items()},
            "removed": dict(self.removed),
        }
