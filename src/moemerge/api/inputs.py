"""Find local files and folders that a config names and that do not exist. Uses no network."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path as FilePath

from moemerge.checkpoint.locate import is_hub_id, is_local, locate
from moemerge.config.checks import body_prefix
from moemerge.config.faults import Fault, Path
from moemerge.config.models import ModelRef
from moemerge.config.resolve import entries
from moemerge.config.schema import RunConfig
from moemerge.config.text_settings import DataRecipe, Text
from moemerge.errors import MoeMergeError
from moemerge.text.rows import check_file


def missing_inputs(config: RunConfig) -> list[Fault]:
    """Return a fault for each model and each file of text that does not exist, at its first key."""
    found: dict[str, Fault] = {}
    for place, ref in _models(config):
        for path, revision in ((ref.path, ref.revision), (ref.lora, ref.lora_revision)):
            if path is not None and not is_hub_id(path):
                _check(found, place, path, partial(locate, path, revision))
    for place, file in _files(config):
        _check(found, place, file, partial(check_file, FilePath(file)))
    return list(found.values())


def _check(found: dict[str, Fault], place: Path, name: str, use: Callable[[], object]) -> None:
    try:
        use()
    except MoeMergeError as error:
        found.setdefault(name, Fault(place, error.message))


def _models(config: RunConfig) -> Iterator[tuple[Path, ModelRef]]:
    prefix = body_prefix(config)
    if config.base_model is not None:
        yield ("base_model",), config.base_model
    for place, entry in entries(config.body):
        yield (*prefix, *place, "model"), entry.model
    for i, merge_slice in enumerate(config.body.slices or ()):
        if merge_slice.base_model is not None:
            yield (*prefix, "slices", i, "base_model"), merge_slice.base_model
    for repair, block in config.repairs.items():
        place = (repair.key, "sources")
        named: list[tuple[Path, object]] = [(place, block.sources or {})]
        if isinstance(block.sources, tuple):
            named = [((*place, i), one) for i, one in enumerate(block.sources)]
        for where, one in named:
            for name, ref in one.items() if isinstance(one, Mapping) else ():
                yield (*where, name), ref


def _files(config: RunConfig) -> Iterator[tuple[Path, str]]:
    """Yield the files of text that a repair reads, and what missing text is generated from."""
    blocks = config.repairs.items()
    texts: dict[Path, Text] = {}
    if any(block.data is None for _, block in blocks):
        texts |= {("data", name): text for name, text in (config.data or {}).items()}
    for repair, block in blocks:
        texts |= {(repair.key, "data", name): text for name, text in (block.data or {}).items()}
        texts |= {(repair.key, "check", name): text for name, text in (block.check or {}).items()}
    made = {text.file for text in texts.values() if isinstance(text, DataRecipe)}
    for place, text in texts.items():
        if not isinstance(text, DataRecipe):
            yield from ((place, file) for file in text if file not in made)
        elif not os.path.exists(text.file):
            inputs = (*text.prompts, *text.text, *text.against)
            yield from ((place, file) for file in inputs if is_local(file))
