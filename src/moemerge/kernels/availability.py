"""Whether kernels can be compiled on this machine.

Triton needs a C compiler and Python's headers, which neither torch nor Python bring along. Without
them all is computed in plain torch, which takes longer.
"""

from __future__ import annotations

import logging
import threading
from functools import cache
from importlib.util import find_spec

import torch

_FIRST = threading.Lock()  # a first launch sets Triton up, and must be alone


def triton_works(device: torch.device) -> bool:
    """Whether Triton is installed and compiles for this GPU: tried once."""
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
    except Exception as error:  # of compilers, linkers, drivers: none of them ours
        logging.getLogger(__name__).warning(
            "Triton cannot compile here, so slower ways are taken (%s: %s)",
            type(error).__name__,
            str(error).strip().splitlines()[-1] if str(error).strip() else "no reason given",
        )
        return False
    return True
