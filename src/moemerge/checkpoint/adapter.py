"""Read a PEFT LoRA adapter folder: its settings, and its tensors in pairs.

PEFT names a pair `base_model.model.MODULE.lora_A.weight` / `lora_B`. A parameter that is not a
module (`target_parameters`: a stack of experts, a router) is wrapped on its owner, and the key
names only the owner. Several parameters of one owner nest: each outer one adds `.base_layer` to the
keys of the inner ones.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from moemerge.checkpoint.folder import ADAPTER_WEIGHTS, TensorFile, open_file
from moemerge.config.documents import AdapterDocument, parse_document
from moemerge.errors import CheckpointError
from moemerge.runtime.files import read_object

CONFIG: Final = "adapter_config.json"
PREFIX: Final = "base_model.model."
# How we state PEFT's order of lora_B on stacked experts: in the metadata of the weights, since PEFT
# warns about keys of its config that it does not know.
LAYOUT: Final = "lora_B_layout"
PEFT_LAYOUT: Final = {LAYOUT: "rank_major"}
# By these names PEFT recognises experts of older models anywhere and adapts other modules. Given as
# parameters, they are adapted in place.
MISTAKEN: Final = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
_KEY: Final = re.compile(
    r"(?P<module>.+?)(?P<nesting>(?:\.base_layer)*)\.(?P<kind>lora_A|lora_B|lora_embedding_A|"
    r"lora_embedding_B|lora_magnitude_vector)(?:\.default)?(?:\.(?P<leaf>weight|bias))?"
)
# The order in which a module declares its parameters; the first is the innermost wrapper.
_DECLARED: Final = (
    "gate_up_proj",
    "gate_up_proj_bias",
    "gate_proj",
    "w1",
    "v1",
    "up_proj",
    "w3",
    "down_proj",
    "down_proj_bias",
    "w2",
)
# Settings with which the merged weight is not W + scaling * B @ A, or unknown from the files.
_REFUSED: Final = {
    "use_qalora": "QALoRA pools its inputs",
    "alora_invocation_tokens": "an activated LoRA acts on some tokens only",
    "layer_replication": "it repeats layers of the base",
    "trainable_token_indices": "it trains single tokens' embeddings",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "arrow_config": "it routes between several adapters",
    "kasa_config": "KaSA changes the base weights",
    "monteclora_config": "MonteCLoRA samples its weights",
}
FLOAT32_MAX: Final = 3.4028234663852886e38
# Initialisations that change the base weights; the adapter does not contain this change.
_BASE_CHANGING_INITS: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")


class LoraSettings(AdapterDocument):
    """What `adapter_config.json` states about the merged weight."""

    def rank_of(self, key: str) -> int:
        return int(_by_pattern(self.rank_pattern, key, self.r))

    def scaling_of(self, key: str) -> float:
        rank = self.rank_of(key)
        alpha = float(_by_pattern(self.alpha_pattern, key, self.lora_alpha))
        scaling = alpha / (math.sqrt(rank) if self.use_rslora else rank)
        if abs(scaling) > FLOAT32_MAX:
            raise CheckpointError(
                f"the adapter's lora_alpha of {alpha:g} for {key} is beyond float32",
                hint=f"correct it in its {CONFIG}",
            )
        return scaling

    def parameters_of(self, module: str) -> list[str]:
        """Return the parameters of a module that `target_parameters` names, in declared order."""
        names = {
            target.rpartition(".")[2]
            for target in self.target_parameters or ()
            for owner in [target.rpartition(".")[0]]
            if module == owner or module.endswith(f".{owner}") or not owner
        }
        if len(names) > 1 and not names <= set(_DECLARED):
            raise CheckpointError(
                f"the adapter wraps {', '.join(sorted(names))} of {module}, whose order is unknown",
                hint="merge the adapter with peft (merge_and_unload) and use the result",
            )
        return sorted(names, key=lambda n: _DECLARED.index(n) if n in _DECLARED else 0)


def _by_pattern(patterns: Mapping[str, float] | None, key: str, default: float) -> float:
    for pattern, value in (patterns or {}).items():
        if re.fullmatch(_whole(pattern), key):
            return value
    return default


def _whole(pattern: str) -> str:
    """Return PEFT's expression for a pattern: it matches the end of a module's name."""
    return rf"(.*\.)?({pattern})"


@dataclass
class LoraPair:
    """The adapter tensors that together change one parameter of the model."""

    parameter: str  # its name in the loaded model
    a: str = ""
    b: str = ""
    bias: str | None = None
    magnitude: str | None = None  # DoRA
    embedding: bool = False
    rank: int = 0
    scaling: float = 0.0

    @property
    def names(self) -> list[str]:
        return [n for n in (self.a, self.b, self.bias, self.magnitude) if n]


@dataclass
class Adapter:
    """An opened adapter: pairs that add to parameters, and tensors that replace them."""

    path: Path
    settings: LoraSettings
    config: dict[str, Any]
    file: TensorFile
    pairs: list[LoraPair] = field(default_factory=list)
    replacements: dict[str, str] = field(default_factory=dict)  # parameter -> adapter tensor


def open_adapter(folder: Path) -> Adapter:
    """Read settings and headers. Refuse adapters that do not add low-rank matrices."""
    config = read_object(folder / CONFIG, f"a PEFT adapter folder has an {CONFIG}")
    weights = next((folder / n for n in ADAPTER_WEIGHTS if os.path.exists(folder / n)), None)
    if weights is None:
        raise CheckpointError(
            f"{folder} has no adapter weights, expected {' or '.join(ADAPTER_WEIGHTS)}",
            hint="point at the adapter's folder, as peft's save_pretrained wrote it",
        )
    file = open_file(weights)
    try:
        stated = {key: value for key, value in file.metadata.items() if key == LAYOUT}
        settings = _settings({**stated, **config}, folder / CONFIG)
        adapter = Adapter(folder, settings, config, file)
        _sort_tensors(adapter)
    except BaseException:
        file.close()
        raise
    return adapter


def _settings(config: Mapping[str, Any], path: Path) -> LoraSettings:
    merge_hint = "merge the adapter with peft (merge_and_unload) and use the result"
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{path}: the adapter is of type {config.get('peft_type')!r}, expected 'LORA'",
            hint=merge_hint,
        )
    for key, reason in _REFUSED.items():
        if config.get(key):
            raise CheckpointError(f"{path}: {key} is set, and {reason}", hint=merge_hint)
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        raise CheckpointError(
            f"{path}: the adapter was initialised with {init!r}, which changed the base weights",
            hint="save it with path_initial_model_for_weight_conversion, or merge it with peft",
        )
    hint = "use the file that peft's save_pretrained wrote"
    settings = parse_document(LoraSettings, config, str(path), hint)
    for pattern in {**(settings.rank_pattern or {}), **(settings.alpha_pattern or {})}:
        try:
            re.compile(_whole(pattern))
        except re.error as error:
            raise CheckpointError(
                f"{path}: the pattern {pattern[:80]!r} is not a regular expression: {error}",
                hint="name the modules plainly, such as layers.0.self_attn.q_proj",
            ) from error
    return settings


def _sort_tensors(adapter: Adapter) -> None:
    pairs: dict[tuple[str, int], dict[str, str]] = defaultdict(dict)
    for name in adapter.file.tensors:
        match = _KEY.fullmatch(name.removeprefix(PREFIX))
        if match is None:
            parameter = name.removeprefix(PREFIX).replace(".modules_to_save.default.", ".")
            parameter = parameter.replace(".modules_to_save.", ".").replace(".base_layer.", ".")
            adapter.replacements[parameter] = name
        else:
            kind = match["kind"] + ("_bias" if match["leaf"] == "bias" else "")
            pairs[match["module"], match["nesting"].count(".")][kind] = name
    depth: dict[str, int] = defaultdict(int)
    for module, nesting in pairs:
        depth[module] = max(depth[module], nesting)
    for (module, nesting), parts in pairs.items():
        parameter = _parameter(adapter.settings, module, depth[module] - nesting, depth[module] + 1)
        adapter.pairs.append(_pair(adapter, parameter, parts))


def _parameter(settings: LoraSettings, module: str, position: int, count: int) -> str:
    """Return the parameter that the wrapper at `position` (from the inside) of `count` changes."""
    wrapped = settings.parameters_of(module)
    if not wrapped and count == 1:
        return f"{module}.weight"
    if len(wrapped) != count:
        raise CheckpointError(
            f"the adapter has {count} nested pairs on {module}, but its target_parameters name "
            f"{', '.join(wrapped) or 'none'} there",
            hint="use the adapter_config.json that was saved with these weights",
        )
    return f"{module}.{wrapped[position]}"


def _pair(adapter: Adapter, parameter: str, parts: Mapping[str, str]) -> LoraPair:
    embedding = "lora_embedding_A" in parts
    suffix = "embedding_" if embedding else ""
    a, b = parts.get(f"lora_{suffix}A"), parts.get(f"lora_{suffix}B")
    if a is None or b is None:
        raise CheckpointError(
            f"{adapter.file.path} has {', '.join(parts.values())} for {parameter} without the "
            "other half of the pair",
            hint="the adapter is incomplete; save it again",
        )
    if adapter.settings.use_dora and parts.get("lora_magnitude_vector") is None:
        raise CheckpointError(
            f"{adapter.file.path} has no magnitudes of {parameter}, although use_dora is set",
            hint="the adapter is incomplete; save it again",
        )
    # PEFT matches its patterns against the module's name, or a wrapped parameter's name.
    wrapped = bool(adapter.settings.parameters_of(parameter.rpartition(".")[0]))
    key = parameter if wrapped else parameter.removesuffix(".weight")
    return LoraPair(
        parameter,
        a,
        b,
        bias=parts.get("lora_B_bias"),
        magnitude=parts.get("lora_magnitude_vector"),
        embedding=embedding,
        rank=adapter.settings.rank_of(key),
        scaling=adapter.settings.scaling_of(key),
    )
