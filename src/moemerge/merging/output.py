"""The output's files other than weights: config.json, tokenizer, generation config, companions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moemerge.checkpoint import main_dtype
from moemerge.errors import ArchitectureError, TokenizerError
from moemerge.families.opened import OpenModel
from moemerge.merging.plan import MergePlan
from moemerge.merging.tokenizer.embeddings import Vocabularies
from moemerge.merging.tokenizer.plan import TokenizerPlan
from moemerge.merging.tokenizer.vocab import (
    SPECIAL_KEYS,
    AddedToken,
    read_json,
    read_vocabulary,
)
from moemerge.merging.tokenizer.write import (
    config_for,
    donor_files,
    is_tokenizer_file,
    read_chat_template,
    resolve_chat_template,
    to_json,
    tokenizer_files,
    with_chat_template,
)
from moemerge.runtime.files import read_object

GENERATION_CONFIG = "generation_config.json"
# Keys of the donor's config that describe the donor, not the result.
NOT_CARRIED = ("_name_or_path", "quantization_config", "transformers_version")


@dataclass(frozen=True)
class OutputFiles:
    """Generated files, and files copied from the donor. No name is in both."""

    made: dict[str, bytes]
    copied: dict[str, Path]
    notices: tuple[str, ...] = field(default=())


def merge_output_files(
    donor: OpenModel,
    vocabularies: Vocabularies,
    output: MergePlan,
    chat_template: str | None,
    *,
    requantise: bool = False,
) -> OutputFiles:
    """Return all files except weights. The donor is the base or, without one, the first model."""
    models = output.models
    copied = donor.checkpoint.companions()
    config = result_config(donor, output)
    if requantise and (stored := donor.checkpoint.quantisation) is not None:
        config = _updated(config, stored.keys[:-1], {stored.keys[-1]: dict(stored.section)})
    made: dict[str, bytes] = {}
    notices: list[str] = []
    path = donor.checkpoint.path / GENERATION_CONFIG
    # Read even if it is only copied: transformers loads no model whose file is not an object.
    generation = read_object(path) if os.path.isfile(path) else None
    if vocabularies.plan is not None:
        config, notices = _for_vocabulary(config, "config.json", donor, vocabularies.plan)
        if generation is not None:
            generation, more = _for_vocabulary(
                generation, GENERATION_CONFIG, donor, vocabularies.plan
            )
            made[GENERATION_CONFIG] = to_json(generation)
            notices += more
    if chat_template is None:
        setting = "`chat_template: auto`"
        notices += _differing("chat templates", donor, models, read_chat_template, setting)
    if vocabularies.plan is None:
        notices += _differing("special tokens", donor, models, _special_tokens, "`tokenizer:`")
    tokenizer = _tokenizer(models, donor, vocabularies.plan, chat_template)
    if tokenizer is not None:
        copied = {name: path for name, path in copied.items() if not is_tokenizer_file(name)}
        made |= tokenizer
    made["config.json"] = to_json(config)
    copied = {name: path for name, path in copied.items() if name not in made}
    return OutputFiles(made, copied, tuple(notices))


def _differing(
    what: str,
    donor: OpenModel,
    models: Mapping[str, OpenModel],
    read: Callable[[Path], str | None],
    setting: str,
) -> list[str]:
    """Warn if other models have something else in their tokenizer files than the donor."""
    found = {}
    for name, model in models.items():
        try:
            found[name] = read(model.checkpoint.tokenizer_folder)
        except TokenizerError as error:
            return [f"{what} of {name} could not be compared: {error.message}"]
    own = found[donor.name]
    others = [name for name, value in found.items() if value != own]
    if not others:
        return []
    nothing = "" if own else ", which has none"
    return [
        f"{what} of {', '.join(others)} differ from those of {donor.name}{nothing}; OUT takes the "
        f"latter, unless {setting} of the config chooses"
    ]


def _special_tokens(folder: Path) -> str | None:
    stated = read_json(folder / "tokenizer_config.json") or {}
    stated = {**(read_json(folder / "special_tokens_map.json") or {}), **stated}
    tokens = {k: AddedToken.parse(v, special=True) for k in SPECIAL_KEYS if (v := stated.get(k))}
    return ", ".join(f"{key} {token.content!r}" for key, token in tokens.items()) or None


def _tokenizer(
    models: Mapping[str, OpenModel],
    donor: OpenModel,
    plan: TokenizerPlan | None,
    chat_template: str | None,
) -> dict[str, bytes] | None:
    """Return the tokenizer's files, or None if they are copies of the donor's."""
    files = None if plan is None else tokenizer_files(plan)
    if chat_template is None:
        return files
    folders = [model.checkpoint.tokenizer_folder for model in models.values()]
    text = resolve_chat_template(chat_template, folders)
    if text is None:
        return files
    return with_chat_template(files or donor_files(donor.checkpoint.tokenizer_folder), text)


def _for_vocabulary(
    content: dict[str, Any], name: str, donor: OpenModel, plan: TokenizerPlan
) -> tuple[dict[str, Any], list[str]]:
    own = read_vocabulary(donor.checkpoint.tokenizer_folder, donor.label)
    theirs = read_json(plan.vocabulary.folder / name)
    return config_for(content, plan, own=own, donor=theirs)


def result_config(donor: OpenModel, output: MergePlan) -> dict[str, Any]:
    """Return the donor's config.json with the result's layers and dtype."""
    config = {k: v for k, v in donor.checkpoint.config.items() if k not in NOT_CARRIED}
    key = donor.architecture.layer_key
    if output.layer_origins != tuple((donor.name, n) for n in range(donor.architecture.num_layers)):
        origins = [(output.models[name], layer) for name, layer in output.layer_origins]
        values: dict[str, Any] = {name: each * len(origins) for name, each in key.count.items()}
        values |= {name: _by_layer(name, origins) for name in key.lists}
        values |= {name: _renumbered(name, origins) for name in key.numbers}
        values |= {name: _leading(name, origins) for name in key.leading}
        for name in key.periods:
            _require_period(name, origins)
        config = _updated(config, key.section, values)
    if not key.section and not isinstance(config.get("model_type"), str):
        config["model_type"] = donor.architecture.model_type  # inferred from `architectures`
    return _with_dtype(config, str(main_dtype(output.tensors)))


Origins = Sequence[tuple[OpenModel, int]]  # (model, its layer) of each layer of the result


def _by_layer(name: str, origins: Origins) -> Any:
    """Return a config value that has one entry per layer, for the stacked slices."""
    entries = []
    for model, layer in origins:
        value = model.architecture.text_config.get(name)
        if not isinstance(value, list | str) or layer >= len(value):
            raise ArchitectureError(
                f"the config of {model.label} has no {name!r} for layer {layer}",
                hint="only models whose configs describe their layers alike can be stacked",
            )
        entries.append(value[layer])
    return "".join(entries) if isinstance(value, str) else entries


def _renumbered(name: str, origins: Origins) -> list[int]:
    """Return a config value that lists layer numbers, for the stacked slices."""
    return [
        number
        for number, (model, layer) in enumerate(origins)
        if layer in (model.architecture.text_config.get(name) or ())
    ]


def _leading(name: str, origins: Origins) -> int:
    """Return a config value that counts leading layers of a kind, for the stacked slices."""
    flags = [layer < (model.architecture.text_config.get(name) or 0) for model, layer in origins]
    count = flags.index(False) if False in flags else len(flags)
    if any(flags[count:]):
        raise ArchitectureError(
            f"the slices put a layer that {name!r} counts among its model's first behind others",
            hint="such layers have no experts and can only come first: reorder the slices",
        )
    return count


def _require_period(name: str, origins: Origins) -> None:
    """Refuse moves that change a layer's position in a period that decides its kind."""
    for number, (model, layer) in enumerate(origins):
        period = model.architecture.text_config.get(name) or 1
        if layer % period != number % period:
            raise ArchitectureError(
                f"the slices move layer {layer} of {model.label} to {number}, but "
                f"{name!r} is {period}: the kind of a layer follows from its number",
                hint=f"move layers by multiples of {period} only",
            )


def _updated(
    config: Mapping[str, Any], section: Sequence[str], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the config with `values` replaced in a nested section."""
    if not section:
        return {**config, **values}
    return {**config, section[0]: _updated(config[section[0]], section[1:], values)}


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return the config with `dtype` in every section that has one.

    The key is the donor's: `dtype` since transformers 5, `torch_dtype` before. A config without
    either gets `torch_dtype`, which all versions read.
    """
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    out: dict[str, Any] = {**config, **{key: dtype for key in keys}}
    for key, value in config.items():
        if isinstance(value, dict) and any(k in value for k in ("dtype", "torch_dtype")):
            out[key] = _with_dtype(value, dtype)
    return out
