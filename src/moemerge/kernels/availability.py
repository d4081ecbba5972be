"""Test whether Triton can compile kernels on this machine.

Triton needs a C compiler and Python's headers, which neither torch nor Python install. Without them
plain torch computes everything, only slower.
"""

from __future__ import annotations

import logging
import threading
from functools import cache
from importlib.util import find_spec

import torch

_FIRST = threading.Lock()  # the first launch initialises Triton, which is not thread-safe


def triton_works(device: torch.device) -> bool:
    """Return whether Triton is installed and compiles for this GPU; tested once."""
    with _FIRST:
        return _tried(device)


@cache
def _tried(device: torch.device) -> bool:
    if find_spec("triton") is None:
        return False
    try:
        from moemerge.kernels.experts import gated

        with torch.cuda.device(device):
            gated(torch.zeros(1, 32, dtype=torch.bfloat16, device=device))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers, linkers and drivers raise errors of many types
        logging.getLogger(__name__).warning(
            "Triton cannot compile here; plain torch is used, which is slower (%s: %s)",
            type(error).__name__,
            str(error).strip().splitlines()[-1] if str(error).strip() else "no reason given",
        )
        return False
    return True
