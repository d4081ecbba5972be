"""Run fine-tuning from a request to a model or an adapter in OUT."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch

from moemerge.checkpoint.output import is_failed_save, output_error
from moemerge.checkpoint.reader import as_ref
from moemerge.errors import (
    ArchitectureError,
    DataError,
    NumericalError,
    ResourceError,
    UsageError,
    in_one_line,
)
from moemerge.forward.trainable import load_trainable
from moemerge.lab.tuning.job import TuningJob, TuningRequest, check_request
from moemerge.lab.tuning.output import CurvePoint, TunedOutput, TuningReport
from moemerge.repairs.inputs import settings_data
from moemerge.repairs.states import SavedStates
from moemerge.runtime.devices import is_out_of_memory
from moemerge.runtime.dtypes import dtype_name
from moemerge.runtime.progress import Progress
from moemerge.runtime.ranks import Ranks, asked_for
from moemerge.text.rows import source_names

# Errors of trl and transformers for unsupported models or settings.
UNABLE: Final = (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
# After these errors a second attempt would fail too: saved states are deleted.
HOPELESS: Final = (ArchitectureError, NumericalError, DataError, UsageError)


def run_tuning(request: TuningRequest, progress: Progress) -> TuningReport:
    """Train and write OUT, complete or not at all. An interrupted run leaves its last saved state.

    Under torchrun or accelerate every process must call it; rank 0 writes.
    """
    begun = time.monotonic()
    job = check_request(request)
    ranks = Ranks.join(job.device)
    # Rank 0 writes the output, and refuses one that must not be written.
    with (
        TunedOutput(job) if ranks.leads else nullcontext() as output,
        _states(job, ranks) as states,
    ):
        saved = ranks.broadcast_object(states.latest() if states is not None else None)
        folder = ranks.broadcast_object(states.folder if states is not None else None)
        assert folder is not None
        progress = ranks.progress(progress)
        if saved is not None:
            progress.note(f"resuming a killed run from {saved}")
        trainer, seconds = _train(job, folder, saved, progress, ranks)
        resumed = 0 if saved is None else int(saved.name.rpartition("-")[2])
        # With a sharded model every process contributes.
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        report = _report(job, trainer, resumed, seconds, time.monotonic() - begun)
        if output is not None:
            output.write(trainer.accelerator.unwrap_model(trainer.model), state)
            output.finish(report)
        if states is not None:
            states.finished = True
    return report


@contextmanager
def _states(job: TuningJob, ranks: Ranks) -> Iterator[SavedStates | None]:
    """Open the folder of saved states, on rank 0."""
    if not ranks.leads:
        yield None
        return
    states = SavedStates(
        job.request.out, job.key(), replace=job.request.overwrite and not job.request.resume
    )
    keep = True
    try:
        yield states
    except HOPELESS:
        keep = False
        raise
    finally:
        states.close(keep=keep and not states.finished)


def _train(
    job: TuningJob, folder: Path, saved: Path | None, progress: Progress, ranks: Ranks
) -> tuple[Any, float]:
    """Return the trainer with the trained model, and the seconds of training."""
    from moemerge.lab.tuning.trainer import make_trainer, quiet  # trl takes seconds to import

    model = load_trainable(job.model, job.layout, job.weights_dtype, lora=job.lora)
    try:
        with quiet():
            trainer = make_trainer(job, model, folder, progress, ranks)
            begun = time.monotonic()
            trainer.train(resume_from_checkpoint=None if saved is None else str(saved))
    except OSError as error:
        raise output_error(error, folder) from error
    except UNABLE as error:
        if isinstance(error, RuntimeError) and is_failed_save(error):
            raise output_error(error, folder) from error
        if is_out_of_memory(error):
            raise ResourceError(
                f"{job.device} has too little memory to train with {job.micro_batch} rows at once",
                hint="use fewer rows at once, shorter rows, or a LoRA: `micro_batch=1`, "
                "`max_length=1024`, `lora=16`",
            ) from error
        raise ArchitectureError(
            f"{job.model.label}: trl cannot train this model with these settings "
            f"({in_one_line(error)})",
            hint="not every family supports all settings: try without `packing`, "
            "`aux_loss` and `lora`",
        ) from error
    finally:
        progress.finish()
    return trainer, time.monotonic() - begun


def _report(
    job: TuningJob, trainer: Any, resumed: int, training_seconds: float, seconds: float
) -> TuningReport:
    settings, state = job.settings, trainer.state
    curve = tuple(
        CurvePoint(
            int(point["step"]),
            float(point["epoch"]),
            float(point["loss"]),
            float(point["learning_rate"]),
            float(point["grad_norm"]),
        )
        for point in state.log_history
        if "loss" in point
    )
    return TuningReport(
        model=str(as_ref(job.request.model).as_named_in(job.request.out)),
        output=str(job.request.out),
        data=source_names(job.request.data),
        settings=settings_data(settings),
        kind="adapter" if settings.adapter else "model",
        device=str(job.device),
        dtype=dtype_name(torch.bfloat16 if job.half else torch.float32),
        processes=asked_for(),
        micro_batch=job.micro_batch,
        parameters=sum(int(p.numel()) for p in trainer.model.parameters() if p.requires_grad),
        rows=len(job.answers.rows),
        read=job.answers.read,
        tokens=job.answers.tokens,
        learnt=job.answers.learnt,
        steps=int(state.global_step),
        epochs=float(state.epoch or 0.0),
        resumed=resumed,
        curve=curve,
        notices=(*job.answers.notices,),
        seconds=seconds,
        training_seconds=training_seconds,
    )
