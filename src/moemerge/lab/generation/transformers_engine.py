"""The embedded engine: a transformers model in this process.

It generates by continuous batching. Models whose caches hold more than keys and values in one
window (sliding windows, linear attention, convolutions) generate in padded batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from moemerge.checkpoint import Checkpoint, format_size
from moemerge.config.models import ModelLike
from moemerge.config.text_settings import GenerationSettings
from moemerge.errors import NumericalError, ResourceError
from moemerge.forward.loading import build_skeleton
from moemerge.forward.settings import stored_dtype
from moemerge.forward.weights import Weights
from moemerge.lab.generation.continuous import (
    PROMPTS,
    STOPS_EVERY,
    ContinuousBatch,
    Finished,
    bytes_per_token,
    prefill,
    why_not,
    without_last,
)
from moemerge.lab.generation.drawing import draw, signed, uniform
from moemerge.lab.generation.engine import Completion, CompletionRequest, cut_at_stops
from moemerge.runtime.devices import available_memory, resolve_device
from moemerge.runtime.dtypes import parse_dtype
from moemerge.runtime.files import read_object
from moemerge.runtime.progress import Progress


@dataclass(frozen=True)
class PaddedBatches:
    """Static batches through `generate`, padded on the left. Same samples as `ContinuousBatch`,
    slower.
    """

    model: PreTrainedModel
    settings: GenerationSettings
    ends: frozenset[int]
    slots: int
    capacity: int
    stopped: Callable[[list[int]], bool]

    @torch.inference_mode()
    def run(self, wanted: Sequence[CompletionRequest]) -> Iterator[Finished]:
        for begin in range(0, len(wanted), self.slots):
            yield from self._batch(wanted[begin : begin + self.slots])

    def _batch(self, batch: Sequence[CompletionRequest]) -> Iterator[Finished]:
        device, s = self.model.device, self.settings
        longest = len(batch[0].tokens)
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
            yield Finished(w, tokens, cut=not ended)


class _Draw(LogitsProcessor):
    """Samples a token and masks all others, so that greedy search selects it."""

    def __init__(self, settings: GenerationSettings, streams: Tensor, longest: int) -> None:
        self.settings, self._streams, self._longest = settings, streams, longest

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        steps = torch.full_like(self._streams, input_ids.shape[1] - self._longest)
        chosen = draw(scores, uniform(self._streams, steps), self.settings)
        return torch.full_like(scores, float("-inf")).scatter(-1, chosen[:, None], 0.0)


class _Stops(StoppingCriteria):
    """Ends a row that contains a stop text."""

    def __init__(self, stopped: Callable[[list[int]], bool], longest: int) -> None:
        self._stopped, self._longest = stopped, longest

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        written = input_ids[:, self._longest :]
        done = [False] * len(written)
        if written.shape[1] % STOPS_EVERY == 0:
            done = [self._stopped(row) for row in written.tolist()]
        return torch.tensor(done, device=input_ids.device)


# Most completions in one batch: with more, a step takes longer in proportion.
MOST_SLOTS: Final = {"cuda": 512, "cpu": 64}
HEADROOM: Final = 0.85  # share of the free memory; activations take the rest
UNBOUNDED: Final = 1 << 40  # a model that states no context length
AT_ONCE: Final = 1 << 12  # tokens of a batch of likelihoods, padding included

Likelihood = tuple[float, bool]  # log-probability, and whether every token is the likeliest


class TransformersEngine:
    """Loads a whole model; `generate` may be called several times."""

    name = "transformers"

    def __init__(
        self,
        model: ModelLike,
        tokenizer: PreTrainedTokenizerBase,
        settings: GenerationSettings,
        progress: Progress,
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._device = resolve_device(settings.device)
        with Checkpoint.open(model) as checkpoint:
            self._label = checkpoint.label
            self._model = _load(checkpoint, settings.dtype, self._device)
            self._ends = end_tokens(self._model, tokenizer, checkpoint.path)
        _require_numbers(self._model, self._label)
        self._why_not = why_not(self._model)
        if self._why_not is not None:
            progress.note(
                f"{self._label} has {self._why_not}: prompts run in padded batches, which is slower"
            )

    def generate(self, wanted: Sequence[CompletionRequest], total: int) -> Iterator[Completion]:
        context = _context(self._model)
        fitting = [w for w in wanted if len(w.tokens) < context]
        for w in wanted:
            if len(w.tokens) >= context:
                yield w.failed(f"a prompt of {len(w.tokens)} tokens, the model reads {context}")
        if not fitting:
            return
        # Texts of similar length start together, the longest first.
        fitting.sort(key=lambda w: (-len(w.tokens), w.prompt, w.sample))
        capacity = min(context, len(fitting[0].tokens) + self._settings.max_new_tokens)
        # Equal shapes round alike: a resumed run uses the batch size it started with.
        slots = min(self._slots(capacity), 1 << (total - 1).bit_length())
        kind: type[ContinuousBatch | PaddedBatches] = ContinuousBatch
        if self._why_not is not None:
            kind = PaddedBatches
        batch = kind(
            self._model,
            self._settings,
            ends=self._ends,
            slots=slots,
            capacity=capacity,
            stopped=self._stopped,
        )
        for done in batch.run(fitting):
            text = str(self._tokenizer.decode(done.tokens, skip_special_tokens=True))
            stops, count = self._settings.stop, len(done.tokens)
            yield done.wanted.completed(text, count, stops, cut=done.cut)

    @torch.no_grad()
    def log_likelihoods(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[Likelihood]:
        """Return the log-likelihood of each continuation given its context. Texts longer than the
        model's context lose their beginning.
        """
        results: dict[int, Likelihood] = {}
        longest = _context(self._model) + 1
        texts = [[*before, *after][-longest:] for before, after in pairs]
        # Long texts first: if memory is too small, this fails at once.
        order = sorted(range(len(pairs)), key=lambda place: -len(texts[place]))
        begun = 0
        while begun < len(order):
            count = max(1, AT_ONCE // max(1, len(texts[order[begun]])))
            places = order[begun : begun + count]
            begun += count
            ids = without_last([texts[place] for place in places], self._device)
            logits = self._model(input_ids=ids, use_cache=False).logits
            for row, place in enumerate(places):
                end = len(texts[place]) - 1
                wanted = min(len(pairs[place][1]), end)
                scores = logits[row, end - wanted : end].float().log_softmax(-1)  # (tokens, words)
                target = torch.tensor(texts[place][end + 1 - wanted :], device=scores.device)
                chosen = scores.gather(-1, target[:, None]).sum()
                results[place] = (float(chosen), bool((scores.argmax(-1) == target).all()))
        return [results[place] for place in range(len(pairs))]

    def close(self) -> None:
        """Do nothing: the model is freed with the engine."""
        del self._model

    def _stopped(self, tokens: list[int]) -> bool:
        if not self._settings.stop:
            return False
        return cut_at_stops(str(self._tokenizer.decode(tokens)), self._settings.stop)[1]

    def _slots(self, capacity: int) -> int:
        """Return the batch size: as large as is useful and fits next to the weights."""
        each = bytes_per_token(prefill(self._model, PROMPTS, {})) * capacity
        room = int(HEADROOM * available_memory(self._device))
        if each > room:
            raise ResourceError(
                f"one completion of {capacity} tokens needs {format_size(each)} for its cache, "
                f"and {format_size(room)} are left on {self._device} next to the weights",
                hint="lower `max_new_tokens`, use shorter prompts, or a larger device",
            )
        wanted = self._settings.batch_size or MOST_SLOTS[self._device.type]
        return min(wanted, room // max(1, each))


def _load(checkpoint: Checkpoint, dtype: str, device: torch.device) -> PreTrainedModel:
    if dtype != "auto":
        wanted = parse_dtype(dtype).torch
    else:  # a CPU gains nothing from bfloat16, and float32 is less sensitive to rounding
        wanted = torch.float32 if device.type == "cpu" else stored_dtype(checkpoint)
    model = build_skeleton(checkpoint, wanted)
    with closing(Weights(model, checkpoint, device, wanted)) as weights:
        names = list(model.state_dict())
        needed, room = weights.nbytes_of(names), int(HEADROOM * available_memory(device))
        if needed > room:
            raise ResourceError(
                f"{checkpoint.label} needs {format_size(needed)} for its weights, and "
                f"{format_size(room)} can be used on {device}",
                hint="serve it elsewhere (vllm serve, for instance) and use "
                '`engine="server"` `url="http://HOST:8000/v1"`, or choose a larger device',
            )
        weights.place(weights.fetch(names))
        weights.check(names, "the model")
    return model


def end_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> frozenset[int]:
    """Return all end tokens of the generation config, the config and the tokenizer."""
    named: list[Any] = [model.config.get_text_config().eos_token_id, tokenizer.eos_token_id]
    if os.path.exists(folder / "generation_config.json"):
        named.append(read_object(folder / "generation_config.json").get("eos_token_id"))
    ends: set[int] = set()
    for value in named:
        ends.update(value if isinstance(value, list | tuple) else [value])
    return frozenset(token for token in ends if isinstance(token, int))


@torch.inference_mode()
def _require_numbers(model: PreTrainedModel, label: str) -> None:
    """Refuse a model whose logits are NaN: its answers would be empty or random."""
    ids = torch.tensor(PROMPTS[:1], device=model.device)
    if bool(model(input_ids=ids, use_cache=False).logits.isnan().any()):
        raise NumericalError(
            f"{label}: its logits are NaN",
            hint="its weights or config.json are damaged, or the dtype is too narrow for them",
        )


def _context(model: PreTrainedModel) -> int:
    config: Any = model.config.get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or UNBOUNDED)
