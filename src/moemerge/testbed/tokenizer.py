"""The testbed's tokenizer: one token for each character."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

CHARACTERS = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 +-*/=()[]{},.:;?!'\"_<>"
)
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
SPECIAL = (PAD, EOS, UNKNOWN)
IDS = {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS))}
VOCABULARY = len(IDS)
# Of every byte of Latin-1, which holds all characters there are tokens for.
_TABLE = np.array([IDS.get(chr(byte), IDS[UNKNOWN]) for byte in range(256)], dtype=np.uint8)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character."""
    inner = Tokenizer(models.WordLevel(IDS, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    inner.decoder = decoders.Fuse()  # characters side by side, without spaces between them
    make: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    return make(tokenizer_object=inner, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN)


def encode(text: str) -> Tensor:
    """Token ids of a text without special tokens, (tokens,): what the tokenizer gives, faster."""
    found = _TABLE[np.frombuffer(text.encode("latin-1", "replace"), dtype=np.uint8)]
    return torch.from_numpy(found)
