"""Check what a command writes against everything that it reads, before it starts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from moemerge.cli.console import STDOUT, is_stream
from moemerge.config.yaml_lines import read_documents
from moemerge.errors import UsageError
from moemerge.runtime import ranks
from moemerge.runtime.outputs import FileKind, check_apart, check_output_file

# Parameters that name files to write. Every other path that a command gets is an input.
_FILES: Final = {
    "out_file": "the output",
    "completions": "--completions",
    "report": "--report",
    "json": "--json",
}
_FOLDERS: Final = ("out_folder", "out")
_YAML: Final = (".yml", ".yaml")
_OF_A_MODEL: Final = ("config.json", "adapter_config.json", "model.safetensors")


def check_paths(values: Mapping[str, Any], *, replaces: bool) -> None:
    """Refuse outputs that are inputs or inside one, and two outputs in one place.

    `values` are the parameters of a command by name. `replaces` is whether its output folder
    appears as a whole and replaces another. The job itself refuses files that it must not replace;
    the report of `--json` has no job, so it is checked here.
    """
    if not ranks.leads():
        return
    outputs: dict[str, Path] = {}
    for name, what in _FILES.items():
        value = values.get(name)
        if isinstance(value, str | Path) and str(value) != STDOUT and not is_stream(Path(value)):
            outputs[what] = Path(value)
    folder = next((Path(values[name]) for name in _FOLDERS if values.get(name)), None)
    if not outputs and (folder is None or (replaces and not os.path.exists(folder))):
        return
    own = {*_FILES, *_FOLDERS}
    inputs = [path for name in values if name not in own for path in _inputs(values[name])]
    places: dict[str, str] = {}
    if folder is not None and not replaces:
        check_apart(folder, inputs)
        places[os.path.realpath(folder / "results.json")] = "the results"
    inside = None if folder is None or not replaces else os.path.realpath(folder)
    for what, path in outputs.items():
        check_apart(path, inputs, what)
        place = os.path.realpath(path)
        if place in places:
            raise UsageError(f"{places[place]} and {what} are both {path}", hint="name two files")
        places[place] = what
        if inside is not None and Path(place).is_relative_to(inside):
            raise UsageError(
                f"{what} {path} is inside the output {folder}", hint="name a file outside of it"
            )
    for path in inputs if inside is not None else ():  # models are compared by the job
        if os.path.isfile(path) and Path(os.path.realpath(path)).is_relative_to(str(inside)):
            raise UsageError(
                f"the input {path} is inside the output {folder}, which replaces all its files",
                hint="copy it elsewhere, or choose another output",
            )
    if "--json" in outputs:
        overwrite = bool(values.get("overwrite"))
        check_output_file(outputs["--json"], FileKind.REPORT, overwrite=overwrite, what="--json")


def _inputs(value: Any) -> Iterator[Path]:
    """Yield the files and model folders that a parameter names, also within a config."""
    for text in _texts(value):
        for path in {Path(text), Path(text.partition("=")[2] or text)}:
            if not _is_input(path):
                continue
            yield path
            if os.path.isfile(path) and path.suffix in _YAML:
                for inner in _texts([document.data for document in read_documents(path)]):
                    # Paths of a study start from its file.
                    yield from filter(_is_input, {Path(inner), path.parent / inner})


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str | Path):
        # A model may have a LoRA adapter: `path+lora`.
        text = str(value).strip()
        yield from filter(None, {text, *text.split("+")})
    elif isinstance(value, Mapping):
        yield from (text for one in value.values() for text in _texts(one))
    elif isinstance(value, list | tuple):
        yield from (text for one in value for text in _texts(one))


def _is_input(path: Path) -> bool:
    """Return whether this is a file or a model folder. Other words may be names of folders, too."""
    return os.path.isfile(path) or any(os.path.exists(path / name) for name in _OF_A_MODEL)
