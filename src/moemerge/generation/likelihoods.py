"""How likely a model finds given texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from transformers import PreTrainedModel

AT_ONCE: Final = 1 << 12  # tokens of a batch, padding included

Likelihood = tuple[float, bool]  # log-probability, and whether every token is the likeliest


@torch.no_grad()
def log_likelihoods(
    model: PreTrainedModel, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], context: int
) -> list[Likelihood]:
    """Of each (context, continuation) the continuation's, given the context. What is longer than
    the model reads loses its beginning."""
    results: dict[int, Likelihood] = {}
    texts = [[*before, *after][-(context + 1) :] for before, after in pairs]
    # Long texts first: what does not fit into memory fails at once.
    order = sorted(range(len(pairs)), key=lambda place: -len(texts[place]))
    begun = 0
    while begun < len(order):
        count = max(1, AT_ONCE // max(1, len(texts[order[begun]])))
        places = order[begun : begun + count]
        begun += count
        longest = max(len(texts[place]) for place in places) - 1
        # Padding stands behind the texts, which see nothing of it.
        rows = [[*texts[p][:-1], *[0] * (longest - len(texts[p]) + 1)] for p in places]
        logits = model(input_ids=torch.tensor(rows, device=model.device), use_cache=False).logits
        for row, place in enumerate(places):
            wanted = min(len(pairs[place][1]), len(texts[place]) - 1)
            end = len(texts[place]) - 1
            scores = logits[row, end - wanted : end].float().log_softmax(-1)  # (tokens, vocabulary)
            target = torch.tensor(texts[place][-wanted:], device=scores.device)
            chosen = scores.gather(-1, target[:, None]).sum()
            results[place] = (float(chosen), bool((scores.argmax(-1) == target).all()))
    return [results[place] for place in range(len(pairs))]
