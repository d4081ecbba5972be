"""Run examples/quickstart.ipynb and store what its cells print.

    python docs/notebook.py            run it in a temporary folder, and rewrite its outputs

Code cells run one after the other in a plain namespace, so Jupyter is not needed. The test of the
notebook uses `run_cells` as well.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "quickstart.ipynb"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        notebook = run_cells(NOTEBOOK, Path(folder))
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    NOTEBOOK.write_text(f"{text}\n", encoding="utf-8")


def run_cells(path: Path, folder: Path) -> dict[str, Any]:
    """Run the code cells in `folder`, and return the notebook with their outputs."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    before = Path.cwd()
    os.chdir(folder)
    try:
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for number, cell in enumerate(code, start=1):
            printed = io.StringIO()
            source = compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec")
            with contextlib.redirect_stdout(printed):
                exec(source, namespace)
            cell["execution_count"] = number
            cell["outputs"] = [stream(printed.getvalue())] if printed.getvalue() else []
    finally:
        os.chdir(before)
    return notebook


def stream(text: str) -> dict[str, Any]:
    return {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}


if __name__ == "__main__":
    main()
