"""Read a config file and check all of it, before anything else happens.

Every fault of a file comes in one error, with its line. What mergekit would pass over in silence
is a fault too; `lenient` turns exactly those into warnings and takes the ineffective parts out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any, Final

from moemerge.config.checks import (
    ConfigFilter,
    MethodCheck,
    body_prefix,
    method_faults,
    normalised_for_checks,
    slice_faults,
)
from moemerge.config.faults import Fault, Path, path_text
from moemerge.config.parameters import MethodSchema, WrapperSchema
from moemerge.config.requests import (
    REPAIRS,
    SourceData,
    StatisticsRequest,
    TextRequest,
    repair_faults,
    source_data,
    statistics_faults,
    statistics_request,
    text_requests,
)
from moemerge.config.resolve import (
    NormalisedMerge,
    name_faults,
    normalise,
    reference_faults,
    with_models,
)
from moemerge.config.schema import RunConfig
from moemerge.config.translate import WorkingCopy, validate
from moemerge.config.wrapping import wrap_faults
from moemerge.config.yaml_lines import Document, read_yaml
from moemerge.errors import ConfigError

_NO_METHOD: Final = "(none)"  # stands in for a missing merge_method while the rest is checked
_BODIES: Final[tuple[Path, ...]] = (("models",), ("slices",), ("modules",))
_PAIRED: Final[tuple[Path, ...]] = (
    ("data",),
    *((key, part) for key in REPAIRS for part in ("data", "sources")),
)
_UNNAMED: Final = "config"
_MOST_BYTES: Final = 2**24  # no config has so many; /dev/zero has


@dataclass(frozen=True)
class FaultReporter:
    """Says what is wrong with a config, with the file's name and lines."""

    where: str
    document: Document
    lenient: bool

    def judge(self, faults: Sequence[Fault]) -> tuple[str, ...]:
        """One error for all faults; those that `lenient` forgives come back as warnings."""
        unique = dict.fromkeys(faults)  # a fault met twice is said once
        ordered = sorted(unique, key=lambda f: self.document.line(f.path) or 0)
        wrong = [f for f in ordered if not (self.lenient and f.ignorable)]
        if wrong:
            raise ConfigError.from_problems(self.where, [self._text(f) for f in wrong])
        return tuple(f"{self._text(f)} (ignored)" for f in ordered)

    def _text(self, fault: Fault) -> str:
        line = self.document.line(fault.path)
        parts = [f"line {line}"] if line is not None else []
        parts += [path_text(fault.path)] if fault.path else []
        return ": ".join([*parts, fault.message])


