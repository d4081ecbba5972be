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
_CONFIGS: Final = ("config", "file")  # parameters whose YAML file names further inputs
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
    for name, what in _FILES.items():
        _refuse_named_pipe(values.get(name), what)
    outputs = {what: Path(values[name]) for name, what in _FILES.items() if _is_file(values, name)}
    folder = next((Path(values[name]) for name in _FOLDERS if values.get(name)), None)
    if not outputs and (folder is None or (replaces and not os.path.exists(folder))):
        return
    own = {*_FILES, *_FOLDERS}
    inputs = [path for name in values if name not in own for path in _inputs(name, values[name])]
    places: dict[str, str] = {}
    if folder is not None and not replaces:
        check_apart(folder, inputs)
        places[os.path.realpath(folder / "results.json")] = "the results"
    for what, path in outputs.items():
        check_apart(path, inputs, what)
        place = os.path.realpath(path)
        if place in places:
            raise UsageError(f"{places[place]} and {what} are both {path}", hint="name two files")
        places[place] = what
        if replaces and folder is not None and Path(place).is_relative_to(os.path.realpath(folder)):
            raise UsageError(
                f"{what} {path} is inside the output {folder}", hint="name a file outside of it"
            )
    if replaces and folder is not None:
        _check_outside(folder, inputs)
    if "--json" in outputs:
        overwrite = bool(values.get("overwrite"))
        check_output_file(outputs["--json"], FileKind.REPORT, overwrite=overwrite, what="--json")


def _refuse_named_pipe(value: object, what: str) -> None:
    """Refuse a named pipe: without a reader, the finished job would wait forever."""
    path = Path(value) if isinstance(value, str | Path) else Path()
    opened = path.absolute().parent in (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))
    # With a name that is too long, `Path.is_fifo` raises.
    if not opened and os.path.exists(path) and path.is_fifo():
        raise UsageError(f"{what} {path} is a named pipe", hint="name a file")


def _is_file(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name)
    return isinstance(value, str | Path) and str(value) != STDOUT and not is_stream(Path(value))


def _check_outside(folder: Path, inputs: list[Path]) -> None:
    """Refuse an output folder with an input file in it. Models are compared by the job."""
    for path in inputs:
        place = Path(os.path.realpath(path))
        if os.path.isfile(path) and place.is_relative_to(os.path.realpath(folder)):
            raise UsageError(
                f"the input {path} is inside the output {folder}, which replaces all its files",
                hint="copy it elsewhere, or choose another output",
            )


def _inputs(name: str, value: Any) -> Iterator[Path]:
    """Yield the files and model folders that a parameter names, also within a config."""
    for text in _texts(value):
        for path in {Path(text), Path(text.partition("=")[2] or text)}:
            if not _is_input(path):
                continue
            yield path
            if os.path.isfile(path) and (name in _CONFIGS or path.suffix in _YAML):
                documents = read_documents(path)
                for inner in _texts([document.data for document in documents]):
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
