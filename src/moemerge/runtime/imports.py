"""transformers without the packages that it imports and we hardly ever use.

Loading a model class loads torch's compiler and its symbolic algebra, distributed tensors, scipy
and scikit-learn: as many seconds again as torch and transformers themselves. Here each of them is a
stand-in while transformers is imported. A stand-in loads the real package when something of it is
used, so nothing is lost: only the time that nobody needed.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from moemerge.runtime.process import is_ours, without_garbage_collection

# What is put off, and what is imported meanwhile: all that a model's own module imports.
PUT_OFF = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "scipy",
    "sklearn",
    "torchvision",
    "accelerate",
)
WANTED = (
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "transformers.modeling_rope_utils",
    "transformers.masking_utils",
    "transformers.processing_utils",
    "transformers.generation",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)

_lock = threading.RLock()
_importing = False


def import_transformers() -> None:
    """Import what models are built from, in a process of our own: what a caller imports in another
    thread meanwhile must not be a stand-in."""
    if not is_ours():
        return
    # A release that does at import what no stand-in can do is imported in full, when it is used.
    not_so = suppress(ImportError, AttributeError, TypeError)
    with not_so, without_garbage_collection(), put_off(PUT_OFF):
        for name in WANTED:
            importlib.import_module(name)


@contextmanager
def put_off(names: Sequence[str]) -> Iterator[None]:
    """Inside, imports of these packages give stand-ins, unless they are there already."""
    global _importing
    left = [name for name in names if name not in sys.modules]
    finder = _Finder(left)
    with _lock:
        sys.meta_path.insert(0, finder)
        _importing = True
        try:
            yield
        finally:
            _importing = False
            sys.meta_path.remove(finder)
            _forget_stand_ins()


def _forget_stand_ins() -> None:
    """From now on an import gives the real module."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, StandIn):
            del sys.modules[name]
            parent, _, child = name.rpartition(".")
            if vars(sys.modules.get(parent, module)).get(child) is module:
                delattr(sys.modules[parent], child)


class StandIn(types.ModuleType):
    """A module that is not loaded yet."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if _importing:
            return Later(self.__name__, name)
        return getattr(importlib.import_module(self.__name__), name)


class Later:
    """Something of a module that is not loaded yet: a class, a function, a decorator."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def _real(self) -> Any:
        value: Any = importlib.import_module(self._module)
        for part in self._name.split("."):
            value = getattr(value, part)
        return value

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not _importing:
            return self._real()(*args, **options)
        # While modules are imported things are called to decorate functions, for a compiler that
        # is never asked here.
        if len(args) == 1 and callable(args[0]) and not options:
            return args[0]
        return _unchanged

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if _importing:
            return Later(self._module, f"{self._name}.{name}")
        return getattr(self._real(), name)

    def __instancecheck__(self, instance: Any) -> bool:
        # Nothing is an instance of a class that was never loaded.
        return self._module in sys.modules and isinstance(instance, self._real())

    def __subclasscheck__(self, subclass: type) -> bool:
        return self._module in sys.modules and issubclass(subclass, self._real())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        raise ImportError(f"{self._module}.{self._name} is needed as a base class")

    def __or__(self, other: Any) -> Any:  # in annotations
        return Any

    __ror__ = __or__

    def __getitem__(self, item: Any) -> Any:
        return Any


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for packages that are installed, and their modules."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._folders: dict[str, list[Path]] = {}

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in self._names:
            real = importlib.machinery.PathFinder.find_spec(name, path)
            if real is None or real.submodule_search_locations is None:
                return None
            self._folders[name] = [Path(folder) for folder in real.submodule_search_locations]
        elif (parent := name.rpartition(".")[0]) in self._folders:
            child = name.rpartition(".")[2]
            folders = [folder / child for folder in self._folders[parent]]
            if not any(_is_module(folder) for folder in folders):
                return None
            self._folders[name] = folders
        else:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return


def _is_module(path: Path) -> bool:
    return path.is_dir() or any(path.parent.glob(f"{path.name}.*"))
