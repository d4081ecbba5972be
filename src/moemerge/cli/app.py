"""The verbs, put together."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from moemerge.cli import (
    INTERRUPTED,
    NOTHING_LEFT,
    calibrate,
    demo,
    diagnose,
    inspect,
    ls,
    merge,
    stats,
    swap_routers,
    testbed,
)
from moemerge.cli.console import show_error
from moemerge.cli.flags import without_types
from moemerge.errors import MoeMergeError


class Verbs(TyperGroup):
    """Turns every error of ours into one message and its exit code."""

    def get_params(self, ctx: Any) -> list[Any]:
        return without_types(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MoeMergeError as error:
            show_error(str(error))
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            show_error(NOTHING_LEFT)
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Merge Mixture-of-Experts models and repair the routers that merging breaks.",
)


def _version(value: bool) -> None:
    if value:
        from moemerge import __version__

        typer.echo(f"moemerge {__version__}")
        raise typer.Exit


@app.callback()
def moemerge(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Merge Mixture-of-Experts models and repair the routers that merging breaks."""


merge.add_to(app)
calibrate.add_to(app)
diagnose.add_to(app)
swap_routers.add_to(app)
stats.add_to(app)
inspect.add_to(app)
ls.add_to(app)
demo.add_to(app)
testbed.add_to(app)
