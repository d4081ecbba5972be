"""A tokenizer of numbers, which the zoo's models (128 tokens) can read; the bundled specialists."""

import shutil

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from moemerge.lab.testbed import bundled_set
from moemerge.lab.testbed.tasks import problems
from zoo import VOCAB


def number_tokenizer():
    """Token n is written n, with spaces between; token 1 ends a text."""
    inner = Tokenizer(models.WordLevel({str(n): n for n in range(VOCAB)}, unk_token="0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="1")


@pytest.fixture(scope="session")
def numbers():
    return number_tokenizer()


@pytest.fixture(scope="session")
def with_tokenizer(zoo_folder, tmp_path_factory):
    """`with_tokenizer("olmoe")`: a family's checkpoint that can be read from text."""

    def folder(model_type, **options):
        path = tmp_path_factory.mktemp(model_type)
        shutil.copytree(zoo_folder(model_type, **options), path, dirs_exist_ok=True)
        number_tokenizer().save_pretrained(str(path))
        return path

    return folder


@pytest.fixture(scope="session")
def specialists():
    return dict(bundled_set().models)


@pytest.fixture(scope="session")
def sums():
    return problems("math", split="test", count=40, seed=11)
