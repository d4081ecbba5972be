"""Tables, figure and notebook of the documents are those that docs/generate.py and a run make."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def script(name: str) -> ModuleType:
    """Import a script of docs/."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_generated_tables_and_figure_are_up_to_date() -> None:
    changed = script("generate").outdated()
    assert [path.relative_to(ROOT).as_posix() for path in changed] == []


def test_the_notebook_runs(tmp_path: Path) -> None:
    path = ROOT / "examples" / "quickstart.ipynb"
    assert path.stat().st_size < 200_000
    text = path.read_text(encoding="utf-8")
    for rows, fewer in {"0, 64": "0, 12", "0, 32": "0, 6", "900, 1000": "900, 906"}.items():
        assert text.count(rows) == 1
        text = text.replace(rows, fewer)
    short = tmp_path / path.name
    short.write_text(text, encoding="utf-8")
    notebook = script("notebook").run_cells(short, tmp_path)
    last = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"][-1]
    printed = "".join(last["outputs"][0]["text"])
    assert all(name in printed for name in ("model", "calibrated", "refitted"))
    assert (tmp_path / "refitted" / "model.safetensors").exists()
