"""Coefficients found from text: each against a direct computation with plain transformers."""

import math

import pytest
import torch

import moemerge
from coefficients.cases import CPU, NAMES, make_models, texts
from coefficients.cases import config as plain_config
from collecting import direct
from collecting.cases import token_rows
from moemerge.config.coefficients import read_coefficients
from moemerge.errors import CheckpointError, DataError, ResourceError, UsageError
from moemerge.statistics.coefficients.maths import (
    Information,
    balanced_coefficients,
    falling,
    next_token_divergence,
    next_token_entropy,
    relative_distance,
    transfer,
)

PLACES = [f"model.layers.{n}" for n in range(3)]


@pytest.fixture(scope="module")
def folder(zoo_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("coefficients")
    return make_models(path, zoo_folder("olmoe"), (9, 17, 5, 30))


def config(folder, **more):
    return plain_config(folder, **{"data": texts(folder), **more})


def rows_of(folder, name):
    return token_rows(folder / "base", folder / f"{name}.jsonl")


def hidden(folder, name, rows):
    """What each layer gives, (tokens, d) a layer; of the last after the final norm."""
    model = direct.whole_model(folder / name)
    with torch.no_grad():
        outs = [
            model(input_ids=row[None], use_cache=False, output_hidden_states=True).hidden_states
            for row in rows
        ]
    return [torch.cat([out[layer][0] for out in outs]) for layer in range(1, len(PLACES) + 1)]


def test_acm_is_the_direct_computation(folder, tmp_path):
    out = tmp_path / "acm.yml"
    report = moemerge.find_coefficients("acm", config(folder), out, sharpness=0.5, **CPU)
    found = read_coefficients(out)
    for name in NAMES:
        rows = rows_of(folder, name)
        pairs = zip(hidden(folder, "base", rows), hidden(folder, name, rows), strict=True)
        expected = []
        for a, b in pairs:
            rho = torch.stack(
                [torch.corrcoef(torch.stack([x, y]))[0, 1] for x, y in zip(a.T, b.T, strict=True)]
            )
            expected.append(float((-0.5 * torch.log(1 - rho**2)).mean()))
        assert report.measured["mutual_information"][name] == pytest.approx(expected, rel=1e-4)
        values = [1 - 1 / (1 + math.exp(-0.5 * i)) for i in expected]
        got = [found.values[name][place] for place in PLACES]
        assert got == pytest.approx(values, rel=1e-4)
        assert found.values[name]["*"] == pytest.approx(sum(values) / 3, rel=1e-4)
    assert found.made_by["method"] == "acm"
    moemerge.merge(config(folder, coefficients=str(out)), tmp_path / "merged", device="cpu")


def test_sens_is_the_direct_computation(folder, tmp_path):
    out = tmp_path / "sens.yml"
    settings = config(folder, coefficients=str(out))  # the file that is to be made
    report = moemerge.find_coefficients("sens", settings, out, temperature=0.05, **CPU)
    sums, logits = {}, {}
    for name in NAMES:
        own = direct.sensitivities(folder / name, rows_of(folder, name))
        linear = {k: v for k, v in own.items() if "norm" not in k}
        sums[name] = [
            sum(v for k, v in linear.items() if k.startswith(f"{place}.")) for place in PLACES
        ]
        assert report.measured["sensitivity"][name] == pytest.approx(sums[name], rel=1e-3)
        for text in NAMES:
            model = direct.whole_model(folder / name)
            with torch.no_grad():
                rows = rows_of(folder, text)
                logits[name, text] = torch.cat([model(input_ids=r[None]).logits[0] for r in rows])
    distance = {
        (i, j): float((logits[i, j] - logits[j, j]).norm(dim=1).mean())
        for i, j in (("math", "code"), ("code", "math"))
    }
    measured = report.measured["logit_distance"]
    assert measured["math"] == pytest.approx({"code": distance["math", "code"]}, rel=1e-4)
    assert measured["code"] == pytest.approx({"math": distance["code", "math"]}, rel=1e-4)
    inverse = [1 / distance["math", "code"], 1 / distance["code", "math"]]
    shares = [value / sum(inverse) for value in inverse]
    found = read_coefficients(out)
    for layer, place in enumerate(PLACES):
        scores = [
            sums[name][layer] / math.hypot(*sums[name]) * share / 0.05
            for name, share in zip(NAMES, shares, strict=True)
        ]
        expected = 2 * torch.tensor(scores, dtype=torch.float64).softmax(0)
        got = [found.values[name][place] for name in NAMES]
        assert got == pytest.approx(expected.tolist(), rel=1e-3)
        assert sum(got) == pytest.approx(2)
    assert found.values["math"]["*"] == 1.0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["sens.yml"]


def merged_before_and_after(folder, tmp_path, file, measure):
    """A figure of the merges with weights of 0.3 and with the coefficients that were found."""
    even = config(folder, parameters={"weight": 0.3})
    for name, settings in (("before", even), ("after", config(folder, coefficients=str(file)))):
        moemerge.merge(settings, tmp_path / name, device="cpu")
    return (measure(folder, tmp_path / name) for name in ("before", "after"))


def mean_entropy(folder, model):
    """Over both texts, each text's tokens alike."""
    whole, means = direct.whole_model(model), []
    for name in NAMES:
        with torch.no_grad():
            rows = rows_of(folder, name)
            p = torch.cat([whole(input_ids=r[None]).logits[0].softmax(-1) for r in rows])
        means.append(float(-(p * p.log()).sum(-1).mean()))
    return sum(means) / 2


def test_adamerging_lowers_the_entropy_of_a_real_merge(folder, tmp_path):
    out = tmp_path / "ada.yml"
    report = moemerge.find_coefficients("adamerging", config(folder), out, steps=6, lr=0.03, **CPU)
    found = read_coefficients(out)
    for name in NAMES:
        assert set(found.values[name]) == {"*", *PLACES}
        assert all(0 <= value <= 1 for value in found.values[name].values())
        assert all(abs(value - 0.3) > 1e-3 for value in found.values[name].values())
    before, after = merged_before_and_after(folder, tmp_path, out, mean_entropy)
    assert report.measured["entropy"][0] == pytest.approx(before, rel=1e-4)
    assert after < report.measured["entropy"][-1] < before
    again = tmp_path / "again.yml"
    moemerge.find_coefficients("adamerging", config(folder), again, steps=6, lr=0.03, **CPU)
    assert again.read_bytes() == out.read_bytes()


def misalignment(folder, model):
    """Of both texts: how far the model is from the text's own specialist, by plain transformers."""
    ours, total = direct.whole_model(model), 0.0
    for name in NAMES:
        rows, expert = rows_of(folder, name), direct.whole_model(folder / name)
        with torch.no_grad():
            kl = torch.cat(
                [
                    torch.nn.functional.kl_div(
                        ours(input_ids=r[None]).logits[0].log_softmax(-1),
                        expert(input_ids=r[None]).logits[0].log_softmax(-1),
                        log_target=True,
                        reduction="none",
                    ).sum(-1)
                    for r in rows
                ]
            ).mean()
        pairs = zip(hidden(folder, model, rows), hidden(folder, name, rows), strict=True)
        far = [float((a - b).square().sum() / b.square().sum()) for a, b in pairs]
        total += float(kl) + sum(far) / len(far)
    return total / 2


def test_expertmerging_brings_a_real_merge_closer_to_its_models(folder, tmp_path):
    out, held = tmp_path / "expert.yml", tmp_path / "held.yml"
    adam = {"lr": 0.03, "rows": 4, **CPU}  # all rows
    report = moemerge.find_coefficients("expertmerging", config(folder), out, steps=6, **adam)
    before, after = merged_before_and_after(folder, tmp_path, out, misalignment)
    assert report.measured["loss"][0] == pytest.approx(before, rel=1e-4)
    assert after < before
    moemerge.find_coefficients("expertmerging", config(folder), held, steps=6, anchor=1e3, **adam)
    moved, kept = (
        max(abs(v - 0.3) for own in read_coefficients(f).values.values() for v in own.values())
        for f in (out, held)
    )
    assert kept < 0.05 < moved


def test_adamerging_refuses_what_does_not_fit(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "moemerge.statistics.coefficients.adamerging.available_memory", lambda device: 1000
    )
    with pytest.raises(ResourceError, match="keeps all models in memory"):
        moemerge.find_coefficients("adamerging", config(folder), tmp_path / "a.yml", **CPU)
    assert not list(tmp_path.iterdir())


def test_what_is_refused(folder, tmp_path):
    out = tmp_path / "a.yml"
    with pytest.raises(UsageError, match="did you mean 'acm'"):
        moemerge.find_coefficients("amc", config(folder), out)
    without = {k: v for k, v in config(folder).items() if k != "data"}
    with pytest.raises(UsageError, match="no text for math, code"):
        moemerge.find_coefficients("acm", without, out)
    with pytest.raises(UsageError, match="did you mean 'math'"):
        moemerge.find_coefficients("acm", without, out, data={"mat": "x.jsonl"})
    with pytest.raises(DataError):
        moemerge.find_coefficients("acm", config(folder), out, data={"math": "none.jsonl"})
    out.write_text("")
    with pytest.raises(CheckpointError, match="exists"):
        moemerge.find_coefficients("acm", config(folder), out)
    linear = {k: v for k, v in config(folder, merge_method="linear").items() if k != "base_model"}
    for method in ("acm", "sens", "neuron", "adamerging", "expertmerging"):
        with pytest.raises(UsageError, match="no base_model"):
            moemerge.find_coefficients(method, linear, out, overwrite=True)


# --- the mathematics ------------------------------------------------------------------------------


def test_information_of_equal_and_of_constant_states():
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    same, none, still = Information(), Information(), Information()
    same.add(x, x)
    assert 9 < same.mean() < 11
    still.add(x, torch.ones(50, 4))
    assert still.mean() == none.mean() == 0.0


def test_information_does_not_depend_on_parts():
    g = torch.Generator().manual_seed(1)
    a, b = torch.randn(60, 3, generator=g), torch.randn(60, 3, generator=g)
    whole, parts = Information(), Information()
    whole.add(a, b)
    for at in (slice(0, 17), slice(17, 60)):
        parts.add(a[at], b[at])
    assert parts.mean() == pytest.approx(whole.mean())


def test_coefficients_worked_out_by_hand():
    assert falling(0.0, 3.0) == 0.5
    assert falling(math.log(3), 1.0) == pytest.approx(0.25)
    assert falling(1e9, 1.0) == pytest.approx(0.0)
    assert transfer({"a": {"b": 1.0}, "b": {"a": 3.0}}) == pytest.approx({"a": 0.75, "b": 0.25})
    assert transfer({"a": {"b": 0.0}, "b": {"a": 0.0}}) == {"a": 0.5, "b": 0.5}
    got = balanced_coefficients({"a": [3.0, 4.0], "b": [0.0, 0.0]}, {"a": 0.5, "b": 0.5}, 1.0)
    assert got["a"][0] == pytest.approx(2 / (1 + math.exp(-0.3)))
    assert got["a"][1] + got["b"][1] == pytest.approx(2)
    even = next_token_entropy(torch.zeros(1, 2, 8), torch.tensor([[True, False]]))
    assert float(even) == pytest.approx(math.log(8))
    logs = [torch.tensor(p).log() for p in ([[0.5, 0.5]], [[0.25, 0.75]])]
    expected = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)  # of the second from the first
    assert float(next_token_divergence(*logs)) == pytest.approx(expected)
    states = [torch.tensor(h) for h in ([[1.0, 0.0], [0.0, 3.0]], [[1.0, 2.0], [0.0, 4.0]])]
    assert float(relative_distance(*states)) == pytest.approx(5 / 21)
