"""torch and numpy, imported at the first use of one of their attributes.

Modules that plan from headers import them from here, so that `ls`, `inspect`, `validate` and config
errors do not wait for them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch as torch

    __all__ = ["np", "torch"]
else:

    class _Lazy:
        def __init__(self, module: str) -> None:
            self._module = module

        def __getattr__(self, name: str) -> Any:
            value = getattr(importlib.import_module(self._module), name)
            setattr(self, name, value)  # cached
            return value

    np = _Lazy("numpy")
    torch = _Lazy("torch")
