"""What is refused before a layer is read, and text that no source speaks for: the base does."""

import shutil

import pytest

import zoo
from moemerge.errors import (
    ArchitectureError,
    ResourceError,
    TokenizerError,
    UsageError,
)
from repairs.calibration import cases


def refused(case, error, words, **options):
    with pytest.raises(error, match=words):
        case.diagnose(**options)


def test_names(case):
    data = {"math": case.data["math"], "cod": case.data["code"]}
    refused(case, UsageError, "data 'cod' has no source of that name.*did you mean", data=data)
    refused(case, UsageError, "no source given", sources={}, data={})
    named = {"model": case.merged}
    refused(case, UsageError, "cannot be named 'model'", sources=named, data={"model": "x.jsonl"})
    refused(case, UsageError, "that name is taken", against=[case.merged])
    twice = [case.sources["math"], case.sources["math"]]
    refused(case, UsageError, "that name is taken", against=twice)


def test_families_and_shapes(case, zoo_folder):
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


def test_vocabularies(case, tmp_path):
    other = shutil.copytree(case.sources["math"], tmp_path / "other")
    zoo.tiny_tokenizer(other, words=("loop", "model", *reversed(zoo._WORDS.split())))
    sources = {**case.sources, "math": other}
    refused(case, TokenizerError, "assign different ids to the same text", sources=sources)
    refused(case, TokenizerError, f"token .* in {other}", against=[other])


def test_a_source_without_a_tokenizer_is_told(case):
    found = case.diagnose(limit=2)
    assert sum("has no tokenizer" in notice for notice in found.notices) == 2


def test_memory(case, monkeypatch):
    for module in ("moemerge.forward.walk", "moemerge.forward.settings"):
        monkeypatch.setattr(f"{module}.available_memory", lambda device: 1000)
    refused(case, ResourceError, "3 models in parallel needs about", offload="device")
    refused(case, ResourceError, "7 models.*\n.*without `swaps`", offload="device", swaps=True)


def test_the_page_is_refused_before_the_work(case, tmp_path):
    pytest.importorskip("plotly")
    nowhere = tmp_path / "none" / "page.html"
    refused(case, UsageError, "there is no folder", report=nowhere)
    refused(case, UsageError, "it is a folder", report=tmp_path)


@pytest.fixture(scope="module")
def general(tmp_path_factory):
    return cases.write_text(tmp_path_factory.mktemp("text") / "general.jsonl", seed=7)


def diagnose(case, general, **values):
    given = {"base": case.sources["code"], "data": {**case.data, "general": general}}
    return case.diagnose(**(given | values))


def test_the_base_is_measured_as_a_source_is(case, general):
    found = diagnose(case, general, against=[case.sources["math"]])
    same = case.diagnose(
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


def test_the_verdict_is_about_the_sources_and_the_advice_about_the_rest(case, general):
    alone = case.diagnose()
    found = diagnose(case, general)
    assert found.verdict == alone.verdict
    total = found.total("general")
    gap = f"{total.loss - total.loss_source:+.3f}"
    (line,) = [text for text in found.advice if text.startswith("On general, which has no source")]
    assert gap in line
    both = [[a for a in one.advice if not a.startswith("To repair")] for one in (found, alone)]
    assert [text for text in both[0] if text != line] == both[1]


def test_a_domain_of_the_base_alone(case, general):
    found = diagnose(case, general, sources={}, data={"general": general}, base=case.merged)
    assert found.verdict.words == "The model routes exactly as its sources do."
    assert found.total("general").mismatch == 0


def test_names_must_fit(case, general):
    with pytest.raises(UsageError, match="every domain has a source"):
        diagnose(case, general, data=case.data)
    with pytest.raises(UsageError, match="data 'general' has no source of that name"):
        diagnose(case, general, base=None)
    with pytest.raises(UsageError, match="source 'code' has no data"):
        diagnose(case, general, data={"math": case.data["math"], "general": general})
