"""vLLM in this process (extra `vllm`). It batches by itself and returns all completions at once."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from moemerge.checkpoint import Checkpoint
from moemerge.config.models import ModelLike
from moemerge.config.text_settings import GenerationSettings
from moemerge.errors import UsageError
from moemerge.lab.generation.engine import Completion, CompletionRequest

AT_A_TIME: Final = 2048  # completions per call, between two writes to disk
LARGEST_SEED: Final = 2**31 - 1


def check_installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise UsageError(
            "the engine vllm needs the package vllm, which is not installed",
            hint='pip install "moemerge[vllm]", or serve the model and use `engine="server"`',
        )


class VllmEngine:
    """Loads a model into vLLM's `LLM`."""

    name = "vllm"

    def __init__(
        self,
        model: ModelLike,
        tokenizer: PreTrainedTokenizerBase,
        settings: GenerationSettings,
    ) -> None:
        # Its workers must not inherit our CUDA context.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        self._vllm: Any = importlib.import_module("vllm")
        self._settings = settings
        with Checkpoint.open(model) as checkpoint:
            folder = str(checkpoint.path)
        self._llm = self._vllm.LLM(model=folder, dtype=settings.dtype, seed=settings.seed)

    def generate(self, wanted: Sequence[CompletionRequest], total: int) -> Iterator[Completion]:
        for begin in range(0, len(wanted), AT_A_TIME):
            some = wanted[begin : begin + AT_A_TIME]
            prompts = [{"prompt_token_ids": list(w.tokens)} for w in some]
            answers = self._llm.generate(prompts, [self._sampling(w) for w in some], use_tqdm=False)
            for w, answer in zip(some, answers, strict=True):
                output = answer.outputs[0]
                cut = output.finish_reason == "length"
                yield w.completed(output.text, len(output.token_ids), self._settings.stop, cut=cut)

    def close(self) -> None:
        del self._llm

    def _sampling(self, wanted: CompletionRequest) -> Any:
        s = self._settings
        return self._vllm.SamplingParams(
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            max_tokens=s.max_new_tokens,  # vLLM's default is 16
            seed=wanted.stream(s.seed) & LARGEST_SEED,
            stop=list(s.stop) or None,
        )
