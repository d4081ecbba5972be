"""Every job by several processes (torchrun, gloo) gives what one process gives."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import moemerge
import quantised_zoo
import zoo
from moemerge.statistics import Statistics
from repairs.calibration import cases
from together import LIMIT, job, off, together

pytestmark = [pytest.mark.timeout(LIMIT), pytest.mark.slow]

# Tight, so that what is left is rounding and not where CG happened to stop.
EXACT = {"rtol": 1e-11, "device": "cpu", "dtype": "float64"}
PLAIN = {"device": "cpu", "dtype": "float64"}

# By name: family, settings, how far results may be apart. Newton's method ends when a step promises
# little, which depends on the steps before it.
CALIBRATIONS = {
    "calibrate": ("olmoe", {}, 1e-5),
    "measured": (
        "qwen3_moe", {"targets": "source-features", "holdout": 0.4, "measure": True}, 1e-5,
    ),
    "sources": ("deepseek_v3", {"targets": "source-features"}, 1e-5),
    "exact": ("olmoe", {"objective": "exact"}, 1e-3),
}  # fmt: skip
DIAGNOSES = {
    "swaps": ("olmoe", {"swaps": True}),
    "plain": ("qwen3_moe", {}),
    "groups": ("deepseek_v3", {}),
}
# Of rows of two tokens, some experts get none in one rank, or in all.
STATISTICS = {
    "gram": ("olmoe", {"kind": "gram", "max_length": 2}),
    "shared": ("deepseek_v3", {"kind": "gram"}),
    "activation": ("olmoe", {"kind": "activation", "max_length": 2}),
    "fisher": ("qwen3_moe", {"kind": "fisher", "max_length": 2}),
}
# Of two models in float32, so that rounding of what is stored is small beside the moves.
REFITS = {
    "maps": ("olmoe", {"holdout": 0.4}),
    "gates": ("qwen3_moe", {"holdout": 0.0, "ridge": 0.01}),
    "shares": ("deepseek_v3", {"holdout": 0.4}),
}
# By name: the rest of a config, and settings. Statistics differ by rounding, all else does not.
MERGES = {
    "dare": (
        "olmoe",
        {"merge_method": "dare_ties", "parameters": {"density": 0.5, "weight": 0.5}, "seed": 3},
        {"out_shard_size": "64KB"},
    ),
    "codes": ("qwen3_moe", {"merge_method": "karcher"}, {"requantize": "same"}),
    "regmean": ("deepseek_v3", {"merge_method": "regmean", "dtype": "float32"}, {}),
}
# One of each by three processes as well, of three families: two cores are slow with three.
BY_THREE = ("sources", "plain", "gram", "shares", "dare")


def by_ranks(names):
    """Numbers of processes, and the jobs that so many do."""
    return [(ranks, name) for ranks in (2, 3) for name in names if ranks == 2 or name in BY_THREE]


class Jobs:
    """What is done, by one process and by several, with one folder of results for each."""

    def __init__(self, folder, family):
        self.folder = folder
        self.cases = {}
        for name in ("olmoe", "qwen3_moe", "deepseek_v3"):
            place = folder / name
            place.mkdir()
            self.cases[name] = cases.make_case(family(name), place, rows=8)
            for source in self.cases[name].sources.values():
                zoo.tiny_tokenizer(source)
        self._write_configs()
        (folder / "alone").mkdir()
        for one in self.all(folder / "alone"):
            done = getattr(moemerge, one["name"])(*one["words"], **one["options"])
            Path(f"{one['report']}.0").write_text(json.dumps(done.to_json()))

    def _write_configs(self):
        for name, (family, values, settings) in MERGES.items():
            case = self.cases[family]
            models = dict(case.sources)
            if "requantize" in settings:
                section, codes = quantised_zoo.fp8_config(16, 16), quantised_zoo.block_fp8(16, 16)
                for n, path in case.sources.items():
                    models[n] = quantised_zoo.convert(
                        path, self.folder / f"{n}-fp8", section, codes, shards=2
                    )
            config = {
                **values, "models": [{"model": str(p), "name": n} for n, p in models.items()],
            }  # fmt: skip
            if name == "dare":
                config["base_model"] = str(case.merged)
            if name == "regmean":
                config["data"] = {n: str(path) for n, path in case.data.items()}
            (self.folder / f"{name}.yml").write_text(yaml.safe_dump(config))

    def all(self, out):
        for name, (family, settings, _) in CALIBRATIONS.items():
            case = self.cases[family]
            yield job(
                "calibrate", case.merged, out / name, report=out / f"{name}.json",
                sources=case.sources, data=case.data, **EXACT, **settings,
            )  # fmt: skip
        for name, (family, settings) in DIAGNOSES.items():
            case = self.cases[family]
            yield job(
                "diagnose", case.merged, report=out / f"{name}.json", sources=case.sources,
                data=case.data, **PLAIN, **settings,
            )  # fmt: skip
        for name, (family, settings) in STATISTICS.items():
            case = self.cases[family]
            yield job(
                "collect_statistics", case.sources["math"], out / f"{name}.stats",
                report=out / f"{name}.json", data=str(case.data["math"]), **PLAIN,
                **settings,
            )  # fmt: skip
        for name, (family, settings) in REFITS.items():
            case = self.cases[family]
            yield job(
                "refit", case.merged, out / name, report=out / f"{name}.json",
                sources=case.sources, data=case.data, **PLAIN, **settings,
            )  # fmt: skip
        for name, (_, _, settings) in MERGES.items():
            yield job(
                "merge", self.folder / f"{name}.yml", out / name, report=out / f"{name}.json",
                device="cpu", **settings,
            )  # fmt: skip


def all_done(folder, family):
    """All of them done by one process, by two and by three, in one start."""
    jobs = Jobs(folder, family)
    rounds = {}
    for ranks in (2, 3):
        out = jobs.folder / str(ranks)
        out.mkdir()
        rounds[ranks] = [
            one for one in jobs.all(out) if ranks == 2 or Path(one["report"]).stem in BY_THREE
        ]
    for code, words in together(rounds):
        assert code == 0, words
    return jobs


UNLIKE = ("seconds", "statistics_seconds", "created", "command", "output", "disk")


def assert_alike(one, other, where=""):
    """Documents with the same words, and numbers that differ by rounding alone."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert list(one) == list(other), where
        for name, value in one.items():
            if name not in UNLIKE:
                assert_alike(value, other[name], f"{where}.{name}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for at, value in enumerate(one):
            assert_alike(value, other[at], f"{where}[{at}]")
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-12), where
    else:
        assert one == other, where


