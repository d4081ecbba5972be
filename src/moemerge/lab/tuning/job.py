"""Requests for fine-tuning, and all checks before training."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch

from moemerge.checkpoint.reader import AdaptedCheckpoint
from moemerge.config.models import ModelLike
from moemerge.errors import ArchitectureError, UsageError
from moemerge.families.opened import OpenModel, open_model
from moemerge.forward.settings import stored_dtype
from moemerge.forward.trainable import TrainedLayout
from moemerge.lab.tuning.settings import TuningSettings
from moemerge.runtime import ranks
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.dtypes import dtype_name
from moemerge.text.answers import Answers, load_answers
from moemerge.text.domains import TextSettings
from moemerge.text.rows import TextSource, check_files
from moemerge.text.tokens import Tokenizer, load_tokenizer

PACKAGES: Final = ("trl", "peft")
NOT_IN_KEY: Final = ("preset", "save_every", "device", "adapter", "recompute")
TOKENS_AT_ONCE: Final = 16_384  # rows per device, by default


@dataclass(frozen=True)
class TuningRequest:
    """The model, its training text, and the output."""

    model: ModelLike
    out: Path
    data: Sequence[TextSource]
    settings: TuningSettings
    overwrite: bool = False
    resume: bool = False


@dataclass(frozen=True)
class TuningJob:
    """A checked request, with its model and text read."""

    request: TuningRequest
    settings: TuningSettings  # including the preset's values
    model: OpenModel
    layout: TrainedLayout
    tokenizer: Tokenizer
    answers: Answers
    device: torch.device

    @property
    def lora(self) -> bool:
        return self.settings.lora is not None

    @property
    def half(self) -> bool:
        """Whether matrix products are computed in bfloat16."""
        if self.settings.dtype != "auto":
            return self.settings.dtype == "bfloat16"
        return self.device.type == "cuda" and stored_dtype(self.model.checkpoint).itemsize < 4

    @property
    def weights_dtype(self) -> torch.dtype:
        """The dtype of the model in memory: float32 if it is trained; under a LoRA it may stay
        bfloat16.
        """
        return torch.bfloat16 if self.lora and self.half else torch.float32

    @cached_property
    def micro_batch(self) -> int:
        """Rows that a device computes at once: a divisor of its share of a step."""
        share = self.settings.batch // ranks.asked_for()
        wanted = self.settings.micro_batch
        if wanted is None:
            longest = max(len(row.tokens) for row in self.answers.rows)
            length = self.settings.max_length if self.settings.packing else longest
            wanted = max(1, TOKENS_AT_ONCE // length)
        return next(n for n in range(min(wanted, share), 0, -1) if share % n == 0)

    @property
    def accumulation(self) -> int:
        return self.settings.batch // ranks.asked_for() // self.micro_batch

    def key(self) -> dict[str, Any]:
        """Return all that the result depends on, as plain data."""
        values = {name: getattr(self.settings, name) for name in TuningSettings.model_fields}
        return {
            "model": self.model.checkpoint.fingerprint(),
            "rows": _digest(self.answers),
            "settings": {n: value for n, value in values.items() if n not in NOT_IN_KEY},
            "device": self.device.type,
            "dtype": dtype_name(torch.bfloat16 if self.half else torch.float32),
            "micro_batch": self.micro_batch,
            "processes": ranks.asked_for(),
        }


def check_request(request: TuningRequest) -> TuningJob:
    """Refuse whatever can be refused without training."""
    settings = request.settings.resolved()
    _check_settings(settings)
    _check_packages()
    check_files({"tune": request.data})
    device = resolve_device(settings.device)
    if device.index not in (None, 0):
        raise UsageError(
            f"the device is {device}, and training takes the first that it sees",
            hint=f"hide the others: CUDA_VISIBLE_DEVICES={device.index}",
        )
    model = open_model(str(request.model), request.model)
    _check_model(model, settings)
    layout = TrainedLayout(model, settings.only)
    tokenizer = load_tokenizer(model.checkpoint.tokenizer_folder)
    answers = load_answers(request.data, tokenizer, TextSettings.of(settings))
    return TuningJob(request, settings, model, layout, tokenizer, answers, device)


def _check_settings(settings: TuningSettings) -> None:
    if settings.lora is None and (settings.adapter or settings.lora_alpha is not None):
        raise UsageError("an adapter is requested, but no rank", hint="give its rank: `lora=16`")
    processes = ranks.asked_for()
    if settings.batch % processes:
        raise UsageError(
            f"a step has {settings.batch} rows, which {processes} processes cannot share evenly",
            hint=f"take a multiple: `batch={processes * max(1, settings.batch // processes)}`",
        )


def _check_packages() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"tuning needs the package {missing[0]}, which is not installed",
            hint='pip install "moemerge[tune]"',
        )


def _check_model(model: OpenModel, settings: TuningSettings) -> None:
    if model.checkpoint.quantisation is not None or model.architecture.quantised:
        raise ArchitectureError(
            f"{model.label} is quantised, and training needs floats",
            hint="convert it to floats first: `moemerge merge` with passthrough does",
        )
    if settings.lora is not None and isinstance(model.checkpoint, AdaptedCheckpoint):
        raise UsageError(
            f"{model.label} has an adapter already, and a second one cannot be put on it",
            hint="merge it first (`moemerge merge` with passthrough), or train without `lora`",
        )
    if settings.aux_loss and "router_aux_loss_coef" not in model.architecture.text_config:
        raise ArchitectureError(
            f"{model.label} has no load-balancing loss (no router_aux_loss_coef in config.json)",
            hint="leave it out: `aux_loss=0`",
        )


def _digest(answers: Answers) -> str:
    digest = hashlib.sha256()
    for row in answers.rows:
        digest.update(len(row.tokens).to_bytes(8, "little"))
        digest.update(torch.tensor(row.tokens, dtype=torch.int64).numpy().tobytes())
        digest.update(row.learnt)
    return digest.hexdigest()
