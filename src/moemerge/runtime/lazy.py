"""torch and numpy, imported when something of them is first used.

Rooms that plan from headers take them from here: `ls`, `inspect`, `validate` and a config that is
refused must not wait for them.
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
            setattr(self, name, value)  # found without this detour from now on
            return value

    np = _Lazy("numpy")
    torch = _Lazy("torch")
