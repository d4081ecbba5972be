"""Models without weights, and the names of their tensors on disk and in memory."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedModel,
)

from moemerge.checkpoint.reader import Checkpoint
from moemerge.checkpoint.tensors import TensorInfo
from moemerge.errors import ArchitectureError, CheckpointError, library_errors
from moemerge.families.architecture import Architecture
from moemerge.families.rules import CONFIG_HINT
from moemerge.forward.compat import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    build_model,
    dot_natural_key,
    dtype_plan,
    get_model_conversion_mapping,
    mark_initialised,
    rename_source_key,
    router_recorders,
    supports_sdpa,
    tied_weights,
)

# --- the skeleton -------------------------------------------------------------------------------


def build_skeleton(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model with all parameters on meta. Buffers are real: some are not on disk.

    Raises ArchitectureError if transformers cannot build it.
    """
    config = _model_config(checkpoint)
    if getattr(config, "quantization_config", None) is not None:
        if checkpoint.quantisation is None:
            raise CheckpointError(
                f"{checkpoint.label} is quantised in a way that is not read",
                hint="dequantise it to bfloat16 first and use that folder",
            )
        del config.quantization_config  # the checkpoint reads as plain floats
    return _built(config, dtype, checkpoint.label)


def skeleton_of(config: Any, label: str) -> PreTrainedModel:
    """Return the float32 model of a config of transformers, with all parameters on meta."""
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # the checkpoint reads as plain floats
    return _built(config, torch.float32, label)


def _built(config: Any, dtype: torch.dtype, label: str) -> PreTrainedModel:
    cls = _model_class(config, label)
    what = f"{label}: no model can be built as its config.json says"
    ours = library_errors(ArchitectureError, what, hint=CONFIG_HINT)
    with ours, _parameters_on_meta(), torch.random.fork_rng(devices=[]):
        model = build_model(cls, config, dtype)
    model.requires_grad_(False)
    model.train(False)
    return model


def loaded_architecture(checkpoint: Checkpoint) -> tuple[PreTrainedModel, Architecture]:
    """Return the model as transformers builds it, without weights, and its structure."""
    skeleton = build_skeleton(checkpoint, torch.float32)
    infos = {
        name: TensorInfo.of(name, value.dtype, tuple(value.shape))
        for name, value in skeleton.state_dict().items()
    }
    return skeleton, Architecture.of(checkpoint.config, infos)


def _model_config(checkpoint: Checkpoint) -> Any:
    what = f"{checkpoint.label}: transformers {transformers.__version__} does not know this model"
    hint = "a newer transformers may; code that comes with a model is never run"
    with library_errors(ArchitectureError, what, hint=hint):
        return AutoConfig.from_pretrained(str(checkpoint.path))


def _model_class(config: Any, label: str) -> Any:
    for name in getattr(config, "architectures", None) or ():
        cls = getattr(transformers, str(name), None)
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel):
            return cls
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    raise ArchitectureError(
        f"{label}: no causal language model for model type {config.model_type!r} in "
        f"transformers {transformers.__version__} (config names {config.architectures})"
    )


def holds_scores(checkpoint: Checkpoint) -> bool:
    """Return whether attention holds a score for every pair of tokens.

    It does in families without fused attention in transformers.
    """
    return not supports_sdpa(_model_class(_model_config(checkpoint), checkpoint.label))


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside, a module registers its parameters on meta; buffers stay real.

    `torch.device("meta")` would place the buffers (rotary frequencies, ...) on meta, too.
    """
    thread = threading.get_ident()

    def to_meta(module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter | None:
        if threading.get_ident() != thread:  # another model, whose weights are being loaded
            return None
        if not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=False)
        mark_initialised(param)
        return param

    hook: Any = to_meta
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def tied_names(model: PreTrainedModel) -> Mapping[str, str]:
    """Return the names that share one tensor, in both directions."""
    tied = tied_weights(model)
    return {**{source: target for target, source in tied.items()}, **tied}


def keeps_float32(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return a test for parameters that a family keeps in float32 in any dtype."""
    plan = dtype_plan(model, dtype)
    if any(value != torch.float32 for value in plan.values()):
        raise ArchitectureError(f"unexpected dtype plan of {type(model).__name__}: {plan}")
    if not plan:
        return lambda name: False
    kept = re.compile("|".join(pattern.replace("*", ".*") for pattern in plan))
    return lambda name: kept.search(name) is not None


