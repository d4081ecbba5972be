"""Read a config file and check all of it, before anything else happens.

All faults of a file are in one error, with their lines: those of its structure first, then the
others. Keys that mergekit silently ignores are faults too; `lenient` turns exactly those into
warnings and removes them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from moemerge.config.checks import ConfigFilter, MethodCheck, config_faults
from moemerge.config.coefficients import Coefficients, coefficient_faults, read_coefficients
from moemerge.config.faults import Fault
from moemerge.config.parameters import MethodSchema, WrapperSchema
from moemerge.config.requests import (
    RequestedRepair,
    StatisticsRequest,
    TextRequest,
    requested_repairs,
    statistics_request,
    text_requests,
)
from moemerge.config.resolve import NormalisedMerge, normalise, with_models
from moemerge.config.schema import RunConfig
from moemerge.config.text_settings import files_of
from moemerge.config.yaml_lines import MERGE, Document, require_kind


@dataclass(frozen=True)
class EarlierStages:
    """Merges of the same file whose results exist while the last one runs."""

    prefix: str  # of their folders
    configs: tuple[tuple[str, RunConfig], ...]  # by name, in the order in which they ran


@dataclass(frozen=True)
class LoadedConfig:
    """A config without faults, and what the runners derive from it."""

    config: RunConfig
    document: Document
    filters: tuple[ConfigFilter, ...]  # checked when the tensors are known
    warnings: tuple[str, ...]
    merge: NormalisedMerge
    repairs: tuple[RequestedRepair, ...] = ()  # in the order in which they run
    statistics: StatisticsRequest | None = None
    recipes: Mapping[str, TextRequest] = field(default_factory=dict)  # all of them, by file
    coefficients: Coefficients | None = None  # they multiply the models' weights
    earlier: EarlierStages | None = None  # the merges of the same file that this one uses

    def shown(self, text: str) -> str:
        """Return a text with the names of earlier stages in place of their temporary folders."""
        return text if self.earlier is None else text.replace(self.earlier.prefix, "")

    @property
    def repair(self) -> RequestedRepair | None:
        """The last repair, or None if the config requests none."""
        return self.repairs[-1] if self.repairs else None

    def existing(self, data: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        """Return `data` without the text that is still to be generated."""
        made = {file for file in self.texts if not os.path.exists(file)}
        return {name: files for name, files in data.items() if made.isdisjoint(files)}

    @property
    def texts(self) -> dict[str, TextRequest]:
        """The text to be generated, by file: recipes of text that the merge or a repair reads."""
        return {file: made for file, made in self.recipes.items() if file in self._read}

    @property
    def unused_text(self) -> list[str]:
        """Warnings about text that neither the merge nor a repair reads."""
        return [
            f"data.{name}: nothing reads this text: no repair uses it, and no statistics are "
            "computed from it"
            for name, text in (self.config.data or {}).items()
            if self._read.isdisjoint(files_of(text))
        ]

    @property
    def _read(self) -> set[str]:
        parts = (*self.repairs, self.statistics)
        texts = [part.data for part in parts if part is not None]
        return {file for data in texts for files in data.values() for file in files}

    def merge_alone(self) -> LoadedConfig:
        """Return the config without its repairs, and with a warning about each."""
        keys = [requested.repair.key for requested in self.repairs]
        return replace(
            self,
            config=self.config.model_copy(update=dict.fromkeys(keys)),
            repairs=(),
            warnings=(
                *self.warnings,
                *(
                    f"`{key}:` of the config is ignored: `moemerge run` merges and repairs"
                    for key in keys
                ),
            ),
        )


def check_document(
    document: Document,
    *,
    schemas: Mapping[str, MethodSchema],
    wrappers: Mapping[str, WrapperSchema] | None = None,
    coefficients: bool = True,
    inputs: Callable[[RunConfig], Sequence[Fault]] | None = None,
) -> LoadedConfig:
    """Check a config that has been read; raise ConfigError with every fault.

    File and model paths are kept as written. If `coefficients` is False, the coefficients file is
    not read. `inputs` returns faults of missing models and files. One alone is not reported here:
    the code that opens it does.
    """
    require_kind(document, MERGE)
    wrappers = wrappers or {}

    def check(config: RunConfig) -> list[Fault]:
        faults = list(config_faults(config, schemas, wrappers))
        missing = [] if inputs is None else list(inputs(config))
        return faults + missing if faults or len(missing) > 1 else []

    parameters = {spec.name for schema in schemas.values() for spec in schema.parameters}

    def explain(fault: Fault) -> Fault:
        key = fault.path[-1] if fault.path else ""
        if fault.message.startswith("unknown key") and key in parameters:
            text = f"unknown key here, did you mean `parameters: {{{key}: ...}}`?"
            return replace(fault, message=text)
        return fault

    config, warnings = document.parse_with_warnings(RunConfig, check, explain)
    config = with_models(config)
    merge = normalise(config, schemas, wrappers)
    read = None
    if config.coefficients is not None and coefficients:
        read = read_coefficients(config.coefficients)
        read.document.judge(coefficient_faults(read, merge))
    return LoadedConfig(
        config=config,
        coefficients=read,
        document=document,
        filters=tuple(MethodCheck(config, schemas).filters()),
        warnings=warnings,
        merge=merge,
        repairs=requested_repairs(config),
        statistics=statistics_request(config, merge),
        recipes=text_requests(config),
    )