def reports(done, name):
    """One process's, and those of every rank, which are the same."""
    return [
        json.loads(path.read_text())
        for folder in done
        for path in sorted(folder.glob(f"{name}.json.*"))
    ]


def read_once(done, name):
    """All ranks together have read what one process reads."""
    one, *others = (report["bytes_read"]["files"] for report in reports(done, name))
    assert one > 0
    assert others == [one] * len(others)


def same_routers(done, jobs, name):
    family, settings, close = CALIBRATIONS[name]
    read_once(done, name)
    assert off(*(folder / name for folder in done), jobs.cases[family].merged) < close
    names = ("tokens", "mismatch_before", "mismatch_after", "top1_before", "top1_after")
    figures = [
        [{name: row[name] for name in names} for row in report["layers"]]
        for report in reports(done, name)
    ]
    assert all(own == figures[0] for own in figures)
    alone, *others = (report["diagnosis"] for report in reports(done, name))
    assert (alone is not None) == ("measure" in settings)
    for figures_of_rank in others:
        assert_alike(alone, figures_of_rank)
    card = [(folder / name / "README.md").read_text() for folder in done]
    assert all(
        ("`moemerge diagnose` measures" in words) == ("measure" in settings) for words in card
    )


def same_figures(done, _, name):
    alone, *others = reports(done, name)
    assert alone["layers"]
    assert bool(alone["swaps"]) == (name == "swaps")
    for report in others:
        assert_alike(alone, report)


def same_statistics(done, _, name):
    alone, *others = reports(done, name)
    for report in others:
        assert_alike(alone, report)
    files = [folder / f"{name}.stats" for folder in done]
    with Statistics.open(files[0]) as one, Statistics.open(files[1]) as other:
        assert one.units == other.units
        tokens = {key: one.tokens(key) or 0 for key in one.units}
        assert tokens == {key: other.tokens(key) for key in other.units}
        assert (min(tokens.values()) < 2) == (name != "shared")
    ours, theirs = (load_file(file) for file in files)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        close = 1e-7 * float(value.abs().max())
        assert torch.allclose(value, theirs[key], rtol=1e-6, atol=close), key


def same_bytes(done, _, name):
    alone, *others = reports(done, name)
    for report in others:
        assert_alike(alone, report)
    one, other = (folder / name for folder in done)
    assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in other.iterdir())
    if name == "regmean":
        ours, theirs = zoo.tensors(one), zoo.tensors(other)
        assert all(torch.allclose(ours[key], theirs[key], rtol=1e-5, atol=1e-6) for key in ours)
    else:
        assert cases.weights(one) == cases.weights(other)
    assert len(cases.weights(one)) > 3 or name != "dare"
    assert not [path for path in other.parent.iterdir() if path.name.startswith(".")]


def same_maps(done, jobs, name):
    family, settings = REFITS[name]
    read_once(done, name)
    assert off(*(folder / name for folder in done), jobs.cases[family].merged) < 1e-4
    alone, *others = reports(done, name)
    assert alone["layers"]
    for report in others:
        for one, other in zip(alone["layers"], report["layers"], strict=True):
            assert [m["ridge"] for m in one["maps"] if "ridge" in m] == [
                m["ridge"] for m in other["maps"] if "ridge" in m
            ]
            # Without rows held out, every rank follows a batch of its own.
            if settings["holdout"]:
                assert one["drift_after"] == pytest.approx(other["drift_after"], rel=1e-4)
    assert others[0]["layers"] == others[1]["layers"]


def test_every_job_by_several_processes(tmp_path, zoo_folder):
    """One test: workers that share the tests would each do all the jobs."""
    jobs = all_done(tmp_path, zoo_folder)
    for same, names in (
        (same_routers, CALIBRATIONS),
        (same_figures, DIAGNOSES),
        (same_statistics, STATISTICS),
        (same_bytes, MERGES),
        (same_maps, REFITS),
    ):
        for ranks, name in by_ranks(names):
            same((jobs.folder / "alone", jobs.folder / str(ranks)), jobs, name)
