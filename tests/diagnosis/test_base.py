"""Text that no source speaks for: the base is what it is measured against."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moemerge
from calibration import cases
from moemerge.diagnosis.results import Diagnosis
from moemerge.errors import UsageError

CaseOf = Callable[..., cases.Case]


@pytest.fixture(scope="module")
def case(case_of: CaseOf) -> cases.Case:
    return case_of("olmoe")


@pytest.fixture(scope="module")
def general(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.write_text(tmp_path_factory.mktemp("text") / "general.jsonl", seed=7)


def diagnose(case: cases.Case, general: Path, **values: Any) -> Diagnosis:
    base = values.pop("base", case.sources["code"])
    given: dict[str, Any] = {"sources": case.sources, "data": {**case.data, "general": general}}
    return moemerge.diagnose(case.merged, base=base, **(given | values))


def test_the_base_is_measured_as_a_source_is(case: cases.Case, general: Path) -> None:
    found = diagnose(case, general, against=[case.sources["math"]])
    same = moemerge.diagnose(
        case.merged,
        sources={**case.sources, "general": case.sources["code"]},
        data={**case.data, "general": general},
        against=[case.sources["math"]],
    )
    assert found.rows() == same.rows()
    assert [total.to_json() for total in found.totals] == [t.to_json() for t in same.totals]
    facts = found.to_json()["domains"]
    references = {name: facts[name]["reference"] for name in facts}
    assert references == {"math": "source", "code": "source", "general": "base"}
    assert f"--base {case.sources['code']}" in found.command
    assert "--source general" not in found.command
    assert "--data general=" in found.command


def test_the_verdict_is_about_the_sources_and_the_advice_about_the_rest(
    case: cases.Case, general: Path
) -> None:
    alone = moemerge.diagnose(case.merged, sources=case.sources, data=case.data)
    found = diagnose(case, general)
    assert found.verdict == alone.verdict
    total = found.total("general")
    gap = f"{total.loss - total.loss_source:+.3f}"
    (line,) = [text for text in found.advice if "general" in text]
    assert line.startswith("On general, which no source speaks for")
    assert gap in line
    assert [text for text in found.advice if text != line] == list(alone.advice)


def test_a_domain_of_the_base_alone(case: cases.Case, general: Path) -> None:
    found = diagnose(case, general, sources={}, data={"general": general}, base=case.merged)
    assert found.verdict.words == "The model routes exactly as its sources do."
    assert found.total("general").mismatch == 0


def test_names_must_fit(case: cases.Case, general: Path) -> None:
    with pytest.raises(UsageError, match="every domain has a source"):
        diagnose(case, general, data=case.data)
    with pytest.raises(UsageError, match="data 'general' has no source of that name"):
        diagnose(case, general, base=None)
    with pytest.raises(UsageError, match="source 'code' has no data"):
        diagnose(case, general, data={"math": case.data["math"], "general": general})
