"""The routers of a composed model: fitted on text, computed from prompts, or drawn at random.

A fit is multinomial regression on the model's own features. Every router is fitted where the model
reaches it, and the next layers run with the fitted one. The target of a token is the expert of its
domain. For text of a base that has experts already, the target is the base's own routing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moemerge.config.job_settings import ExpertEntry
from moemerge.errors import ArchitectureError, DataError, NumericalError
from moemerge.families.opened import OpenModel
from moemerge.families.rules import Gate, Score
from moemerge.forward.settings import StreamSettings, batch_tokens
from moemerge.forward.stops import ModuleStop
from moemerge.forward.stream import ModelStream
from moemerge.routing.cg import Status
from moemerge.routing.exact import minimise_divergence
from moemerge.routing.gates import divergence
from moemerge.routing.products import DomainFeatures, logits_of, working_dtype
from moemerge.runtime.progress import Progress
from moemerge.text.batches import make_batches
from moemerge.text.domains import Domain
from moemerge.text.tokens import load_tokenizer

# Probability of a domain's expert; the rest is shared by the others. With 1, the routers of
# separable domains would grow without end.
OWN_SHARE = 0.9
# Probability of all added experts on the base's text.
ADDED_SHARE = 1e-3
MOST_STEPS = 200  # of L-BFGS


@dataclass(frozen=True)
class FitDomain:
    """Text, and the experts that it is for; none for text of a base that has experts."""

    domain: Domain
    experts: tuple[int, ...]


def fit_routers(
    model: OpenModel,
    domains: Sequence[FitDomain],
    old: int,
    settings: StreamSettings,
    progress: Progress,
) -> tuple[dict[str, Tensor], tuple[dict[str, Any], ...]]:
    """Fit all routers of `model`, of whose experts the first `old` have trained routers.

    Return the new routers by name, and one row of figures per router.
    """
    most = batch_tokens(model, settings.device)
    batches = make_batches([one.domain for one in domains], batch_tokens=most)
    weights: dict[str, Tensor] = {}
    rows = []
    last = max(router.layer for router in model.architecture.routers())
    with ModelStream(
        model.checkpoint, batches, settings, last_layer=last, progress=progress
    ) as stream:
        for stop in (stop for _ in stream for stop in stream.routers()):
            weight, row = _fit(model, stop, domains, old)
            stream.put({stop.weight_name: weight})
            weights[stop.weight_name] = weight
            rows.append(row)
            progress.note(
                f"{stop.weight_name}: {own_share([row]):.1%} of the tokens to their expert"
            )
    return weights, tuple(rows)


def _fit(
    model: OpenModel, stop: ModuleStop, domains: Sequence[FitDomain], old: int
) -> tuple[Tensor, dict[str, Any]]:
    gate = model.architecture.gate(stop.layer)
    if gate is None or gate.score is not Score.SOFTMAX or gate.soft_cap or gate.scale != 1.0:
        raise ArchitectureError(
            f"{model.label}: only routers with a plain softmax can be fitted, not "
            f"{stop.weight_name}"
        )
    start = stop.weight.double()
    fitted = [_features(stop, one, start, old) for one in domains]
    held_out = [_features(stop, one, start, old, holdout=True) for one in domains]
    if old:
        solved, status = fit_added_rows(gate, fitted, start, old)
    else:
        result = minimise_divergence(gate, fitted, start)
        solved, status = result.weight, result.status
    weight = solved.cpu().to(model.checkpoint.tensors[stop.weight_name].dtype.torch)
    if not bool(torch.isfinite(weight).all()):
        raise NumericalError(
            f"{stop.weight_name} does not fit into {weight.dtype}", hint="give more text"
        )
    row = {
        "router": stop.weight_name,
        "status": str(status),
        "domains": {
            one.domain.name: {
                **_figures(gate, fits, one, weight),
                **({"held_out": _figures(gate, held, one, weight)} if held.tokens else {}),
            }
            for one, fits, held in zip(domains, fitted, held_out, strict=True)
        },
    }
    return weight, row


def fit_added_rows(
    gate: Gate, domains: Sequence[DomainFeatures], start: Tensor, old: int
) -> tuple[Tensor, Status]:
    """Minimise the same divergence over the rows of added experts alone, by L-BFGS.

    The old rows stay, and with them how the old experts share a token among themselves.
    """
    blocks = [
        (x.to(working_dtype(x)), target, one.divisor)
        for one in domains
        for x, target in zip(one.features, one.targets or (), strict=True)
    ]
    before = [logits_of(x, start[:old]) for x, _, _ in blocks]
    new = start[old:].clone().requires_grad_()
    optimiser: Any = torch.optim.LBFGS(
        [new], max_iter=MOST_STEPS, history_size=20, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimiser.zero_grad()
        total = new.new_zeros(())
        for (x, target, divisor), fixed in zip(blocks, before, strict=True):
            logits = torch.cat([fixed, logits_of(x, new)], dim=1)
            part = divergence(gate, target, logits).sum().double() / divisor
            part.backward()  # type: ignore[no-untyped-call]
            total += part.detach()
        return total

    with torch.enable_grad():
        optimiser.step(loss)
    steps = optimiser.state[new]["n_iter"]
    status = Status.CONVERGED if steps < MOST_STEPS else Status.MAX_STEPS
    return torch.cat([start[:old], new.detach()]), status


def _features(
    stop: ModuleStop, one: FitDomain, router: Tensor, old: int, *, holdout: bool = False
) -> DomainFeatures:
    blocks = stop.inputs(one.domain.name, holdout=holdout)
    targets = [target_logits(x, router, one.experts, old) for x in blocks]
    return DomainFeatures(one.domain.name, blocks, router, targets)


def target_logits(x: Tensor, router: Tensor, own: Sequence[int], old: int) -> Tensor:
    """Return the log-probabilities that the router should assign, (tokens, experts).

    The `own` experts share `OWN_SHARE`. The rest goes to the old experts as their router divides
    it, or to all others alike.
    """
    experts = router.shape[0]
    x = x.to(working_dtype(x))
    target = x.new_empty(len(x), experts)
    if old:
        before = torch.log_softmax(logits_of(x, router[:old]), dim=1)
        target[:, :old] = before + math.log(1 - OWN_SHARE if own else 1 - ADDED_SHARE)
        target[:, old:] = math.log(ADDED_SHARE / (experts - old))
    else:
        target[:] = math.log((1 - OWN_SHARE) / max(1, experts - len(own)))
    for expert in own:
        target[:, expert] = math.log(OWN_SHARE / len(own))
    return target


def _figures(
    gate: Gate, features: DomainFeatures, one: FitDomain, weight: Tensor
) -> dict[str, Any]:
    """Return the mean divergence from the target, and the share of tokens whose first expert is
    one of their domain's (on text of the base: the same as before)."""
    kl, right = 0.0, 0
    assert features.targets is not None
    for x, target in zip(features.features, features.targets, strict=True):
        logits = logits_of(x.to(working_dtype(x)), weight.to(x.device).double())
        first = logits.argmax(dim=1)
        own = torch.tensor(one.experts, device=x.device)
        hits = torch.isin(first, own) if one.experts else first == target.argmax(dim=1)
        kl += float(divergence(gate, target.double(), logits.double()).sum())
        right += int(hits.sum())
    return {"kl": kl / features.tokens, "own": right / features.tokens}


