"""Compose MoE models of dense ones, and add experts to MoE models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from moemerge.api.jobs import settings_for, uploaded
from moemerge.api.merging import load_config, merge
from moemerge.checkpoint import check_output
from moemerge.checkpoint.output import temporary_sibling
from moemerge.composing.settings import ComposeKeywords, ComposeSettings
from moemerge.config.dump import config_data
from moemerge.config.settings import with_keywords
from moemerge.runtime.process import init_cuda_context
from moemerge.runtime.progress import Progress, Silent
from moemerge.runtime.ranks import alone

if TYPE_CHECKING:
    from moemerge.composing.report import ComposeReport


@with_keywords(ComposeKeywords, ComposeSettings)
def compose(
    config: str | Path | Mapping[str, Any],
    out: str | Path,
    *,
    settings: ComposeSettings | None = None,
    progress: Progress | None = None,
    **keywords: Unpack[ComposeKeywords],
) -> ComposeReport:
    """Compose a MoE of dense models, or add experts to one, into the folder `out`.

    `out` appears complete or not at all. `config` is a YAML file as for mergekit-moe, or its
    content. Pass the settings as one object, or one by one: `compose(..., seed=1)`.
    """
    settings = settings_for(ComposeSettings, settings, keywords, "compose")
    alone("compose")
    init_cuda_context(settings.device)
    from moemerge.composing.job import load_compose_config
    from moemerge.composing.run import run_compose

    progress = Silent() if progress is None else progress
    loaded = load_compose_config(config)
    out = Path(out)
    with uploaded(out, settings.push_to_hub, progress):
        if loaded.attention is None:
            return run_compose(loaded, out, settings, progress)
        merge_config = load_config(loaded.attention).merge_alone()
        resolved = config_data(merge_config.config, absolute=True)
        loaded = loaded.model_copy(update={"attention": resolved})
        check_output(out, overwrite=settings.overwrite)
        with temporary_sibling(out) as folder:
            merge(merge_config, folder / "attention", device=settings.device, progress=progress)
            return run_compose(loaded, out, settings, progress, donor=folder / "attention")
