"""A diagnosis document with plausible figures, for pages: the same arguments, the same document.

Choices are really drawn and compared, so that loads, flows and mismatches agree with each other.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from moemerge.routing.figures import FIGURES

DOMAINS = ("math", "code", "chat", "law", "medicine", "french")
Row = dict[str, Any]
# A label that would end a script or an attribute, and speaks to plotly, jinja and spreadsheets.
HOSTILE = (
    "</script><script>window.hacked=1</script>\"'><img src=x onerror=hacked=1>%{x}{{7*7}}=1+1<!--"
)


def sample_document(
    *,
    layers: int = 16,
    experts: int = 64,
    top_k: int = 8,
    domains: int = 3,
    models: tuple[str, ...] = ("model", "ties-merge"),
    swaps: bool = True,
    calibration: bool = True,
    seed: int = 0,
    tokens: int = 600,
    flows: int = 40,
) -> dict[str, Any]:
    """`tokens` are drawn for each layer and domain; the document speaks of a hundred times more."""
    rng = np.random.default_rng(seed)
    names = DOMAINS[:domains]
    rows = [
        _layer_row(rng, model, damage, domain, layer, layers, experts, top_k, tokens, flows)
        for layer in range(layers)
        for domain in names
        for model, damage in zip(models, (0.22, 0.75, 0.5, 0.9), strict=False)
    ]
    rows.sort(key=lambda row: (models.index(row["model"]), names.index(row["domain"])))
    totals = [_total(rows, model, domain, layers * top_k) for model in models for domain in names]
    first = [total for total in totals if total["model"] == models[0]]
    mismatch = float(np.mean([total["mismatch"] for total in first]))
    per_token = float(np.mean([total["mismatched_per_token"] for total in first]))
    excess = float(np.mean([total["loss"] - total["loss_source"] for total in first]))
    return {
        "kind": "diagnosis",
        "version": "0.1.0",
        "command": "moemerge diagnose out/calibrated --source math=org/math "
        "--data math=math.jsonl --against out/ties-merge --report page.html",
        "created": "2026-11-15T05:20:00+00:00",
        "model": {
            "label": "out/calibrated",
            "architecture": "OlmoeForCausalLM",
            "layers": layers,
            "experts": experts,
            "top_k": top_k,
            "gate": f"softmax, top {top_k} of {experts}",
            "routers": layers,
        },
        "models": [
            {"name": model, "label": "out/calibrated" if i == 0 else model}
            for i, model in enumerate(models)
        ],
        "sources": {name: {"label": f"org/olmoe-{name}"} for name in names},
        "domains": {
            name: {"tokens": tokens * 100, "rows": tokens, "files": [f"data/{name}.jsonl"]}
            for name in names
        },
        "figures": figure_words(),
        "layers": rows,
        "totals": totals,
        "swaps": _swaps(first) if swaps else [],
        "calibration": _calibration(rng, rows, models, names, layers) if calibration else None,
        "verdict": {
            "words": "The routing is close to its sources: calibration removed most of the damage "
            "that the merge had done, and what is left sits in the last layers.",
            "recommended": list(models[:1]),
            "theory": "Yes: 80.0% of the tokens are within Lemma 1's neighbourhood.",
            "numbers": [
                {"label": "of the choices differ", "value": mismatch, "text": f"{mismatch:.1%}"},
                {
                    "label": f"of {layers * top_k} choices per token changed",
                    "value": per_token,
                    "text": f"{per_token:.1f}",
                },
                {
                    "label": "nats of loss above the sources",
                    "value": excess,
                    "text": f"{excess:+.3f}",
                },
            ],
        },
        "advice": [
            f"Mismatch is concentrated in layers {layers - 4}-{layers - 1}: "
            "calibrate again with --layers last:4.",
            "Most of the divergence is in the features, not in the routers: "
            "try --targets source-features.",
        ],
        "settings": {"max_length": 2048, "seed": 0},
        "device": "cuda",
        "dtype": "bfloat16",
        "notices": [],
        "seconds": 41.7,
    }


def figure_words() -> list[dict[str, Any]]:
    """What a document says of its figures."""
    return [figure.to_json() for figure in FIGURES.values()]


def grown(document: dict[str, Any], layers: int, seed: int = 0) -> dict[str, Any]:
    """The document with its first layer's rows repeated, each with loads and flows of its own.

    Much cheaper than drawing tokens, and as large as the real thing.
    """
    rng = np.random.default_rng(seed)
    first = [row for row in document["layers"] if row["layer"] == 0]
    rows = []
    for row in first:
        experts = len(row["load"])
        for layer in range(layers):
            loads = rng.dirichlet(np.full(experts, 0.7), size=2)
            flow = [[a, b, s * rng.uniform(0.2, 1.0)] for a, b, s in row["flow"]]
            changes = {key: row[key] * rng.uniform(0.5, 1.5) for key in ("mismatch", "kl", "drift")}
            changes |= {"layer": layer, "flow": flow}
            changes |= {"load_source": loads[0].tolist(), "load": loads[1].tolist()}
            rows.append(row | changes)
    return document | {"layers": rows}


def hostile(value: Any) -> Any:
    """The document with every string replaced that is not a name by which rows are found."""
    keys = ("model", "domain", "name", "kind", "weights_of", "routers_of", "quantity", "out_of")
    if isinstance(value, dict):
        return {k: v if k in keys and isinstance(v, str) else hostile(v) for k, v in value.items()}
    if isinstance(value, list):
        return [hostile(one) for one in value]
    return HOSTILE if isinstance(value, str) else value


def renamed(document: dict[str, Any]) -> dict[str, Any]:
    """A domain, and a model, that are hostile by name."""
    text = json.dumps(document)
    for name in ("math", "ties-merge"):
        text = text.replace(json.dumps(name), json.dumps(f"{name} {HOSTILE}"))
    return dict(json.loads(text))


def _layer_row(
    rng: np.random.Generator,
    model: str,
    damage: float,
    domain: str,
    layer: int,
    layers: int,
    experts: int,
    top_k: int,
    tokens: int,
    flows: int,
) -> Row:
    depth = (layer + 1) / layers
    hurt = damage * (0.25 + 0.75 * depth**1.6) * (1.0 + 0.15 * DOMAINS.index(domain))
    taste = np.random.default_rng([layer, DOMAINS.index(domain), experts]).normal(size=experts)
    z = 0.7 * taste + rng.normal(size=(tokens, experts))
    shared = 0.5 * rng.normal(size=experts)
    gap = hurt * (shared + 0.8 * rng.normal(size=(tokens, experts)))
    wanted, chosen = (_chosen(logits, top_k) for logits in (z, z + gap))
    missed = (wanted & ~chosen).sum(axis=1)
    p, q = _softmax(z), _softmax(z + gap)
    kl = float((p * np.log(p / q)).sum(axis=1).mean())
    on_features = kl * (0.35 + 0.2 * math.sin(layer))
    shift = np.linalg.norm(gap, axis=1) / np.linalg.norm(z, axis=1)
    load_source, load = (c.sum(axis=0) / c.sum() for c in (wanted, chosen))
    return {
        "model": model,
        "domain": domain,
        "layer": layer,
        "router": f"model.layers.{layer}.mlp.gate.weight",
        "tokens": tokens * 100,
        "mismatch": float(missed.mean() / top_k),
        "any_mismatch": float((missed > 0).mean()),
        "top1_agreement": float((z.argmax(1) == (z + gap).argmax(1)).mean()),
        "weighted_overlap": float(np.minimum(p, q).sum(axis=1).mean()),
        "kl": kl,
        "kl_on_features": on_features,
        "mismatch_on_features": float(missed.mean() / top_k) * 0.5,
        "quadratic": on_features * (1.0 + 0.4 * hurt * math.cos(3 * layer)),
        "logit_shift": float(shift.mean()) * 0.4,
        "shift_small": float((0.4 * shift < 0.1).mean()),
        "shift_moderate": float((0.4 * shift < 0.2).mean()),
        "load_source": load_source.tolist(),
        "load": load.tolist(),
        "entropy_source": _entropy(load_source),
        "entropy": _entropy(load),
        "dead": np.flatnonzero((load < 0.1 * load_source) & (load_source > 0)).tolist(),
        "overloaded": np.flatnonzero(load > 3 * load_source).tolist(),
        "drift": 0.05 + 0.4 * hurt,
        "flow": _flow(wanted & ~chosen, chosen & ~wanted, tokens * top_k, flows),
    }


def _chosen(logits: np.ndarray, top_k: int) -> np.ndarray:
    order = np.argsort(-logits, axis=1)[:, :top_k]
    chosen = np.zeros(logits.shape, dtype=bool)
    np.put_along_axis(chosen, order, True, axis=1)
    return chosen


def _softmax(z: np.ndarray) -> np.ndarray:
    grown = np.exp(z - z.max(axis=1, keepdims=True))
    return grown / grown.sum(axis=1, keepdims=True)


def _entropy(load: np.ndarray) -> float:
    used = load[load > 0]
    return float(-(used * np.log(used)).sum() / math.log(load.size))


def _flow(lost: np.ndarray, won: np.ndarray, choices: int, flows: int) -> list[list[float]]:
    share = (lost.astype(float).T / np.maximum(lost.sum(axis=1), 1)) @ won.astype(float) / choices
    flat = share.ravel()
    kept = min(flows, flat.size)
    largest = np.argpartition(-flat, kept - 1)[:kept]
    order = largest[np.argsort(-flat[largest], kind="stable")]
    pairs = [divmod(int(i), share.shape[1]) for i in order]
    return [[a, b, float(share[a, b])] for a, b in pairs if share[a, b] > 0]


def _total(rows: list[Row], model: str, domain: str, choices: int) -> Row:
    mine = [row for row in rows if row["model"] == model and row["domain"] == domain]

    def mean(key: str) -> float:
        return float(np.mean([row[key] for row in mine]))

    averaged = (
        "mismatch",
        "top1_agreement",
        "weighted_overlap",
        "kl",
        "kl_on_features",
        "mismatch_on_features",
        "quadratic",
        "logit_shift",
        "shift_small",
        "shift_moderate",
        "drift",
    )
    loss_source = 1.2 + 0.2 * DOMAINS.index(domain)
    return {
        "model": model,
        "domain": domain,
        "tokens": mine[0]["tokens"],
        "any_mismatch": 1.0 - math.prod(1.0 - row["any_mismatch"] for row in mine),
        "mismatched_per_token": mean("mismatch") * choices,
        "choices_per_token": choices,
        "mismatched_layers_per_token": sum(row["any_mismatch"] for row in mine),
        **{key: mean(key) for key in averaged},
        "loss": loss_source + mean("mismatch"),
        "loss_source": loss_source,
    }


def _swaps(totals: list[Row]) -> list[Row]:
    found = []
    for total in totals:
        domain, low, high = total["domain"], total["loss_source"], total["loss"]
        pairs = (
            ("model", "model", total["mismatch"], high),
            ("model", domain, 0.6 * total["mismatch"], low + 0.55 * (high - low)),
            (domain, "model", 0.7 * total["mismatch"], low + 0.4 * (high - low)),
        )
        found += [
            {"domain": domain, "weights_of": w, "routers_of": r, "mismatch": m, "loss": loss}
            for w, r, m, loss in pairs
        ]
    return found


def _calibration(
    rng: np.random.Generator,
    rows: list[Row],
    models: tuple[str, ...],
    names: tuple[str, ...],
    layers: int,
) -> dict[str, Any]:
    def figures(model: str, layer: int, key: str) -> dict[str, float]:
        return {
            row["domain"]: row[key]
            for row in rows
            if row["model"] == model and row["layer"] == layer
        }

    found = []
    for layer in range(layers):
        steps = int(rng.integers(24, 70))
        rate = 10 ** (-6.1 / steps)
        wobble = np.exp(0.25 * rng.normal(size=steps + 1))
        history = [float(rate**i * wobble[i]) for i in range(steps + 1)]
        found.append(
            {
                "layer": layer,
                "router": f"model.layers.{layer}.mlp.gate.weight",
                "tokens": dict.fromkeys(names, 60000),
                "status": "converged",
                "iterations": steps,
                "residual": history[-1],
                "residuals": history,
                "kl_before": figures(models[-1], layer, "kl_on_features"),
                "kl_after": figures(models[0], layer, "kl_on_features"),
                "mismatch_before": figures(models[-1], layer, "mismatch_on_features"),
                "mismatch_after": figures(models[0], layer, "mismatch_on_features"),
                "seconds": 0.4,
                "preconditioner": "kronecker",
            }
        )
    return {
        "merged": "out/ties-merge",
        "output": "out/calibrated",
        "settings": {"alpha": 0.9, "rtol": 1e-6, "max_steps": 1000},
        "layers": found,
        "seconds": 12.5,
    }