@dataclass(frozen=True)
class LoadedConfig:
    """A config without faults; all but `config` is what the runners work from."""

    config: RunConfig
    reporter: FaultReporter
    filters: tuple[ConfigFilter, ...]  # for those who know the tensors
    warnings: tuple[str, ...]
    merge: NormalisedMerge
    calibration: SourceData | None  # what to calibrate with, where the config asks for it
    refit: SourceData | None = None  # and what to refit with
    statistics: StatisticsRequest | None = None
    texts: Mapping[str, TextRequest] = field(default_factory=dict)  # to be made, by file

    def is_there(self, data: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        """`data` without what is still to be made."""
        made = {file for file in self.texts if not FilePath(file).exists()}
        return {name: files for name, files in data.items() if made.isdisjoint(files)}

    def merge_alone(self) -> LoadedConfig:
        """Without what `run` does after the merge, and a warning about it."""
        repairs = [key for key in RunConfig.repairs if getattr(self.config, key) is not None]
        if not repairs:
            return self
        named = " and ".join(f"`{key}:`" for key in repairs)
        warning = f"{named} of the config is left out: `moemerge run` merges and does that as well"
        return replace(
            self,
            config=self.config.model_copy(update=dict.fromkeys(repairs)),
            calibration=None,
            warnings=(*self.warnings, warning),
        )


def load_config(
    source: str | FilePath | Mapping[str, Any],
    *,
    schemas: Mapping[str, MethodSchema],
    wrappers: Mapping[str, WrapperSchema] | None = None,
    lenient: bool = False,
) -> LoadedConfig:
    """Read a file (or YAML text: a string of several lines; or a mapping) and check it.

    Raises ConfigError with every fault. File and model paths are kept as written.
    """
    where, document = read_document(source)
    reporter = FaultReporter(where, document, lenient)
    return _Check(document, schemas, wrappers or {}, reporter).run()


def read_document(source: str | FilePath | Mapping[str, Any]) -> tuple[str, Document]:
    """A config's name for messages, and what it says."""
    if isinstance(source, Mapping):
        return _UNNAMED, Document(data=source)
    if isinstance(source, str) and "\n" in source:
        return _UNNAMED, read_yaml(source, _UNNAMED)
    where = str(source)
    try:
        with open(source, "rb") as file:  # a pipe will do
            text = file.read(_MOST_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read config {where!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: not UTF-8 text (byte {error.start})", hint="a config is a YAML file"
        ) from None
    return where, read_yaml(text, where)


@dataclass
class _Check:
    document: Document
    schemas: Mapping[str, MethodSchema]
    wrappers: Mapping[str, WrapperSchema]
    reporter: FaultReporter
    faults: list[Fault] = field(default_factory=list)

    def run(self) -> LoadedConfig:
        self.faults.extend(self.document.faults)
        work = WorkingCopy(self.document.data)
        config = validate(RunConfig, work, self._note_structure, fill={"merge_method": _NO_METHOD})
        if config is not None:
            later = self._check(config, work)
            self.faults += [replace(p, path=work.original(p.path)) for p in later]
            self.reporter.judge(self.faults)
            ineffective = [p for p in later if p.ignorable]
            if ineffective and work.remove(ineffective, {}):
                config = validate(RunConfig, work, self.faults.append)
        warnings = self.reporter.judge(self.faults)
        assert config is not None  # otherwise a fault was noted
        config = with_models(config)
        merge = normalise(config, self.schemas, self.wrappers)
        filters = MethodCheck(config, self.schemas).filters()
        return LoadedConfig(
            config=config,
            reporter=self.reporter,
            filters=tuple(replace(f, path=work.original(f.path)) for f in filters),
            warnings=warnings,
            merge=merge,
            calibration=source_data(config, "calibration"),
            refit=source_data(config, "refit"),
            statistics=statistics_request(config, merge),
            texts=text_requests(config),
        )

    def _note_structure(self, fault: Fault) -> None:
        """A parameter outside `parameters:` is a common mistake that deserves its own words."""
        key = fault.path[-1] if fault.path else ""
        parameters = {spec.name for schema in self.schemas.values() for spec in schema.parameters}
        if fault.message.startswith("unknown key") and key in parameters:
            text = f"unknown key here, did you mean `parameters: {{{key}: ...}}`?"
            fault = replace(fault, message=text)
        self.faults.append(fault)

    def _check(self, config: RunConfig, work: WorkingCopy) -> list[Fault]:
        """What depends on a broken part is left out: it would only repeat the fault."""
        models_known = not work.lost(*_BODIES, ("base_model",), but="parameters")
        faults = [] if work.lost(("merge_method",)) else method_faults(config, self.schemas)
        if models_known and not (config.body.models or config.body.slices):
            faults.append(Fault(body_prefix(config), "nothing to merge: give `models` or `slices`"))
        faults += slice_faults(config)
        faults += name_faults(config, body_prefix(config))
        faults += self._tokenizer(config, work)
        faults += wrap_faults(config, self.schemas, self.wrappers)
        if config.merge_method in self.schemas:
            faults += self._method(config, work, models_known)
        if models_known:
            faults += reference_faults(config)
        if models_known and not work.lost(*_PAIRED):
            faults += repair_faults(config)
        return faults

    def _method(self, config: RunConfig, work: WorkingCopy, models_known: bool) -> list[Fault]:
        check = MethodCheck(config, self.schemas)
        faults = list(check.parameters())
        if not models_known or not (config.body.models or config.body.slices):
            return faults
        lacks_base = list(check.bases())
        faults += lacks_base
        if not lacks_base:
            merge = normalised_for_checks(config, self.schemas, self.wrappers)
            faults += check.counts(merge)
            misspelt = set() if self.reporter.lenient else check.misspelt()  # reported as such
            if not work.lost(*_BODIES, ("parameters",), ("router",)):
                faults += check.required(merge, misspelt)
            if not work.lost(("statistics",), ("data",)):
                faults += statistics_faults(config, merge)
        return faults

    def _tokenizer(self, config: RunConfig, work: WorkingCopy) -> list[Fault]:
        faults = []
        if config.tokenizer is not None and config.tokenizer_source is not None:
            text = "give either tokenizer_source or tokenizer: {source: ...}, not both"
            faults.append(Fault(("tokenizer_source",), text))
        needs_base: list[Path] = []
        if config.tokenizer_source == "base":
            needs_base.append(("tokenizer_source",))
        if config.tokenizer is not None and config.tokenizer.source == "base":
            needs_base.append(("tokenizer", "source"))
        if config.base_model is None and not work.lost(("base_model",)):
            text = "'base' means the base_model's tokenizer, and there is no base_model"
            faults += [Fault(path, text) for path in needs_base]
        return faults
