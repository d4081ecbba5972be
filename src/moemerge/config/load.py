"""Read a config file and check all of it, before anything else happens.

Every problem of a file comes in one error, with its line. What mergekit would pass over in silence
is a problem too; `lenient` turns exactly those into warnings and takes the ineffective parts out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any, Final

from moemerge.config.checks import (
    MethodCheck,
    body_prefix,
    method_problems,
    normalised_for_checks,
    slice_problems,
)
from moemerge.config.pairing import (
    CalibrationRun,
    calibration_run,
    name_problems,
    pairing_problems,
    reference_problems,
    with_models,
)
from moemerge.config.parameters import MethodSchema
from moemerge.config.problems import Path, Problem, path_text
from moemerge.config.resolve import NormalisedMerge, normalise
from moemerge.config.schema import RunConfig
from moemerge.config.statistics import StatisticsRun, statistics_problems, statistics_run
from moemerge.config.translate import WorkingCopy, validate
from moemerge.config.yaml_lines import Document, read_yaml
from moemerge.errors import ConfigError

_NO_METHOD: Final = "(none)"  # stands in for a missing merge_method while the rest is checked
_BODIES: Final[tuple[Path, ...]] = (("models",), ("slices",), ("modules",))
_PAIRED: Final[tuple[Path, ...]] = (("data",), ("calibration", "data"), ("calibration", "sources"))
_UNNAMED: Final = "config"


@dataclass(frozen=True)
class LoadedConfig:
    """A config without problems; all but `config` is what the runners work from."""

    config: RunConfig
    warnings: tuple[str, ...]
    merge: NormalisedMerge
    calibration: CalibrationRun | None
    statistics: StatisticsRun | None = None


def load_config(
    source: str | FilePath | Mapping[str, Any],
    *,
    schemas: Mapping[str, MethodSchema],
    lenient: bool = False,
) -> LoadedConfig:
    """Read a file (or YAML text: a string of several lines; or a mapping) and check it.

    Raises ConfigError with every problem found. File and model paths are kept as written.
    """
    where, document = _read(source)
    return _Check(document, where, schemas, lenient).run()


def _read(source: str | FilePath | Mapping[str, Any]) -> tuple[str, Document]:
    if isinstance(source, Mapping):
        return _UNNAMED, Document(data=source)
    if isinstance(source, str) and "\n" in source:
        return _UNNAMED, read_yaml(source, _UNNAMED)
    where = str(source)
    try:
        text = FilePath(source).read_text(encoding="utf-8-sig")
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
    where: str
    schemas: Mapping[str, MethodSchema]
    lenient: bool
    found: list[Problem] = field(default_factory=list)

    def run(self) -> LoadedConfig:
        self.found.extend(self.document.problems)
        work = WorkingCopy(self.document.data)
        config = validate(RunConfig, work, self._note_structure, fill={"merge_method": _NO_METHOD})
        if config is not None:
            later = self._check(config, work)
            self.found += [replace(p, path=work.original(p.path)) for p in later]
            self._raise_if_wrong()
            ineffective = [p for p in later if p.ignorable]
            if ineffective and work.remove(ineffective, {}):
                config = validate(RunConfig, work, self.found.append)
        self._raise_if_wrong()
        assert config is not None  # otherwise a problem was noted
        config = with_models(config)
        merge = normalise(config, self.schemas)
        return LoadedConfig(
            config=config,
            warnings=tuple(f"{self._text(p)} (ignored)" for p in self._sorted(self.found)),
            merge=merge,
            calibration=calibration_run(config),
            statistics=statistics_run(config, merge),
        )

    def _note_structure(self, problem: Problem) -> None:
        """A parameter outside `parameters:` is a common mistake that deserves its own words."""
        key = problem.path[-1] if problem.path else ""
        parameters = {spec.name for schema in self.schemas.values() for spec in schema.parameters}
        if problem.message.startswith("unknown key") and key in parameters:
            text = f"unknown key here, did you mean `parameters: {{{key}: ...}}`?"
            problem = replace(problem, message=text)
        self.found.append(problem)

    def _check(self, config: RunConfig, work: WorkingCopy) -> list[Problem]:
        """What depends on a broken part is left out: it would only repeat the problem."""
        models_known = not work.lost(*_BODIES, ("base_model",), but="parameters")
        found = [] if work.lost(("merge_method",)) else method_problems(config, self.schemas)
        if models_known and not (config.body.models or config.body.slices):
            found.append(
                Problem(body_prefix(config), "nothing to merge: give `models` or `slices`")
            )
        found += slice_problems(config)
        found += name_problems(config, body_prefix(config))
        found += self._tokenizer(config, work)
        if config.merge_method in self.schemas:
            found += self._method(config, work, models_known)
        if models_known:
            found += reference_problems(config)
        if models_known and not work.lost(*_PAIRED):
            found += pairing_problems(config)
        return found

    def _method(self, config: RunConfig, work: WorkingCopy, models_known: bool) -> list[Problem]:
        check = MethodCheck(config, self.schemas)
        found = list(check.parameters())
        if not models_known or not (config.body.models or config.body.slices):
            return found
        lacks_base = list(check.bases())
        found += lacks_base
        if not lacks_base:
            merge = normalised_for_checks(config, self.schemas)
            found += check.counts(merge)
            misspelt = set() if self.lenient else check.misspelt()  # reported as such
            if not work.lost(*_BODIES, ("parameters",), ("router",)):
                found += check.required(merge, misspelt)
            if not work.lost(("statistics",), ("data",)):
                found += statistics_problems(config, merge)
        return found

    def _tokenizer(self, config: RunConfig, work: WorkingCopy) -> list[Problem]:
        found = []
        if config.tokenizer is not None and config.tokenizer_source is not None:
            text = "give either tokenizer_source or tokenizer: {source: ...}, not both"
            found.append(Problem(("tokenizer_source",), text))
        needs_base: list[Path] = []
        if config.tokenizer_source == "base":
            needs_base.append(("tokenizer_source",))
        if config.tokenizer is not None and config.tokenizer.source == "base":
            needs_base.append(("tokenizer", "source"))
        if config.base_model is None and not work.lost(("base_model",)):
            text = "'base' means the base_model's tokenizer, and there is no base_model"
            found += [Problem(path, text) for path in needs_base]
        return found

    def _raise_if_wrong(self) -> None:
        wrong = [p for p in self.found if not (self.lenient and p.ignorable)]
        if wrong:
            texts = [self._text(p) for p in self._sorted(wrong)]
            raise ConfigError.from_problems(self.where, texts)

    def _sorted(self, problems: list[Problem]) -> list[Problem]:
        """In the file's order; a problem found twice is said once."""
        unique = list(dict.fromkeys(problems))
        return sorted(unique, key=lambda p: self.document.line(p.path) or 0)

    def _text(self, problem: Problem) -> str:
        line = self.document.line(problem.path)
        parts = [f"line {line}"] if line is not None else []
        parts += [path_text(problem.path)] if problem.path else []
        return ": ".join([*parts, problem.message])
