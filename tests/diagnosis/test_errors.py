"""What cannot be diagnosed is refused before a layer is read, with what to do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moemerge
import zoo
from calibration import cases
from moemerge.errors import (
    ArchitectureError,
    MoeMergeError,
    ResourceError,
    TokenizerError,
    UsageError,
)

CaseOf = Callable[..., cases.Case]


@pytest.fixture(scope="module")
def case(case_of: CaseOf) -> cases.Case:
    return case_of("olmoe")


def refused(case: cases.Case, error: type[MoeMergeError], words: str, **given: Any) -> None:
    values: dict[str, Any] = {"sources": case.sources, "data": case.data, **given}
    with pytest.raises(error, match=words):
        moemerge.diagnose(values.pop("model", case.merged), **values)


def test_names(case: cases.Case) -> None:
    data = {"math": case.data["math"], "cod": case.data["code"]}
    refused(case, UsageError, "data 'cod' has no source of that name.*did you mean", data=data)
    refused(case, UsageError, "no source given", sources={}, data={})
    named = {"model": case.merged}
    refused(case, UsageError, "cannot be named 'model'", sources=named, data={"model": "x.jsonl"})
    refused(case, UsageError, "that name is taken", against=[case.merged])
    twice = [case.sources["math"], case.sources["math"]]
    refused(case, UsageError, "that name is taken", against=twice)


def test_families_and_shapes(case: cases.Case, zoo_folder: Callable[..., Path]) -> None:
    other = zoo_folder("mixtral")
    sources = {**case.sources, "math": other}
    refused(case, ArchitectureError, "source 'math' .* is 'mixtral', but", sources=sources)
    refused(case, ArchitectureError, f"{other} is 'mixtral', but", against=[other])
    shallow = zoo_folder("olmoe", num_hidden_layers=2)
    sources = {**case.sources, "math": shallow}
    refused(case, ArchitectureError, "has 2 layers, .* has 3", sources=sources)
    few = zoo_folder("olmoe", num_experts=4)
    sources = {**case.sources, "math": few}
    refused(case, ArchitectureError, "with 4 experts, that of .* with 8", sources=sources)


def test_vocabularies(case: cases.Case, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(case.sources["math"], other)
    zoo.tiny_tokenizer(other, words=("loop", "model", *reversed(zoo._WORDS.split())))
    sources = {**case.sources, "math": other}
    refused(case, TokenizerError, "assign different ids to the same text", sources=sources)
    refused(case, TokenizerError, f"token .* in {other}", against=[other])


def test_a_source_without_a_tokenizer_is_told(case: cases.Case) -> None:
    found = moemerge.diagnose(case.merged, sources=case.sources, data=case.data, limit=2)
    assert sum("has no tokenizer" in notice for notice in found.notices) == 2


def test_memory(case: cases.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("moemerge.lockstep.streams", "moemerge.features.settings"):
        monkeypatch.setattr(f"{module}.available_memory", lambda device: 1000)
    refused(case, ResourceError, "3 models in parallel needs about", offload="device")
    refused(case, ResourceError, "7 models.*\n.*without `swaps`", offload="device", swaps=True)


def test_the_page_is_refused_before_the_work(case: cases.Case, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    nowhere = tmp_path / "none" / "page.html"
    refused(case, UsageError, "there is no folder", report=nowhere)
    refused(case, UsageError, "it is a folder", report=tmp_path)
