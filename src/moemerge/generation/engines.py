"""Engines by their names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from moemerge.checkpoint import Checkpoint
from moemerge.config.models import ModelRef
from moemerge.errors import UsageError
from moemerge.generation.engine import Engine
from moemerge.generation.server import ServerEngine, check_urls
from moemerge.generation.settings import GenerationSettings
from moemerge.generation.transformers_engine import TransformersEngine
from moemerge.generation.vllm_engine import VllmEngine, check_installed
from moemerge.runtime.progress import Progress


def engine_maker(
    model: str | Path | ModelRef,
    tokenizer: PreTrainedTokenizerBase,
    settings: GenerationSettings,
    progress: Progress,
) -> Callable[[], Engine]:
    """A function that loads or reaches the model; what is wrong with the settings is said now."""
    if settings.engine == "server":
        check_urls(settings)
        return lambda: ServerEngine(tokenizer, settings, progress)
    if settings.url:
        raise UsageError("`url` is for a server", hint='use `engine="server"`')
    if settings.engine == "vllm":
        check_installed()
        return lambda: VllmEngine(model, tokenizer, settings)
    return lambda: TransformersEngine(model, tokenizer, settings, progress)


# What decides a completion apart from its prompt and sample.
_DECISIVE = ("temperature", "top_p", "top_k", "max_new_tokens", "stop", "seed", "engine", "dtype")


def made_by(model: str | Path | ModelRef, settings: GenerationSettings) -> dict[str, Any]:
    """What completions of one file have in common."""
    with Checkpoint.open(model) as checkpoint:
        fingerprint = checkpoint.fingerprint()
    return {"model": fingerprint, **drawn_by(settings)}


def drawn_by(settings: GenerationSettings) -> dict[str, Any]:
    """`made_by` without the model, as JSON keeps it."""
    values = {name: getattr(settings, name) for name in _DECISIVE}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
