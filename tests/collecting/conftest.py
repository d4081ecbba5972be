"""Tiny models with tokenizers, and text for them."""

import functools
import random

import pytest

import zoo
from moemerge.config.job_settings import CollectingSettings
from moemerge.runtime.progress import Silent
from moemerge.statistics.collecting.job import CollectRequest
from moemerge.statistics.collecting.run import run_collect


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Rows of unequal length, so that batches are padded; one row is too short to predict."""
    chance = random.Random(0)
    words = zoo._WORDS.split()
    lengths = (7, 31, 12, 12, 25, 3, 18, 0, 40)
    rows = [{"text": " ".join(chance.choices(words, k=n))} for n in lengths]
    return zoo.write_rows(tmp_path_factory.mktemp("text") / "rows.jsonl", rows)


@pytest.fixture(scope="session")
def model_folder(zoo_folder):
    """`model_folder("olmoe", fused=True)`: a tiny checkpoint with a tokenizer; read it only."""
    return functools.partial(zoo_folder, tokenizer=True)


@pytest.fixture(scope="session")
def collect(text):
    """`collect(model, out, kind="gram", ...)` on the text above."""

    def run(model, out, *, overwrite=False, **settings):
        chosen = CollectingSettings(**{"device": "cpu", "dtype": "float32", **settings})
        return run_collect(CollectRequest(model, out, [text], chosen, overwrite), Silent())

    return run
