"""Coefficients of a merge, found from text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from moemerge.api.jobs import files_of, settings_for
from moemerge.api.listing import method_schemas, wrapper_schemas
from moemerge.api.merging import ConfigSource
from moemerge.config.coefficients import CoefficientKeywords, CoefficientMethod, CoefficientSettings
from moemerge.config.load import LoadedConfig
from moemerge.config.load import load_config as _load_config
from moemerge.config.settings import with_keywords
from moemerge.errors import UsageError
from moemerge.registry import did_you_mean
from moemerge.runtime.progress import Progress, Silent

if TYPE_CHECKING:
    from moemerge.api.jobs import Files
    from moemerge.coefficients import CoefficientsReport


@with_keywords(CoefficientKeywords, CoefficientSettings)
def find_coefficients(
    method: CoefficientMethod,
    config: ConfigSource,
    out: str | Path,
    *,
    data: Mapping[str, Files] | None = None,
    settings: CoefficientSettings | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **keywords: Unpack[CoefficientKeywords],
) -> CoefficientsReport:
    """Find how much of each model of `config` a merge should take, layer by layer, into `out`.

    `method` is `acm`, `sens`, `neuron` or `adamerging`; `data` is text of each merged model under
    its name, where the config's own `data` is not to be used. A config with `coefficients: OUT`
    applies them.
    """
    from moemerge.coefficients import CoefficientsRequest, run_coefficients
    from moemerge.coefficients.run import MAKERS

    if method not in MAKERS:
        raise UsageError(
            f"unknown way to find coefficients {method!r}{did_you_mean(method, MAKERS)}",
            hint=f"known: {', '.join(MAKERS)}",
        )
    chosen = settings_for(CoefficientSettings, settings, keywords, "find_coefficients")
    loaded = _loaded(config)
    merge = loaded.merge
    if merge.base_model is None:
        raise UsageError(
            "the config has no base_model, which coefficients are found against",
            hint="name the model that the others were fine-tuned from: `base_model: ...`",
        )
    if not merge.whole:
        raise UsageError(
            "coefficients are found for whole models, and the config stacks slices",
            hint="list the models under `models:` in a config of its own",
        )
    merged = [m for m in merge.slices[0].inputs if m.model != merge.base_model]
    given = {name: files_of(files) for name, files in (data or {}).items()}
    unknown = [name for name in given if name not in {m.name for m in merged}]
    if unknown:
        known = [m.name for m in merged]
        raise UsageError(
            f"data {unknown[0]!r} belongs to no merged model{did_you_mean(unknown[0], known)}",
            hint=f"merged are {', '.join(known)}",
        )
    request = CoefficientsRequest(
        method=method,
        models={m.name: m.model for m in merged},
        base=merge.base_model,
        data={**_own_data(loaded), **given},
        out=Path(out),
        settings=chosen,
        overwrite=overwrite,
    )
    return run_coefficients(request, Silent() if progress is None else progress)


def _loaded(config: ConfigSource) -> LoadedConfig:
    """The config; the file of coefficients that it names may be the one to be made."""
    if isinstance(config, LoadedConfig):
        return config
    return _load_config(
        config, schemas=method_schemas(), wrappers=wrapper_schemas(), coefficients=False
    )


def _own_data(loaded: LoadedConfig) -> dict[str, tuple[str, ...]]:
    from moemerge.config.data import files_of as files_of_entry

    return {name: files_of_entry(entry) for name, entry in (loaded.config.data or {}).items()}
