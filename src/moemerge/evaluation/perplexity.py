"""Measure the perplexity of plain text: run models, and collect their losses by document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from moemerge.architectures.opened import OpenModel, open_model
from moemerge.errors import DataError
from moemerge.evaluation.job import EvaluationJob
from moemerge.evaluation.text_losses import TextPerplexity, compare_losses
from moemerge.features.losses import DocumentLosses, NextTokenLoss
from moemerge.features.settings import StreamSettings, forward_dtype, logit_batch_tokens
from moemerge.features.stream import ModelStream
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.progress import Progress
from moemerge.runtime.ranks import SINGLE
from moemerge.text.batches import make_batches
from moemerge.text.domains import Domain, TextSettings, load_domains
from moemerge.text.tokens import load_tokenizer


def measure_texts(
    job: EvaluationJob, progress: Progress
) -> tuple[tuple[TextPerplexity, ...], list[str]]:
    """Run every model over every text; return the results, and notices about the text."""
    found: dict[str, dict[str, DocumentLosses]] = {name: {} for name in job.texts}
    rows: dict[str, dict[str, Domain]] = {name: {} for name in job.texts}
    notices: list[str] = []
    for label, reference in job.models.items():
        model = open_model(label, reference)
        model.require_readable("dequantise it to bfloat16 first and use that folder")
        domains = _read(job, model)
        losses = _losses(job, model, domains, progress)
        for domain in domains:
            notices += domain.notices
            own = losses.documents(domain)
            if own is None:
                raise DataError(
                    f"{domain.name}: no token has a next one, so there is no loss",
                    hint="give rows of more than one token",
                )
            found[domain.name][label], rows[domain.name][label] = own, domain
    results = []
    for place, (name, by_model) in enumerate(found.items()):
        alike, others = _by_tokens(rows[name])
        if others:
            notices.append(
                f"{name}: {', '.join(others)} has other tokens than {alike[0]}, so a loss a token "
                "cannot be compared"
            )
        rng = np.random.default_rng([job.settings.seed, place])
        results.append(compare_losses(name, by_model, alike, job.settings.draws, rng))
    return tuple(results), list(dict.fromkeys(notices))


def _read(job: EvaluationJob, model: OpenModel) -> tuple[Domain, ...]:
    bounds = TextSettings.of(job.settings, answers=True)
    return load_domains(job.texts, load_tokenizer(model.checkpoint.tokenizer_folder), bounds)


def _losses(
    job: EvaluationJob, model: OpenModel, domains: Sequence[Domain], progress: Progress
) -> NextTokenLoss:
    device = resolve_device(job.settings.device)
    dtype = forward_dtype(job.settings.dtype, model, device)
    most = logit_batch_tokens(model, device, dtype)
    losses = NextTokenLoss(SINGLE)
    with ModelStream(
        model.checkpoint,
        make_batches(domains, batch_tokens=most),
        StreamSettings(device, dtype),
        output="logits",
        on_output=losses.add,
        progress=progress,
    ) as running:
        for _ in running:
            pass
    model.checkpoint.require_unchanged()
    return losses


def _by_tokens(domains: Mapping[str, Domain]) -> tuple[list[str], list[str]]:
    """Return the models whose tokens are the first model's, and the others."""
    first = next(iter(domains.values()))

    def same(domain: Domain) -> bool:
        pairs = zip(first.rows, domain.rows, strict=False)
        return len(first.rows) == len(domain.rows) and all(a.equal(b) for a, b in pairs)

    alike = [name for name, domain in domains.items() if same(domain)]
    return alike, [name for name in domains if name not in alike]
