"""Read a config file and check all of it, before anything else happens.

All faults of a file are in one error, with their lines. Keys that mergekit silently ignores are
faults too; `lenient` turns exactly those into warnings and removes them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from moemerge.config.checks import (
    ConfigFilter,
    MethodCheck,
    Scope,
    body_prefix,
    lacks_base,
    method_faults,
    normalised_for_checks,
    scope_faults,
    slice_faults,
)
from moemerge.config.coefficients import (
    WEIGHT,
    Coefficients,
    coefficient_faults,
    read_coefficients,
    unweighed_faults,
)
from moemerge.config.faults import Fault, Path, WorkingCopy, suggested, validate
from moemerge.config.parameters import BasePolicy, MethodSchema, WrapperSchema
from moemerge.config.requests import (
    RequestedRepair,
    StatisticsRequest,
    TextRequest,
    repair_faults,
    requested_repairs,
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
from moemerge.config.schema import REPAIRS, RunConfig, kept_faults
from moemerge.config.text_settings import files_of
from moemerge.config.yaml_lines import MERGE, Document, require_kind

_NO_METHOD: Final = "(none)"  # replaces a missing merge_method while the rest is checked
_BODIES: Final[tuple[Path, ...]] = (("models",), ("slices",), ("modules",))
_PAIRED: Final[tuple[Path, ...]] = (
    ("data",),
    *((repair.key, part) for repair in REPAIRS for part in ("data", "sources")),
)


@dataclass(frozen=True)
class EarlierStages:
    """Merges of the same file whose results exist while the last one runs."""

    prefix: str  # of their folders
    documents: tuple[str, ...]  # their configs as YAML, in the order in which they ran


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
    return _Check(document, schemas, wrappers or {}, inputs, read_files=coefficients).run()


@dataclass
class _Check:
    document: Document
    schemas: Mapping[str, MethodSchema]
    wrappers: Mapping[str, WrapperSchema]
    inputs: Callable[[RunConfig], Sequence[Fault]] | None = None
    read_files: bool = True
    faults: list[Fault] = field(default_factory=list)

    def run(self) -> LoadedConfig:
        document = self.document
        self.faults.extend(document.faults)
        work = WorkingCopy(document.data)
        config = validate(RunConfig, work, self._note_structure, fill={"merge_method": _NO_METHOD})
        if config is not None:
            later = self._check(config, work)
            missing = () if self.inputs is None else self.inputs(config)
            if self.faults or later or len(missing) > 1:
                later += missing
            self.faults += [replace(p, path=work.original(p.path)) for p in later]
            document.judge(self.faults)
            ineffective = [p for p in later if p.ignorable]
            if ineffective and work.remove(ineffective, {}):
                config = validate(RunConfig, work, self.faults.append)
        warnings = document.judge(self.faults)
        assert config is not None  # otherwise a fault was noted
        config = with_models(config)
        merge = normalise(config, self.schemas, self.wrappers)
        filters = MethodCheck(config, self.schemas).filters()
        coefficients = self._coefficients(config, merge)
        return LoadedConfig(
            config=config,
            coefficients=coefficients,
            document=document,
            filters=tuple(replace(f, path=work.original(f.path)) for f in filters),
            warnings=warnings,
            merge=merge,
            repairs=requested_repairs(config),
            statistics=statistics_request(config, merge),
            recipes=text_requests(config),
        )

    def _coefficients(self, config: RunConfig, merge: NormalisedMerge) -> Coefficients | None:
        if config.coefficients is None or not self.read_files:
            return None
        coefficients = read_coefficients(config.coefficients)
        coefficients.document.judge(coefficient_faults(coefficients, merge))
        return coefficients

    def _note_structure(self, fault: Fault) -> None:
        """Note a fault, with a hint if a parameter was written outside `parameters:`."""
        key = fault.path[-1] if fault.path else ""
        parameters = {spec.name for schema in self.schemas.values() for spec in schema.parameters}
        if fault.message.startswith("unknown key") and key in parameters:
            text = f"unknown key here, did you mean `parameters: {{{key}: ...}}`?"
            fault = replace(fault, message=text)
        self.faults.append(fault)

    def _check(self, config: RunConfig, work: WorkingCopy) -> list[Fault]:
        """Check everything that does not depend on a broken part, which would repeat its fault."""
        models_known = not work.lost(*_BODIES, ("base_model",), but="parameters")
        faults = [] if work.lost(("merge_method",)) else method_faults(config, self.schemas)
        if models_known and not (config.body.models or config.body.slices):
            faults.append(Fault(body_prefix(config), "nothing to merge: give `models` or `slices`"))
        faults += slice_faults(config)
        faults += name_faults(config, body_prefix(config))
        faults += self._tokenizer(config, work)
        faults += wrap_faults(config, self.schemas, self.wrappers)
        faults += kept_faults(config, self.schemas)
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
            misspelt = set() if self.document.lenient else check.misspelt()  # reported as such
            if config.coefficients is not None:
                misspelt.add(WEIGHT)
                faults += unweighed_faults(merge, ("coefficients",))
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


# --- wrappers -------------------------------------------------------------------------------------

WRAP: Path = ("wrap",)


def wrap_faults(
    config: RunConfig, schemas: Mapping[str, MethodSchema], wrappers: Mapping[str, WrapperSchema]
) -> Iterator[Fault]:
    """Report misspelt wrappers and parameters, and methods that cannot be wrapped."""
    method = schemas.get(config.merge_method)
    for i, entry in enumerate(config.wrap or ()):
        place: Path = (*WRAP, i)
        schema = wrappers.get(entry.wrapper)
        if schema is None:
            close = suggested(entry.wrapper, sorted(wrappers))
            yield Fault(place, f"unknown wrapper {entry.wrapper!r}{close}")
            continue
        if any(entry.wrapper == other.wrapper for other in (config.wrap or ())[:i]):
            yield Fault(place, f"{entry.wrapper!r} is listed twice")
        known = {spec.name: spec for spec in schema.parameters}
        scope = Scope((*place, "parameters"), entry.parameters, known, schema.name, ignorable=False)
        yield from scope_faults(scope)
        if method is not None:
            yield from _unfit(place, method, schema)
    if config.wrap and method is not None and method.base is BasePolicy.MEMBER:
        text = f"{method.name!r} takes the base for a model like the others, and a wrapper needs it"
        yield Fault(WRAP, f"{text} apart: use 'task_arithmetic', with weights that sum to 1")
    elif config.wrap and lacks_base(config):
        yield Fault(WRAP, "wrappers need a base_model")


def _unfit(place: Path, method: MethodSchema, schema: WrapperSchema) -> Iterator[Fault]:
    if not schema.turns:
        return
    if method.max_models == 1:
        text = f"{schema.name!r} aligns several models, and {method.name!r} takes one"
        yield Fault(place, text)
    if method.statistics == "fisher":
        text = f"{method.name!r} knows single weights, which {schema.name!r} turns into others"
        yield Fault(place, text)
