"""OUT in the making: the base's folder with other weights, or an adapter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from torch import Tensor

from moemerge.checkpoint import CheckpointPatch, require_space
from moemerge.checkpoint.output import OutputFolder, temporary_sibling, writing
from moemerge.runtime import ranks
from moemerge.runtime.files import write_file
from moemerge.tuning.job import TuningJob
from moemerge.tuning.report import TuningReport, output_files

COMPANION_BYTES: Final = 16 * 2**20  # report, card and config next to the weights
# A saved state holds each trained parameter and Adam's two moments, in float32; and there are two
# at once, since the older goes when the newer is whole.
STATE_BYTES: Final = 2 * 3 * 4


class TunedOutput(ABC):
    """What rank 0 writes; leaving it without `finish` leaves nothing behind."""

    def __init__(self, job: TuningJob) -> None:
        self._job = job

    @abstractmethod
    def write(self, model: Any, state: Mapping[str, Tensor]) -> None:
        """Put what was trained into OUT: `model` as it was trained, and its tensors."""

    @abstractmethod
    def add(self, name: str, data: bytes) -> None: ...

    @abstractmethod
    def commit(self) -> None: ...

    @abstractmethod
    def abort(self) -> None: ...

    def finish(self, report: TuningReport) -> None:
        """Say what was done, and let OUT appear."""
        for name, data in output_files(report, self._job.model.checkpoint.path).items():
            self.add(name, data)
        self.commit()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


class NoOutput(TunedOutput):
    """In all processes but the first."""

    def write(self, model: Any, state: Mapping[str, Tensor]) -> None: ...

    def add(self, name: str, data: bytes) -> None: ...

    def commit(self) -> None: ...

    def abort(self) -> None: ...


class ModelOutput(TunedOutput):
    """The base's folder, file by file, with what was trained in the tensors' places."""

    def __init__(self, job: TuningJob) -> None:
        super().__init__(job)
        request = job.request
        self._patch = CheckpointPatch(
            job.model.checkpoint,
            request.out,
            overwrite=request.overwrite,
            inputs=job.model.checkpoint.folders,
        )
        try:
            require_space(request.out, self._patch.nbytes + needed_bytes(job))
        except BaseException:
            self.abort()
            raise

    def write(self, model: Any, state: Mapping[str, Tensor]) -> None:
        if not self._job.lora:
            for name, tensor in self._job.layout.written(state):
                self._patch.write(name, tensor)
            return
        from moemerge.tuning.adapters import adapted_tensors, save_adapter

        with temporary_sibling(self._job.request.out) as folder:
            save_adapter(model, state, folder, self._job)
            for name, tensor in adapted_tensors(self._job, folder):
                self._patch.write(name, tensor)

    def add(self, name: str, data: bytes) -> None:
        self._patch.add_bytes(name, data)

    def commit(self) -> None:
        self._patch.commit()

    def abort(self) -> None:
        self._patch.abort()


class AdapterOutput(TunedOutput):
    """A folder as peft writes it."""

    def __init__(self, job: TuningJob) -> None:
        super().__init__(job)
        request = job.request
        self._folder = OutputFolder(
            request.out, overwrite=request.overwrite, inputs=job.model.checkpoint.folders
        )
        try:
            require_space(request.out, needed_bytes(job))
        except BaseException:
            self.abort()
            raise

    def write(self, model: Any, state: Mapping[str, Tensor]) -> None:
        from moemerge.tuning.adapters import save_adapter

        save_adapter(model, state, self._folder.path, self._job)

    def add(self, name: str, data: bytes) -> None:
        path: Path = self._folder.path / name
        with writing(self._job.request.out):
            write_file(path, data)

    def commit(self) -> None:
        self._folder.commit()

    def abort(self) -> None:
        self._folder.abort()


def open_output(job: TuningJob) -> TunedOutput:
    """OUT in the making, refused here where it must not be."""
    if not ranks.leads():
        return NoOutput(job)
    return AdapterOutput(job) if job.settings.adapter else ModelOutput(job)


def needed_bytes(job: TuningJob) -> int:
    """Disk for what is beside the model's own tensors: saved states and small files."""
    # Of a LoRA the share is small, and not known before it is there.
    trained = 0 if job.lora else job.layout.numel
    return COMPANION_BYTES + STATE_BYTES * trained
