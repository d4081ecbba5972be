"""Batches of prompts, padded on the left, through transformers' own `generate`.

For models whose caches are more than keys and values in one window: sliding windows, linear
attention, convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from moemerge.generation.continuous import STOPS_EVERY, Finished
from moemerge.generation.drawing import draw, signed, uniform
from moemerge.generation.engine import Finish, Wanted
from moemerge.generation.settings import GenerationSettings


@dataclass(frozen=True)
class PaddedBatches:
    """Static batches. Same draws as `ContinuousBatch`, slower."""

    model: PreTrainedModel
    settings: GenerationSettings
    ends: frozenset[int]
    rows: int
    capacity: int
    stopped: Callable[[list[int]], bool]

    @torch.inference_mode()
    def run(self, wanted: Sequence[Wanted]) -> Iterator[Finished]:
        ordered = sorted(wanted, key=lambda w: (-len(w.tokens), w.prompt, w.sample))
        for begin in range(0, len(ordered), self.rows):
            yield from self._batch(ordered[begin : begin + self.rows])

    def _batch(self, batch: Sequence[Wanted]) -> Iterator[Finished]:
        device, s = self.model.device, self.settings
        longest = max(len(w.tokens) for w in batch)
        ids = torch.tensor([[0] * (longest - len(w.tokens)) + list(w.tokens) for w in batch])
        pads = torch.tensor([longest - len(w.tokens) for w in batch])
        limit = min(s.max_new_tokens, self.capacity - longest)
        streams = torch.tensor([signed(w.stream(s.seed)) for w in batch], device=device)
        generate: Any = self.model.generate
        out = generate(
            input_ids=ids.to(device),
            attention_mask=(torch.arange(longest) >= pads[:, None]).long().to(device),
            generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
                max_new_tokens=limit,
                do_sample=False,
                eos_token_id=sorted(self.ends) or None,
                pad_token_id=0,
            ),
            logits_processor=LogitsProcessorList([_Draw(s, streams, longest)]),
            stopping_criteria=StoppingCriteriaList([_Stops(self.stopped, longest)]),
        )
        for w, row in zip(batch, out[:, longest:].tolist(), strict=True):
            end = next((at for at, token in enumerate(row) if token in self.ends), None)
            tokens = row if end is None else row[:end]
            ended = end is not None or (bool(tokens) and self.stopped(tokens))
            yield Finished(w, tokens, Finish.STOP if ended else Finish.LENGTH)


class _Draw(LogitsProcessor):
    """Leaves only the token that is drawn, which the greedy search then takes."""

    def __init__(self, settings: GenerationSettings, streams: Tensor, longest: int) -> None:
        self.settings, self._streams, self._longest = settings, streams, longest

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        s = self.settings
        steps = torch.full_like(self._streams, input_ids.shape[1] - self._longest)
        chosen = draw(
            scores,
            uniform(self._streams, steps),
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
        )
        return torch.full_like(scores, float("-inf")).scatter(-1, chosen[:, None], 0.0)


class _Stops(StoppingCriteria):
    """A row is done when it holds a stop text."""

    def __init__(self, stopped: Callable[[list[int]], bool], longest: int) -> None:
        self._stopped, self._longest = stopped, longest

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        written = input_ids[:, self._longest :]
        done = [False] * len(written)
        if written.shape[1] % STOPS_EVERY == 0:
            done = [self._stopped(row) for row in written.tolist()]
        return torch.tensor(done, device=input_ids.device)