def own_share(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean of `own` over routers and domains, on held-out rows if there are any."""
    figures = [figure for row in rows for figure in row["domains"].values()]
    return float(sum(f.get("held_out", f)["own"] for f in figures) / len(figures))


# --- without text ---------------------------------------------------------------------------------

RANDOM_STD = 0.02  # the usual spread of new weights
# Rows with a higher cosine similarity choose their experts together.
SIMILAR = 0.99


def random_rows(layer: int, rows: int, width: int, seed: int) -> Tensor:
    """Return random rows for a layer, (rows, width)."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + layer)
    return RANDOM_STD * torch.randn(rows, width, generator=generator)


Prompts = dict[str, tuple[Tensor, ...]]  # those for an expert (+) and against it (-), as tokens


def tokenize_prompts(base: OpenModel, entries: Iterable[ExpertEntry]) -> list[Prompts]:
    """Return the prompts of each expert, by the base's tokenizer."""
    tokenizer = load_tokenizer(base.checkpoint.tokenizer_folder)

    def ids(text: str) -> Tensor:
        found = torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64)
        if not len(found):
            raise DataError(f"the prompt {text!r:.80} has no token")
        return found

    prompts = [
        {"+": tuple(map(ids, e.positive_prompts)), "-": tuple(map(ids, e.negative_prompts))}
        for e in entries
    ]
    require_known(base, [row for p in prompts for rows in p.values() for row in rows])
    return prompts


