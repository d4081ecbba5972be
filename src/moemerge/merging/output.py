"""The files beside the weights: config.json, tokenizer, generation config, companions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from moemerge.architectures.architecture import LayerKey
from moemerge.config.resolve import NormalisedMerge
from moemerge.merging.plan import InputModel
from moemerge.merging.planner import OutputTensors
from moemerge.merging.tokenizer.chat import resolve_chat_template, with_chat_template
from moemerge.merging.tokenizer.plan import TokenizerPlan
from moemerge.merging.tokenizer.vocab import read_json, read_vocabulary
from moemerge.merging.tokenizer.write import (
    config_for,
    donor_files,
    is_tokenizer_file,
    to_json,
    tokenizer_files,
)
from moemerge.merging.vocabulary import Vocabularies
from moemerge.runtime.devices import dtype_name

GENERATION_CONFIG = "generation_config.json"
# What a donor's config says about itself and is not true of the result.
NOT_CARRIED = ("_name_or_path", "quantization_config", "transformers_version")


@dataclass(frozen=True)
class OutputFiles:
    """Files made by us, and files copied from the donor; a name is in one of the two."""

    made: dict[str, bytes]
    copied: dict[str, Path]
    notices: tuple[str, ...] = field(default=())


def output_files(
    merge: NormalisedMerge,
    models: Mapping[str, InputModel],
    vocabularies: Vocabularies,
    output: OutputTensors,
    chat_template: str | None,
) -> OutputFiles:
    """Everything but the weights. The donor is the base, or the first model without one."""
    donor = models[merge.name_of(merge.donor)]
    copied = donor.checkpoint.companions()
    config = result_config(donor, output)
    made: dict[str, bytes] = {}
    notices: list[str] = []
    if vocabularies.plan is not None:
        config, notices = _for_vocabulary(config, "config.json", donor, vocabularies.plan)
        generation = read_json(donor.checkpoint.path / GENERATION_CONFIG)
        if generation is not None:
            generation, more = _for_vocabulary(
                generation, GENERATION_CONFIG, donor, vocabularies.plan
            )
            made[GENERATION_CONFIG] = to_json(generation)
            notices += more
    tokenizer = _tokenizer(merge, models, donor, vocabularies.plan, chat_template)
    if tokenizer is not None:
        copied = {name: path for name, path in copied.items() if not is_tokenizer_file(name)}
        made |= tokenizer
    made["config.json"] = to_json(config)
    copied = {name: path for name, path in copied.items() if name not in made}
    return OutputFiles(made, copied, tuple(notices))


def _tokenizer(
    merge: NormalisedMerge,
    models: Mapping[str, InputModel],
    donor: InputModel,
    plan: TokenizerPlan | None,
    chat_template: str | None,
) -> dict[str, bytes] | None:
    """The tokenizer's files where they are not simply the donor's."""
    files = None if plan is None else tokenizer_files(plan)
    if chat_template is None:
        return files
    folders = {merge.models[name]: model.checkpoint.path for name, model in models.items()}
    text = resolve_chat_template(chat_template, folders, list(folders))
    if text is None:
        return files
    return with_chat_template(files or donor_files(donor.checkpoint.path), text)


def _for_vocabulary(
    content: dict[str, Any], name: str, donor: InputModel, plan: TokenizerPlan
) -> tuple[dict[str, Any], list[str]]:
    own = read_vocabulary(donor.checkpoint.path, donor.checkpoint.label)
    theirs = read_json(plan.vocabulary.folder / name)
    return config_for(content, plan, own=own, donor=theirs)


def result_config(donor: InputModel, output: OutputTensors) -> dict[str, Any]:
    """The donor's config.json with the result's layers and dtype."""
    config = {k: v for k, v in donor.checkpoint.config.items() if k not in NOT_CARRIED}
    if output.layer_origins != tuple(range(donor.architecture.num_layers)):
        config = _with_layers(config, donor.architecture.layer_key, output.layer_origins)
    return _with_dtype(config, _main_dtype(output))


def _with_layers(config: dict[str, Any], key: LayerKey, origins: Sequence[int]) -> dict[str, Any]:
    """The config of a stack of slices: `origins` has the donor's layer for each of the result's."""
    if key.section:
        name, rest = key.section[0], replace(key, section=key.section[1:])
        return {**config, name: _with_layers(config[name], rest, origins)}
    lists: dict[str, Any] = {
        name: "".join(config[name][i] for i in origins)
        if isinstance(config[name], str)
        else [config[name][i] for i in origins]
        for name in key.lists
    }
    counts: dict[str, Any] = dict.fromkeys(key.count, len(origins))
    return {**config, **counts, **lists}


def _main_dtype(output: OutputTensors) -> str:
    """The dtype of most bytes: routers and biases may be kept wider than the rest."""
    bytes_of: dict[torch.dtype, int] = {}
    for info in output.tensors:
        if info.dtype.is_floating_point:
            bytes_of[info.dtype] = bytes_of.get(info.dtype, 0) + info.nbytes
    return dtype_name(max(bytes_of, key=bytes_of.__getitem__, default=torch.float32))


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Said under the key that the donor uses (`dtype` since transformers 5, `torch_dtype` before)
    wherever it says one; a config that says none gets `torch_dtype`, which all versions read."""
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    out: dict[str, Any] = {**config, **{key: dtype for key in keys}}
    for key, value in config.items():
        if isinstance(value, dict) and any(k in value for k in ("dtype", "torch_dtype")):
            out[key] = _with_dtype(value, dtype)
    return out
