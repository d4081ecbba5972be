"""A diagnosis document with plausible figures, for pages: the same arguments, the same document."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from moemerge.routing.figures import FIGURES

DOMAINS = ("math", "code", "chat", "law", "medicine", "french")
FLOWS = 200
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
) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    names = DOMAINS[:domains]
    rows = [
        _layer_row(rng, model, domain, layer, damage * (layer + 1) / layers, experts)
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
            name: {"tokens": 60_000, "rows": 600, "files": [f"data/{name}.jsonl"]}
            | {"reference": "source"}
            for name in names
        },
        "figures": figure_words(),
        "layers": rows,
        "totals": totals,
        "swaps": _swaps(first) if swaps else [],
        "calibration": _calibration(rng, rows, models, names, layers) if calibration else None,
        **dict.fromkeys(("calibration_of", "refit", "refit_of")),
        "check": [],
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
    rng: np.random.Generator, model: str, domain: str, layer: int, mismatch: float, experts: int
) -> Row:
    load_source, load = rng.dirichlet(np.full(experts, 0.7), size=2)
    drawn = rng.choice(experts**2, size=min(FLOWS, experts**2), replace=False).tolist()
    pairs = [(a, b) for a, b in (divmod(i, experts) for i in drawn) if a != b]
    return {
        "model": model,
        "domain": domain,
        "layer": layer,
        "router": f"model.layers.{layer}.mlp.gate.weight",
        "tokens": 60_000,
        "mismatch": mismatch,
        "any_mismatch": 1.0 - (1.0 - mismatch) ** 2,
        "top1_agreement": 1.0 - mismatch,
        "weighted_overlap": 1.0 - mismatch,
        "kl": mismatch,
        "kl_on_features": mismatch * (0.35 + 0.2 * math.sin(layer)),
        "mismatch_on_features": mismatch * 0.5,
        "quadratic": mismatch * (0.4 + 0.2 * math.cos(3 * layer)),
        "logit_shift": 0.2 * mismatch,
        "shift_small": 1.0 - mismatch,
        "shift_moderate": 1.0 - 0.5 * mismatch,
        "load_source": load_source.tolist(),
        "load": load.tolist(),
        "entropy_source": 0.9,
        "entropy": 0.9 - 0.1 * mismatch,
        "dead": np.flatnonzero(load < 0.1 * load_source).tolist(),
        "overloaded": np.flatnonzero(load > 3 * load_source).tolist(),
        "drift": 0.05 + 0.4 * mismatch,
        "flow": [[a, b, mismatch / (10 * i)] for i, (a, b) in enumerate(pairs, 1)],
    }


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
                "preconditioner": "two-level",
            }
        )
    return {
        "merged": "out/ties-merge",
        "output": "out/calibrated",
        "settings": {"alpha": 0.9, "rtol": 1e-6, "max_steps": 1000},
        "layers": found,
        "seconds": 12.5,
    }
