"""The embedded engine: a model of transformers in this process, which writes and weighs texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from moemerge.checkpoint import Checkpoint, format_size
from moemerge.config.models import ModelRef
from moemerge.errors import ResourceError
from moemerge.features.loading import build_skeleton
from moemerge.features.settings import stored_dtype
from moemerge.features.weights import Weights
from moemerge.generation.continuous import PROMPTS, ContinuousBatch, prefill, why_not
from moemerge.generation.engine import Completion, Finish, Wanted, cut_at_stops
from moemerge.generation.padded import PaddedBatches
from moemerge.generation.settings import GenerationSettings
from moemerge.generation.slots import bytes_per_token
from moemerge.runtime.devices import available_memory, resolve_device
from moemerge.runtime.dtypes import parse_dtype
from moemerge.runtime.progress import Progress

# Completions at a time: beyond these a step takes longer in proportion.
MOST_SLOTS: Final = {"cuda": 512, "cpu": 64}
HEADROOM: Final = 0.85  # of the free memory; activations of a step and of a prefill take the rest
UNBOUNDED: Final = 1 << 40  # a model that states no context length


class TransformersEngine:
    """Loads a model whole; `generate` may be called several times."""

    name = "transformers"

    def __init__(
        self,
        model: str | Path | ModelRef,
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
        self._why_not = why_not(self._model)
        if self._why_not is not None:
            progress.note(
                f"{self._label} has {self._why_not}: prompts run in padded batches, which is slower"
            )

    def generate(self, wanted: Sequence[Wanted], total: int) -> Iterator[Completion]:
        context = _context(self._model)
        fitting = [w for w in wanted if len(w.tokens) < context]
        for w in wanted:
            if len(w.tokens) >= context:
                detail = f"a prompt of {len(w.tokens)} tokens, the model reads {context}"
                yield Completion(w.prompt, w.sample, "", 0, Finish.FAILED, detail)
        if not fitting:
            return
        longest = max(len(w.tokens) for w in fitting)
        capacity = min(context, longest + self._settings.max_new_tokens)
        # Equal shapes round alike: a run that is resumed gets the batch it had at first.
        rows = min(self._rows(capacity), 1 << (total - 1).bit_length())
        batch = self._batch(rows, capacity)
        for done in batch.run(fitting):
            text = self._tokenizer.decode(done.tokens, skip_special_tokens=True)
            text, stopped = cut_at_stops(str(text), self._settings.stop)
            finish = Finish.STOP if stopped else done.finish
            yield Completion(done.wanted.prompt, done.wanted.sample, text, len(done.tokens), finish)

    def log_likelihoods(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[Likelihood]:
        return log_likelihoods(self._model, pairs, _context(self._model))

    def close(self) -> None:
        """The model goes with the engine."""
        del self._model

    def _batch(self, rows: int, capacity: int) -> ContinuousBatch | PaddedBatches:
        common: dict[str, Any] = {
            "ends": self._ends,
            "capacity": capacity,
            "stopped": self._stopped,
        }
        if self._why_not is None:
            return ContinuousBatch(self._model, self._settings, slots=rows, **common)
        return PaddedBatches(self._model, self._settings, rows=rows, **common)

    def _stopped(self, tokens: list[int]) -> bool:
        if not self._settings.stop:
            return False
        return cut_at_stops(str(self._tokenizer.decode(tokens)), self._settings.stop)[1]

    def _rows(self, capacity: int) -> int:
        """Completions at a time: as many as pay, and fit beside the weights."""
        each = bytes_per_token(prefill(self._model, PROMPTS, {})) * capacity
        room = int(HEADROOM * available_memory(self._device))
        if each > room:
            raise ResourceError(
                f"one completion of {capacity} tokens needs {format_size(each)} for its cache, "
                f"and {format_size(room)} are left on {self._device} beside the weights",
                hint="lower `max_new_tokens`, use shorter prompts, or a larger device",
            )
        wanted = self._settings.batch_size or MOST_SLOTS[self._device.type]
        return min(wanted, room // max(1, each))


def _load(checkpoint: Checkpoint, dtype: str, device: torch.device) -> PreTrainedModel:
    wanted = parse_dtype(dtype).torch if dtype != "auto" else _usual_dtype(checkpoint, device)
    model = build_skeleton(checkpoint, wanted)
    weights = Weights(model, checkpoint, device, wanted)
    try:
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
    finally:
        weights.close()
    return model


def _usual_dtype(checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """A CPU gains nothing from short numbers, and in long ones texts do not hang on rounding."""
    return torch.float32 if device.type == "cpu" else stored_dtype(checkpoint)


def end_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> frozenset[int]:
    """Every token that ends a completion: of the generation config, the config, the tokenizer."""
    named: list[Any] = [model.config.get_text_config().eos_token_id, tokenizer.eos_token_id]
    if (folder / "generation_config.json").exists():
        named.append(GenerationConfig.from_pretrained(str(folder)).eos_token_id)
    ends: set[int] = set()
    for value in named:
        ends.update(value if isinstance(value, list | tuple) else [value])
    return frozenset(token for token in ends if isinstance(token, int))


def _context(model: PreTrainedModel) -> int:
    config: Any = model.config.get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or UNBOUNDED)


# --- how likely texts are -------------------------------------------------------------------------

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
