"""The request for coefficients, and the job after all checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from moemerge.config.coefficients import NeuronGroups
from moemerge.config.job_settings import CoefficientMethod, CoefficientSettings
from moemerge.config.models import ModelRef
from moemerge.errors import UsageError
from moemerge.families.names import split_layer
from moemerge.families.opened import OpenModel, open_model
from moemerge.forward.settings import StreamSettings, batch_tokens, forward_dtype
from moemerge.repairs.inputs import check_same_tokens, read_text, require_streamable
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.outputs import FileKind, check_output_file
from moemerge.text.batches import Batch, make_batches
from moemerge.text.domains import Domain
from moemerge.text.rows import TextSource, check_files


@dataclass(frozen=True)
class FoundCoefficients:
    """The result of a method: coefficients by model and place, their origin, neuron groups."""

    coefficients: dict[str, dict[str, float]]
    measured: dict[str, Any]
    neurons: NeuronGroups | None = None


@dataclass(frozen=True)
class CoefficientsRequest:
    """A request: models, base, text of each model, method and output file."""

    method: CoefficientMethod
    models: Mapping[str, ModelRef]
    base: ModelRef
    data: Mapping[str, Sequence[TextSource]]
    out: Path
    settings: CoefficientSettings
    overwrite: bool = False


@dataclass(frozen=True)
class CoefficientsJob:
    """A checked request, ready to run."""

    request: CoefficientsRequest
    base: OpenModel
    models: Mapping[str, OpenModel]
    domains: Mapping[str, Domain]
    stream: StreamSettings
    places: tuple[str, ...]  # of the layers, as a file of coefficients names them
    notices: tuple[str, ...] = ()

    def batches(self, name: str) -> tuple[Batch, ...]:
        """Return the batches of one model's text."""
        most = batch_tokens(self.base, self.stream.device)
        return make_batches([self.domains[name]], batch_tokens=most)


def prepare(request: CoefficientsRequest) -> CoefficientsJob:
    """Check output, models and files; read the text with the base's tokenizer."""
    settings = request.settings
    check_output_file(
        request.out,
        FileKind.COEFFICIENTS,
        overwrite=request.overwrite,
        inputs=(request.base, *request.models.values(), *chain(*request.data.values())),
    )
    missing = [name for name in request.models if name not in request.data]
    if missing:
        raise UsageError(
            f"no text for {', '.join(missing)}",
            hint="every merged model needs text: `data={NAME: FILE}`, or `data:` in the config",
        )
    check_files({name: request.data[name] for name in request.models})
    device = resolve_device(settings.device)
    base = open_model("base", request.base)
    models = {name: open_model(name, ref) for name, ref in request.models.items()}
    text = read_text(base, request.models, request.data, settings)
    notices = list(text.notices)
    hint = "they must be fine-tunes of one base"
    for name, model in {"base": base, **models}.items():
        require_streamable(base, model, what=name, hint=hint)
        if model is not base:
            what = f"{name} ({model.label})"
            notices += check_same_tokens(text.domains, text.tokenizer, model, what=what, hint=hint)
    return CoefficientsJob(
        request=request,
        base=base,
        models=models,
        domains={domain.name: domain for domain in text.domains},
        stream=StreamSettings(
            device, forward_dtype(settings.dtype, base, device), settings.offload
        ),
        places=layer_places(base),
        notices=tuple(notices),
    )


def layer_places(model: OpenModel) -> tuple[str, ...]:
    """Return the common prefix of the unit keys of each decoder layer."""
    places: dict[int, str] = {}
    for key in model.architecture.units_by_key:
        parts = split_layer(key)
        if parts is not None and parts.layer < model.architecture.num_layers:
            places[parts.layer] = f"{parts.wrap}{parts.box}.{parts.layer}"
    return tuple(places[layer] for layer in sorted(places))