def recorded_routers(model: PreTrainedModel) -> list[str]:
    """Return the paths of modules that a model declares as the origin of router logits."""
    paths: dict[str, None] = {}
    for base, part in model.named_modules():
        for recorder in router_recorders(part):
            kind = getattr(recorder, "target_class", recorder)
            inside = f".{name}." if (name := getattr(recorder, "layer_name", None)) else ""
            for path, module in part.named_modules(prefix=base):
                if isinstance(kind, type) and type(module) is kind and inside in f".{path}.":
                    paths[path] = None
    return list(paths)


# --- names --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """How one parameter is made from stored tensors: unchanged, or by a conversion."""

    target: str  # name in memory; a conversion that splits makes further parameters
    sources: tuple[tuple[str, str], ...]  # (pattern, name on disk), in natural order
    converter: WeightConverter | None = None

    @property
    def columns(self) -> tuple[tuple[str, ...], ...] | None:
        """Return names on disk by (projection, expert), if the parameter can be read into place.

        That is a parameter that is stored unchanged, or a stack: the conversion only stacks experts
        and joins their projections row-wise. None for any other.
        """
        if self.converter is None:
            return ((self.sources[0][1],),)
        if len(self.converter.target_patterns) != 1:
            return None
        plan = [(type(op), getattr(op, "dim", None)) for op in self.converter.operations]
        if plan not in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
            return None
        by_pattern: dict[str, list[str]] = {key: [] for key in self.converter.source_patterns}
        for pattern, name in self.sources:
            by_pattern[pattern].append(name)
        columns = tuple(tuple(names) for names in by_pattern.values() if names)
        if len(columns) > 1 and len(plan) == 1:
            return None
        return columns if len({len(names) for names in columns}) == 1 else None

    def convert(self, model: PreTrainedModel, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Run the conversion; `read` returns a stored tensor in the final dtype."""
        if self.converter is None:
            return {self.target: read(self.sources[0][1])}
        work = deepcopy(self.converter)
        for pattern, name in self.sources:
            reader: Any = partial(read, name)
            work.add_tensor(self.target, name, pattern, reader)
        try:
            made = work.convert(self.target, model=model, config=model.config)
        except (RuntimeError, ValueError, KeyError, IndexError) as error:
            stored = ", ".join(name for _, name in self.sources[:3])
            raise CheckpointError(
                f"cannot make {self.target} from {len(self.sources)} stored tensors "
                f"({stored}, ...): {error}"
            ) from error
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }


@dataclass(frozen=True)
class NameMap:
    """The parameters of a model by the stored tensors that they are made of."""

    recipes: Mapping[str, Recipe]  # by name in memory
    unused: tuple[str, ...]  # stored, but not part of the model (MTP layers, ...)

    def on_disk(self, name: str) -> str | None:
        """Return the stored tensor of this parameter, if it is exactly one, unchanged."""
        recipe = self.recipes.get(name)
        if recipe is None or recipe.converter is not None:
            return None
        return recipe.sources[0][1]

    def in_memory(self, stored: str) -> str:
        """Return the parameter that is this stored tensor, unchanged."""
        for name, recipe in self.recipes.items():
            if recipe.converter is None and recipe.sources[0][1] == stored:
                return name
        raise CheckpointError(f"{stored} is no parameter of its own in the model")


def map_names(model: PreTrainedModel, checkpoint: Checkpoint) -> NameMap:
    """Map names on disk to names in memory, by transformers' table."""
    return map_stored(model, checkpoint.tensors, checkpoint.label)


def map_stored(model: PreTrainedModel, stored: Iterable[str], label: str) -> NameMap:
    """Map names of tensors to names in memory; `label` is for messages."""
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    known = model.state_dict()
    prefix = model.base_model_prefix
    sources: dict[str, list[tuple[str, str]]] = {}
    used_by: dict[str, WeightConverter | None] = {}
    unused: list[str] = []
    # transformers stacks experts in natural order, and some renamings count in it.
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = rename_source_key(name, [], [], prefix, known)
        if target not in known:
            unused.append(name)
            continue
        if pattern is None and target in sources:
            raise CheckpointError(
                f"{label}: {sources[target][0][1]} and {name} are both {target}",
                hint="the folder mixes two layouts; keep one",
            )
        used_by[target] = None if pattern is None else by_pattern[pattern]
        sources.setdefault(target, []).append((pattern or name, name))
    recipes = {
        target: Recipe(target, tuple(made_of), used_by[target])
        for target, made_of in sources.items()
    }
    return NameMap(recipes, tuple(unused))
