"""The Typer application: every module of this package that is neither a table nor a helper."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from moemerge import cli
from moemerge.cli import INTERRUPTED, NOTHING_LEFT
from moemerge.cli.console import show_error
from moemerge.cli.flags import app as app
from moemerge.cli.flags import without_types
from moemerge.cli.wording import in_flags
from moemerge.errors import ConfigError, MoeMergeError
from moemerge.runtime import ranks

# The order of commands in --help; others follow in alphabetical order.
FIRST = (
    "demo",
    "merge",
    "diagnose",
    "repairs",
    "evaluate",
    "study",
    "data",
    "inspect",
)
# Commands that share the module of another one.
SHARED = {
    "validate": "merge",
    "run": "merge",
    "calibrate": "repairs",
    "refit": "repairs",
    "distill": "repairs",
    "extract": "convert",
    "extract-lora": "convert",
    "swap-routers": "convert",
    "ls": "inspect",
    "schema": "inspect",
}
HELPERS = ("app", "console", "flags", "paths", "render", "wording")


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
            text = _worded(error)
            spoken_of = own == 0 or isinstance(error, ranks.LostRankError)
            show_error(text if spoken_of else f"rank {own}: {text}")
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            show_error(NOTHING_LEFT)
            raise typer.Exit(INTERRUPTED) from None


def _worded(error: MoeMergeError) -> str:
    """Return the message with flags; problems of a config already name its keys."""
    if not isinstance(error, ConfigError):
        return in_flags(str(error))
    return error.message if error.hint is None else f"{error.message}\n  {in_flags(error.hint)}"


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


def _add_verbs() -> None:
    names = sorted(module.name for module in pkgutil.iter_modules(cli.__path__))
    others = (n for n in names if n not in (*FIRST, *HELPERS) and not n.endswith("_table"))
    verbs = (*FIRST, *others)
    asked = SHARED.get(cli.asked, cli.asked.replace("-", "_"))
    for name in [asked] if asked in verbs else verbs:
        importlib.import_module(f"{cli.__name__}.{name}")


_add_verbs()
