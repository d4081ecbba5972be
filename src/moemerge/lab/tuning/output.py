"""The output of fine-tuning and its report: a model folder with trained weights, or an adapter."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Self

from torch import Tensor, nn

from moemerge.checkpoint import CheckpointPatch, hub_ids, require_space
from moemerge.checkpoint.adapter import MISTAKEN, PEFT_LAYOUT
from moemerge.checkpoint.folder import ADAPTER_WEIGHTS
from moemerge.checkpoint.model_card import in_code, model_card, own_files
from moemerge.checkpoint.output import OutputFolder, temporary_sibling
from moemerge.checkpoint.reader import AdaptedCheckpoint, as_ref
from moemerge.checkpoint.safetensors_file import add_metadata
from moemerge.config.yaml_lines import dump_document
from moemerge.errors import ArchitectureError, CheckpointError
from moemerge.families.roles import Role
from moemerge.lab.tuning.job import TuningJob
from moemerge.repairs.card import TUNING, earlier_report
from moemerge.runtime.progress import counted
from moemerge.version import __version__

MOST_POINTS: Final = 1000  # of the loss curve in a report
EPSILON: Final = 1e-6  # of an epoch: trl computes epochs in floating point


@dataclass(frozen=True)
class CurvePoint:
    """One step of the loss curve."""

    step: int
    epoch: float  # passes over the rows at the end of the step
    loss: float
    learning_rate: float
    gradient: float  # the gradient's norm before clipping


@dataclass(frozen=True)
class TuningReport:
    """What was trained, on what, and the loss curve."""

    model: str
    output: str
    data: tuple[str, ...]
    settings: Mapping[str, Any]
    kind: str  # "model" or "adapter"
    device: str
    dtype: str
    processes: int
    micro_batch: int
    parameters: int  # that were trained
    rows: int
    read: int  # rows of all files
    tokens: int  # tokens of the rows
    learnt: int  # of them, trained on
    steps: int
    epochs: float
    resumed: int  # steps of the interrupted run
    curve: tuple[CurvePoint, ...]
    notices: tuple[str, ...]
    seconds: float
    training_seconds: float

    # The losses of two steps differ by their rows more than by what was learnt. Only means over
    # all rows are comparable: those of the first and the last epoch. Shorter runs have one mean.

    @property
    def first_loss(self) -> float:
        """The mean loss over the first epoch."""
        return self._mean_loss(self.epochs if self.one_pass else 1.0)

    @property
    def last_loss(self) -> float:
        """The mean loss over the last epoch; `first_loss` if there are less than two."""
        return self.first_loss if self.one_pass else self._mean_loss(self.epochs, self.epochs - 1)

    @property
    def one_pass(self) -> bool:
        """Whether the run is too short to compare two epochs."""
        return self.epochs < 2 - EPSILON

    def _mean_loss(self, to: float, after: float = 0.0) -> float:
        losses = [p.loss for p in self.curve if after + EPSILON < p.epoch <= to + EPSILON]
        return sum(losses) / len(losses)

    def to_json(self) -> dict[str, Any]:
        values = {name: value for name, value in vars(self).items() if name != "curve"}
        return {
            **values,
            "seconds": round(self.seconds, 3),
            "training_seconds": round(self.training_seconds, 3),
            "first_loss": self.first_loss,
            "last_loss": self.last_loss,
            "curve": [asdict(point) for point in self.curve[:: -(-len(self.curve) // MOST_POINTS)]],
            "versions": versions(),
        }


def versions() -> dict[str, str]:
    """Return the versions of the libraries that training depends on."""
    names = ("torch", "transformers", "trl", "peft", "accelerate")
    return {
        "moemerge": __version__,
        **{name: metadata.version(name) for name in names},
        "python": platform.python_version(),
    }


def tuning_files(report: TuningReport, folder: Path) -> dict[str, bytes]:
    """Return config, report and card of OUT; `folder` is the model that was tuned."""
    settings = {n: v for n, v in report.settings.items() if v is not None and n != "preset"}
    command = {"model": report.model, "data": list(report.data), **settings}
    config = dump_document({"tune": command})
    what = "An adapter for" if report.kind == "adapter" else "A fine-tune of"
    earlier = earlier_report(folder, Path(report.output))
    parts = {n: part for n, part in earlier.items() if isinstance(part, dict)}
    card = model_card(
        title=Path(report.output).name,
        summary=f"{what} `{in_code(report.model)}`.",
        hub_models=hub_ids(report.model),
        sections=[("Training", _words(report))],
        config=config,
        tags=("moe", "sft", "moemerge"),
    )
    return own_files(config, card, **{**parts, TUNING: report.to_json()})


def _words(report: TuningReport) -> str:
    settings = report.settings
    how = "all weights" if settings["only"] is None else f"the {settings['only']} alone"
    if settings["lora"] is not None:
        how = f"a LoRA of rank {settings['lora']} on {how}"
    return (
        f"Supervised fine-tuning of {how} ({report.parameters:,} parameters) on the answers of "
        f"{counted(report.rows, 'row')} ({report.learnt:,} of {counted(report.tokens, 'token')} "
        f"learnt), {counted(report.steps, 'step')} of {counted(settings['batch'], 'row')} "
        f"({report.epochs:.3g} epochs), "
        f"learning rate {settings['learning_rate']:g} ({settings['schedule']}, warm-up "
        f"{settings['warmup']:g}), load-balancing loss {settings['aux_loss']:g}. "
        f"{_loss_words(report)}"
    )


def _loss_words(report: TuningReport) -> str:
    if report.one_pass:
        return f"The mean loss over the run was {report.first_loss:.4g}."
    return (
        f"The mean loss over the rows went from {report.first_loss:.4g} in the first epoch to "
        f"{report.last_loss:.4g} in the last."
    )


COMPANION_BYTES: Final = 16 * 2**20  # report, card and config next to the weights
# A saved state holds each trained parameter and Adam's two moments in float32. There are two states
# at once, because the older one is deleted once the newer is complete.
STATE_BYTES: Final = 2 * 3 * 4


class TunedOutput:
    """OUT as a model folder with the trained tensors, or as an adapter in peft's format.

    Without `finish`, nothing is left behind.
    """

    def __init__(self, job: TuningJob) -> None:
        self._job = job
        request, base, needed = job.request, job.model.checkpoint, COMPANION_BYTES
        if not job.lora:  # a LoRA is small, and its size is not known in advance
            needed += STATE_BYTES * job.layout.numel
        self._place: OutputFolder | CheckpointPatch
        if job.settings.adapter:
            self._place = OutputFolder(
                request.out, overwrite=request.overwrite, inputs=base.folders
            )
        else:
            self._place = CheckpointPatch(
                base, request.out, overwrite=request.overwrite, inputs=base.folders
            )
            needed += self._place.nbytes
        try:
            require_space(request.out, needed)
        except BaseException:
            self._place.abort()
            raise

    def write(self, model: Any, state: Mapping[str, Tensor]) -> None:
        """Write the trained weights: `model` is the trained model, `state` its tensors."""
        if isinstance(self._place, OutputFolder):
            save_adapter(model, state, self._place.path, self._job)
        elif not self._job.lora:
            for name, tensor in self._job.layout.written(state):
                self._place.write(name, tensor)
        else:
            with temporary_sibling(self._job.request.out) as folder:
                save_adapter(model, state, folder, self._job)
                merged = AdaptedCheckpoint(self._job.model.checkpoint.path, folder)
                with merged:
                    for name in merged.changed:
                        self._place.write(name, merged.read(name))

    def finish(self, report: TuningReport) -> None:
        """Write the report and rename the folder to OUT."""
        for name, data in tuning_files(report, self._job.model.checkpoint.path).items():
            self._place.add_bytes(name, data)
        self._place.commit()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._place.abort()


# --- a LoRA on every linear map, and merged into the base's layout --------------------------------

_LAYER = re.compile(r".*?\.\d+\.(.+)")
_STACKS = frozenset({Role.ROUTER, Role.EXPERT})


def lora_config(job: TuningJob, model: nn.Module) -> Any:
    """Return the config of a LoRA on every linear map of the layers; routers and expert stacks are
    parameters.
    """
    modules: set[str] = set()
    parameters: set[str] = set()
    for name, value in model.named_parameters():
        inner = _LAYER.fullmatch(name)
        if inner is None or name not in job.layout.trained or value.dim() < 2:
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        module = inner[1].removesuffix(".weight")
        if isinstance(owner, nn.Linear) and module.rpartition(".")[2] in MISTAKEN:
            parameters.add(inner[1])
        elif isinstance(owner, nn.Linear):
            modules.add(module)
        elif job.layout.in_memory.role(name) in _STACKS and not name.endswith("bias"):
            parameters.add(inner[1])
    if not modules and not parameters:
        raise ArchitectureError(f"{job.model.label} has no linear map that a LoRA can be put on")
    rank, alpha = job.settings.lora, job.settings.lora_alpha
    assert rank is not None
    assert alpha is not None
    import peft

    return peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # a fraction is as good
        lora_dropout=0.0,
        # With an empty list, peft would choose modules itself.
        target_modules=sorted(modules) or r"(?!)",
        target_parameters=sorted(parameters) or None,
        task_type="CAUSAL_LM",
    )


def check_adapter(model: Any, job: TuningJob) -> None:
    """Refuse, before training, an adapter that cannot be merged into the base's layout."""
    with temporary_sibling(job.request.out) as folder:
        save_adapter(model, None, folder, job)
        try:
            AdaptedCheckpoint(job.model.checkpoint.path, folder).close()
        except CheckpointError as error:
            raise ArchitectureError(
                f"{job.model.label}: a LoRA of this model cannot be merged into it "
                f"({error.message})",
                hint="train its weights themselves: leave out `lora`",
            ) from error


def save_adapter(model: Any, state: Any, folder: Path, job: TuningJob) -> None:
    """Save the adapter of a trained model as peft does, with the name of its base."""
    base = as_ref(job.request.model).as_named_in(job.request.out)
    model.peft_config["default"].base_model_name_or_path = str(base)
    # The search for added tokens would contact the hub.
    model.save_pretrained(str(folder), state_dict=state, save_embedding_layers=False)
    add_metadata(folder / ADAPTER_WEIGHTS[0], PEFT_LAYOUT)
    (folder / "README.md").unlink(missing_ok=True)  # replaced by our own
