"""The Typer application and its commands, by the modules that declare them."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from moemerge.cli import INTERRUPTED, NOTHING_LEFT
from moemerge.cli.console import in_flags, show_error
from moemerge.cli.flags import app as app
from moemerge.cli.flags import without_types
from moemerge.errors import ConfigError, MoeMergeError
from moemerge.runtime import ranks

# The commands of each module, in the order of --help.
MODULES = {
    "demo": "demo",
    "merge": "merge validate run",
    "diagnose": "diagnose",
    "repairs": "calibrate refit distill prune",
    "evaluate": "evaluate",
    "study": "study",
    "data": "data",
    "inspect": "inspect ls schema",
    "convert": "compose convert swap-routers extract extract-lora",
    "statistics": "stats coefficients",
    "tune": "tune",
}


class Verbs(TyperGroup):
    """Print each of our errors as one message and exit with its code."""

    def get_params(self, ctx: Any) -> list[Any]:
        return without_types(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        own = 0
        try:
            own = ranks.rank()
            return super().invoke(ctx)
        except MoeMergeError as error:
            text = str(error) if isinstance(error, ConfigError) else in_flags(str(error))
            speaks = own == 0 or isinstance(error, ranks.LostRankError)
            show_error(text if speaks else f"rank {own}: {text}")
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            show_error(NOTHING_LEFT)
            raise typer.Exit(INTERRUPTED) from None


def _version(ctx: typer.Context, value: bool) -> None:
    if not value:
        return
    from moemerge import __version__

    typer.echo(f"moemerge {__version__}")
    if ctx.params.get("verbose"):
        typer.echo("\n".join(_environment()))
    raise typer.Exit


def _environment() -> list[str]:
    """Return what a bug report needs: versions, system, GPUs."""
    import platform
    from importlib import metadata

    import torch

    from moemerge.runtime.devices import gpu_names

    lines = [f"python {platform.python_version()}", f"system {platform.platform()}"]
    for package in ("torch", "transformers", "safetensors", "huggingface_hub", "pydantic", "typer"):
        lines.append(f"{package} {metadata.version(package)}")
    lines.append(f"threads {torch.get_num_threads()}")
    return [*lines, *(f"gpu {name}" for name in gpu_names())]


@app.callback(
    cls=Verbs, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]}
)
def moemerge(
    verbose: Annotated[
        bool,
        typer.Option("-v", is_eager=True, help="With --version: print what a bug report needs."),
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, help="Print the version.")
    ] = False,
) -> None:
    """Merge Mixture-of-Experts models and repair what merging breaks."""


# Only the module of the requested command is imported, which keeps `ls` and `inspect` quick.
_requested = [m for m, verbs in MODULES.items() if {*sys.argv[1:2]} & {*verbs.split()}]
for _module in _requested or MODULES:
    importlib.import_module(f"moemerge.cli.{_module}")
