"""Short completions of several models, to see at a glance whether each still works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moemerge.config.models import ModelLike
from moemerge.errors import MoeMergeError
from moemerge.runtime.progress import Progress, Silent

MAX_NEW_TOKENS = 48


def sample(
    models: Mapping[str, ModelLike],
    prompts: Sequence[str],
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    device: str = "auto",
    progress: Progress | None = None,
) -> dict[str, list[str]]:
    """Return each model's greedy completion of each prompt, without special tokens.

    One model at a time is loaded whole. If a model cannot run, its entry states why.
    """
    result = {}
    for name, model in models.items():
        try:
            result[name] = _completions(
                model, prompts, max_new_tokens, device, progress or Silent()
            )
        except MoeMergeError as error:
            result[name] = [f"(could not run: {error.message})"]
    return result


def _completions(
    model: ModelLike, prompts: Sequence[str], most: int, device: str, progress: Progress
) -> list[str]:
    from moemerge.generation.engine import CompletionRequest
    from moemerge.generation.prompts import PromptRow, open_tokenizer, tokenized
    from moemerge.generation.run import engine_maker, load_engine
    from moemerge.generation.settings import GenerationSettings

    given = {"max_new_tokens": most, "device": device}
    settings = GenerationSettings.model_validate(given)
    tokenizer = open_tokenizer(model)
    rows = [
        PromptRow(f"prompt {i}", ({"role": "user", "content": text},), {}, "")
        for i, text in enumerate(prompts)
    ]
    _, tokens = tokenized(rows, tokenizer, "")
    requests = [CompletionRequest(i, 0, tuple(ids)) for i, ids in enumerate(tokens)]
    engine = load_engine(engine_maker(model, tokenizer, settings, progress))
    try:
        completions = list(engine.generate(requests, len(requests)))
    finally:
        engine.close()
    return [c.text for c in sorted(completions, key=lambda c: c.prompt)]