def require_known(base: OpenModel, rows: Iterable[Tensor]) -> None:
    """Refuse tokens without a row of the base's embedding."""
    name = base.architecture.embedding_names().input
    if name is None:
        raise ArchitectureError(f"{base.label} has no input embedding")
    largest, known = max(int(row.max()) for row in rows), base.checkpoint.tensors[name].rows
    if largest >= known:
        raise DataError(
            f"{base.label}: its tokenizer returns token {largest}, its embedding has {known} rows",
            hint="tokenizer and weights do not belong together, or the embedding must be resized",
        )


def embedded_rows(
    base: OpenModel, prompts: Sequence[Prompts], layers: Sequence[int]
) -> dict[int, Tensor]:
    """Return one row per expert, the same for all layers: the sum of its prompts' embeddings.

    The sums of positive and negative prompts are scaled to length 1 before they are subtracted.
    """
    name = base.architecture.embedding_names().input
    assert name is not None  # `require_known` has checked it

    def total(rows: Sequence[Tensor]) -> Tensor:
        ids = torch.cat(list(rows)).tolist()
        found = [base.checkpoint.read(name, (i, i + 1))[0].double() for i in ids]
        return _unit(torch.stack(found).sum(dim=0))

    rows = [_unit(total(p["+"]) - (total(p["-"]) if p["-"] else 0.0)) for p in prompts]
    return dict.fromkeys(layers, torch.stack(rows))


def hidden_rows(
    base: OpenModel,
    prompts: Sequence[Prompts],
    layers: Sequence[int],
    settings: StreamSettings,
    progress: Progress,
) -> dict[int, Tensor]:
    """Return one row per expert and layer: the mean over its prompts of the layer's input at the
    last token, minus the mean over its negative prompts, scaled to length 1."""
    domains = [
        Domain(f"{number} {sign}", rows)
        for number, p in enumerate(prompts)
        for sign, rows in p.items()
        if rows
    ]
    batches = make_batches(domains, batch_tokens=1)  # one prompt each: no padding
    found: dict[int, Tensor] = {}
    with ModelStream(
        base.checkpoint,
        batches,
        settings,
        last_layer=max(layers),
        layer_inputs=True,
        progress=progress,
    ) as stream:
        for number in stream:
            if number not in layers:
                continue
            last: dict[str, list[Tensor]] = {d.name: [] for d in domains}
            for one in stream.entered:
                last[one.batch.domain].append(one.given[0][-1].double())
            means = {name: torch.stack(rows).mean(dim=0) for name, rows in last.items()}
            count = range(len(prompts))
            rows = [_unit(means[f"{n} +"] - means.get(f"{n} -", 0.0)) for n in count]
            found[number] = torch.stack(rows).cpu()
    return found


def _unit(row: Tensor) -> Tensor:
    length = float(row.norm())
    if length == 0.0:
        raise DataError(
            "the positive and negative prompts of an expert cancel out",
            hint="use prompts that differ",
        )
    return row / length


def similar_experts(gates: dict[int, Tensor]) -> list[int]:
    """Return the layers in which two experts have almost the same row."""
    found = []
    for layer, rows in gates.items():
        unit = rows / rows.norm(dim=1, keepdim=True)
        cosine = unit @ unit.T - 2 * torch.eye(len(unit), dtype=unit.dtype)
        if float(cosine.max()) > SIMILAR:
            found.append(layer)
    return found
