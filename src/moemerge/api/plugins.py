"""A file of the user's that adds to what there is: methods, families, checks of answers."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path

from moemerge.errors import UsageError

_ADVICE = "a plugin is a Python file that registers something when it is imported: see docs/methods"


def load_plugin(path: str | Path) -> None:
    """Import the file `path` under its own name, once; what it registers can be used from then on.

    Its functions serve as checks, too: those of `judge.py` as `verify="judge:FUNCTION"`.
    """
    file = Path(path)
    if not file.is_file() or file.suffix != ".py":
        what = "is no Python file (.py)" if file.exists() else "does not exist"
        raise UsageError(f"the plugin {path} {what}", hint=_ADVICE)
    name = file.stem
    origin = _origin(name)
    if origin is not None and not (Path(origin).exists() and file.samefile(origin)):
        raise UsageError(
            f"the plugin {path} has the name of another module, {name!r}", hint="rename the file"
        )
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None  # for a name that ends with .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look themselves up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's file does when it is imported
        del sys.modules[name]
        raise UsageError(
            f"the plugin {path} cannot be imported: {_line(error, file)}"
            f"{type(error).__name__}: {error}",
            hint=_ADVICE,
        ) from error


def _origin(name: str) -> str | None:
    """Where the module of this name lies, whether it is imported yet or not."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__file__", None) or "built-in"
    spec = importlib.util.find_spec(name)
    return None if spec is None else spec.origin or "built-in"


def _line(error: BaseException, file: Path) -> str:
    """Where in the file it went wrong, if it did there."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == file]
    return f"line {lines[-1]}: " if lines else ""
