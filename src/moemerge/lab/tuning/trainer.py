"""A subclass of trl's trainer that saves trained parameters only, refuses NaN, and prints nothing.

The only module that imports trl. It is imported when training starts.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import datasets
import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from moemerge.errors import NumericalError
from moemerge.forward.compat import use_one_gpu
from moemerge.lab.tuning.job import TuningJob
from moemerge.lab.tuning.output import check_adapter, lora_config
from moemerge.repairs.states import mark_complete
from moemerge.runtime.devices import multiplies_bfloat16
from moemerge.runtime.progress import Progress
from moemerge.runtime.ranks import Ranks

TRAINED: Final = "trained.pt"
IGNORED: Final = -100  # the label of tokens without loss
SAVED_STATES: Final = 10  # per run, by default


class Tuner(SFTTrainer):  # type: ignore[misc,unused-ignore]
    """Saves trained parameters in the layout they have in memory.

    transformers would save the whole model in another layout, and cannot load that back into this
    one.
    """

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Do nothing: a saved state needs no card."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is not None:  # a sharded model, whose parts only accelerate can gather
            super()._save(output_dir, state_dict)
            return
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        saved = {name: value.detach().cpu() for name, value in _trained(self.model)}
        torch.save(saved, folder / TRAINED)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        file = Path(resume_from_checkpoint) / TRAINED
        if not os.path.exists(file):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        saved: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
        with torch.no_grad():
            for name, value in _trained(self.model):
                value.copy_(saved[name])


def _trained(model: Any) -> Iterator[tuple[str, Tensor]]:
    return ((name, value) for name, value in model.named_parameters() if value.requires_grad)


class _Watch(TrainerCallback):
    """Reports progress, stops if the loss is NaN or infinite, and marks saved states."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._progress.start("training", int(state.max_steps), unit="steps")
        self._progress.advance(int(state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._progress.advance(1)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any
    ) -> None:
        loss = (logs or {}).get("loss")
        if loss is None:
            return
        norm = (logs or {}).get("grad_norm", 0.0)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            what = "loss" if not math.isfinite(loss) else "gradient"
            raise NumericalError(
                f"the {what} of step {state.global_step} is {loss if what == 'loss' else norm}",
                hint="lower the learning rate, and see whether the model itself is sound: "
                "`learning_rate=1e-5`",
            )
        self._progress.status(f"loss {loss:.4g}")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.should_save:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            mark_complete(folder)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the libraries' progress bars and warnings."""
    level = transformers.logging.get_verbosity()
    bars = datasets.are_progress_bars_disabled()
    transformers.logging.set_verbosity(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)
        if not bars:
            datasets.enable_progress_bars()


def make_trainer(
    job: TuningJob, model: PreTrainedModel, folder: Path, progress: Progress, ranks: Ranks
) -> Tuner:
    """Return a trainer for this job that saves its states in `folder`."""
    trainer = Tuner(
        model=model,
        args=_arguments(job, folder),
        train_dataset=_dataset(job),
        processing_class=job.tokenizer,
        peft_config=lora_config(job, model) if job.lora else None,
        callbacks=[_Watch(progress)],
    )
    trainer.remove_callback(PrinterCallback)
    if job.lora and ranks.leads:
        check_adapter(trainer.model, job)
    return trainer


def _dataset(job: TuningJob) -> Any:
    rows = job.answers.rows
    tokens = [np.array(row.tokens, dtype=np.int64) for row in rows]
    learnt = [np.frombuffer(row.learnt, dtype=np.bool_) for row in rows]
    labels = [np.where(on, ids, IGNORED) for ids, on in zip(tokens, learnt, strict=True)]
    return datasets.Dataset.from_dict({"input_ids": tokens, "labels": labels})


def _arguments(job: TuningJob, folder: Path) -> Any:
    settings = job.settings
    assert settings.learning_rate is not None
    share = 1.0 / SAVED_STATES
    arguments = SFTConfig(
        output_dir=str(folder),
        # rows
        max_length=settings.max_length,
        packing=settings.packing,
        completion_only_loss=False,  # the labels mask the prompt
        per_device_train_batch_size=job.micro_batch,
        gradient_accumulation_steps=job.accumulation,
        # optimisation
        num_train_epochs=settings.epochs,
        max_steps=-1 if settings.steps is None else settings.steps,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=settings.schedule
        if settings.schedule != "constant"
        else "constant_with_warmup",
        warmup_steps=settings.warmup,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.clip,
        router_aux_loss_coef=settings.aux_loss,
        seed=settings.seed,
        data_seed=settings.seed,
        # computing
        use_cpu=job.device.type == "cpu",
        bf16=job.half,
        fp16=False,
        gradient_checkpointing=settings.recompute,
        # Grouped products of expert stacks ignore autocast: TF32 is more precise than bfloat16, and
        # fast.
        tf32=True if job.half and multiplies_bfloat16(job.device) else None,
        dataloader_pin_memory=job.device.type != "cpu",
        ddp_find_unused_parameters=False,
        # saving and logging
        save_strategy="steps",
        save_steps=share if settings.save_every is None else settings.save_every,
        save_total_limit=1,
        logging_strategy="steps",
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
    )
    use_one_gpu(arguments)  # other processes use the others
    return arguments
