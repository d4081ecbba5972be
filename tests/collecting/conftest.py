"""Tiny models with tokenizers, and text for them."""

import json
import random

import pytest

import multimodal_zoo
import zoo
from moemerge.collecting.job import CollectRequest
from moemerge.collecting.run import run_collect
from moemerge.collecting.settings import CollectingSettings
from moemerge.runtime.progress import Silent


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Rows of unequal length, so that batches are padded; one row is too short to predict."""
    chance = random.Random(0)
    words = zoo._WORDS.split()
    lengths = (7, 31, 12, 12, 25, 3, 18, 0, 40)
    rows = [{"text": " ".join(chance.choices(words, k=n))} for n in lengths]
    path = tmp_path_factory.mktemp("text") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """`model_folder("olmoe", fused=True)`: a tiny checkpoint with a tokenizer; read it only."""
    built = {}

    def folder(family, **options):
        if not zoo.installed(family):
            pytest.skip(f"the installed transformers has no {family}")
        key = (family, *sorted((name, repr(value)) for name, value in options.items()))
        if key not in built:
            rooms = multimodal_zoo if family in multimodal_zoo.FAMILIES else zoo
            path = rooms.build(family, tmp_path_factory.mktemp(family), **options)
            built[key] = zoo.tiny_tokenizer(path)
        return built[key]

    return folder


@pytest.fixture(scope="session")
def collect(text):
    """`collect(model, out, kind="gram", ...)` on the text above."""

    def run(model, out, *, overwrite=False, **settings):
        chosen = CollectingSettings(**{"device": "cpu", "dtype": "float32", **settings})
        return run_collect(CollectRequest(model, out, [text], chosen, overwrite), Silent())

    return run
