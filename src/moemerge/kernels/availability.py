"""Test whether Triton can compile kernels on this machine, and launch them.

Triton needs a C compiler and Python's headers, which neither torch nor Python install. Without them
plain torch computes everything, only slower. With MOEMERGE_TRITON=0 it always does.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

# A kernel's first launch loads its launcher, which is not thread-safe. All launchers are extension
# modules of one name, of which Python keeps one: a thread can get the launcher of another's kernel.
_LAUNCHING = threading.RLock()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a Triton kernel on the device of its tensors, one thread at a time."""
    device = next(a.device for a in arguments if isinstance(a, Tensor))
    with _LAUNCHING, torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **options)


def triton_works(device: torch.device) -> bool:
    """Return whether Triton is installed and compiles for this GPU; tested once."""
    with _LAUNCHING:
        return _tried(device)


@cache
def _tried(device: torch.device) -> bool:
    if os.environ.get("MOEMERGE_TRITON") == "0" or find_spec("triton") is None:
        return False
    try:
        from moemerge.kernels.experts import gated

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
