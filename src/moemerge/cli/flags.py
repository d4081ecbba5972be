"""Command-line flags: those that several commands share, and those made from settings classes.

A command is a function; the type of a parameter determines its flags:
- a settings class: one flag per field, with the field's description as help;
- a dataclass: the flags of its fields;
- a dict: one flag, NAME=VALUE, that may be repeated.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
from rich.markup import escape
from typer.core import TyperCommand
from typer.models import OptionInfo

from moemerge.cli.console import STDOUT, Bar, deliver_json, err, in_flags, out, progress
from moemerge.cli.paths import check_paths
from moemerge.config.faults import parse_settings
from moemerge.config.fields import Strict
from moemerge.errors import UsageError
from moemerge.runtime import ranks

app = typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False)
Function = TypeVar("Function", bound=Callable[..., None])
ADVANCED = "Advanced"  # the heading of flags that are rarely needed
FEW = 14  # a command with at most this many flags lists all of them together

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A merge config (YAML).")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; appears whole or not.")]
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder, or a hub id org/name@rev.")
]
Sources = Annotated[
    dict[str, str],
    typer.Option("--source", metavar="NAME=MODEL", help="A model that was merged. Repeat it."),
]
Texts = Annotated[
    dict[str, list[str]],
    typer.Option(
        "--data",
        metavar="NAME=FILE",
        help="Text of that source (.jsonl, .jsonl.gz, .parquet). Repeat it.",
    ),
]
Checks = Annotated[
    dict[str, list[str]] | None,
    typer.Option(
        "--check",
        metavar="NAME=FILE",
        help="Text that is only measured, best of source NAME and unseen by it. Repeat it.",
    ),
]
Weights = Annotated[
    dict[str, float] | None,
    typer.Option(
        "--weight", metavar="NAME=X", help="How much that source counts (default: 1). Repeat it."
    ),
]
Experts = Annotated[
    dict[str, str] | None,
    typer.Option(
        "--experts",
        metavar="NAME=FILE",
        help="JSON file with the kept experts of that source, if it has more. Repeat it.",
        rich_help_panel=ADVANCED,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Quiet = Annotated[
    bool,
    typer.Option("-q", "--quiet", help="Print nothing but errors.", rich_help_panel=ADVANCED),
]
Page = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="Write an HTML page of the routing there."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace outputs that exist.")]


def _load(files: list[Path] | None) -> list[Path] | None:
    """Load plugins before anything else is read: a config may name what they add."""
    if files:
        from moemerge import api

        for file in files:
            api.load_plugin(file)
    return files


Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="FILE.py",
        help="Import a method, family or check of yours. Repeat it.",
        is_eager=True,
        callback=_load,
        rich_help_panel=ADVANCED,
    ),
]
Device = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")
]


def _log(verbosity: int) -> int:
    """Send the log to stderr, with times. Logging is configured only here."""
    logger = logging.getLogger("moemerge")
    logger.handlers.clear()
    if verbosity:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO if verbosity == 1 else logging.DEBUG)
    return verbosity


@dataclass(frozen=True)
class Reporting:
    """Flags of every command that runs a job: what it prints and logs, and where it reports."""

    json: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write the report there; - is stdout.",
            rich_help_panel=ADVANCED,
        ),
    ] = None
    overwrite: Overwrite = False
    quiet: Quiet = False
    verbosity: Annotated[
        int,
        typer.Option(
            "-v",
            "--verbose",
            count=True,
            help="Say more, and log what is opened and planned; -vv also every read and solve.",
            callback=_log,
            show_default=False,
            rich_help_panel=ADVANCED,
        ),
    ] = 0

    @property
    def verbose(self) -> bool:
        return self.verbosity > 0

    def progress(self) -> AbstractContextManager[Bar]:
        return progress(quiet=self.quiet)

    def show(
        self,
        document: Mapping[str, Any],
        *tables: Any,
        notices: Iterable[str] = (),
        page: Path | None = None,
    ) -> None:
        """Write the report as JSON if requested. Unless quiet, print notices and the page's path to
        stderr, and tables to stdout if the JSON is not written there."""
        if not ranks.leads():
            return
        if self.json is not None:
            deliver_json(document, self.json)
        if self.quiet:
            return
        for notice in notices:
            err.print(f"[yellow]note:[/] {escape(in_flags(notice))}", soft_wrap=True)
        if self.json != STDOUT:
            for table in tables:
                out.print(table)
        if page is not None:
            err.print(f"page: {page}", markup=False, soft_wrap=True)


# Flags of mergekit for commands that take a merge config: ours, or None and a remark.
MERGEKIT: Mapping[str, tuple[str | None, str]] = {
    "--cuda": ("--device=cuda", ""),
    "--no-cuda": ("--device=cpu", ""),
    "--copy-tokenizer": (None, "the tokenizer is always copied"),
    "--lazy-unpickle": (None, "tensors are always read one by one"),
    "--low-cpu-memory": (None, "--memory bounds the memory"),
    "--read-to-gpu": (None, "--device cuda decides"),
    "--multi-gpu": (None, "torchrun uses several GPUs"),
    "--trust-remote-code": (None, "no code of a checkpoint is ever run"),
    "--allow-crimes": (None, "models of different families are never merged"),
    "--write-model-card": (None, "a model card is always written"),
}


def translated(words: list[str]) -> list[str]:
    """Return a command line with our flags in place of mergekit's."""
    result = []
    for word in words:
        ours, remark = MERGEKIT.get(word, (word, ""))
        if ours is not None:
            result.append(ours)
        if remark:
            err.print(f"note: {word} is ignored: {remark}", markup=False, soft_wrap=True)
        elif ours != word:
            err.print(f"note: {word} is mergekit's: {ours} here", markup=False, soft_wrap=True)
    return result


class Verb(TyperCommand):
    """A command whose help ends with examples that can be copied."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if any(parameter.name == "config" for parameter in self.params):
            args = translated(args)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        examples, self.epilog = self.epilog, None
        super().format_help(ctx, formatter)
        self.epilog = examples
        if examples:
            out.print(f"Examples:\n\n{examples.strip(chr(10))}\n", markup=False, soft_wrap=True)

    def get_params(self, ctx: Any) -> list[Any]:
        return without_types(super().get_params(ctx))


def without_types(parameters: list[Any]) -> list[Any]:
    """Switches take no value, so help should show none."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) or getattr(parameter, "count", False):
            parameter.metavar = ""
    return parameters


def verb(
    examples: str,
    name: str | None = None,
    *,
    several: bool = False,
    settings: Mapping[str, type[Strict]] | None = None,
    of: typer.Typer = app,
) -> Callable[[Function], Function]:
    """Make a function a command; `several` processes may share it (torchrun).

    `settings` are classes whose instances the function takes as keywords of these names.
    """

    def declare(function: Function) -> Function:
        called = name or function.__name__
        command = with_flags(function, settings or {}, None if several else called)
        of.command(called, epilog=examples, cls=Verb)(command)
        return function

    return declare


def with_flags(
    function: Callable[..., None], settings: Mapping[str, type[Strict]], alone: str | None
) -> Callable[..., None]:
    """Return `function` as typer reads it: one parameter for each flag.

    `alone` is the name of a command that one process runs.
    """
    kind = inspect.Parameter.KEYWORD_ONLY
    declared = [
        parameter
        for parameter in inspect.signature(function, eval_str=True).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    declared += [inspect.Parameter(n, kind, annotation=form) for n, form in settings.items()]
    flags: dict[str, inspect.Parameter] = {}
    for parameter in declared:
        form, made = parameter.annotation, [parameter]
        if _is_settings(form):
            made = setting_flags(form)
        elif dataclasses.is_dataclass(form):
            made = list(inspect.signature(form, eval_str=True).parameters.values())  # type: ignore[arg-type]
        elif (pairs := _pairs(form)) is not None:
            texts: Any = list[str] | None if parameter.default is None else list[str]
            made = [parameter.replace(annotation=Annotated[texts, pairs[1]])]
        for flag in made:
            # The first declaration counts: two settings classes may share a flag.
            flags.setdefault(flag.name, flag.replace(kind=kind))
    # A plugin is loaded while flags are read, so no function has this parameter.
    flags["plugin"] = inspect.Parameter("plugin", kind, default=None, annotation=Plugins)
    options = [part for f in flags.values() for part in get_args(f.annotation)[1:]]
    if sum(isinstance(part, OptionInfo) for part in options) <= FEW:
        flags = {name: _without_panel(flag) for name, flag in flags.items()}
    replaces = any(parameter.annotation == Out for parameter in declared)

    def command(**values: Any) -> None:
        if alone is not None:
            ranks.alone(alone)
        check_paths(values, replaces=replaces)
        arguments: dict[str, Any] = {}
        for parameter in declared:
            form, name = parameter.annotation, parameter.name
            if _is_settings(form):
                arguments[name] = _settings(form, values)
            elif dataclasses.is_dataclass(form):
                fields = dataclasses.fields(form)
                arguments[name] = form(**{field.name: values[field.name] for field in fields})  # type: ignore[operator]
            elif (pairs := _pairs(form)) is not None:
                option = pairs[1].default
                flag = f"--{name.replace('_', '-')}" if option is ... else option
                arguments[name] = named(flag, values[name] or (), get_args(pairs[0])[1])
            else:
                arguments[name] = values[name]
        function(**arguments)

    command.__doc__ = function.__doc__
    command.__name__ = function.__name__
    command.__annotations__ = {flag.name: flag.annotation for flag in flags.values()}
    command.__signature__ = inspect.Signature(list(flags.values()))  # type: ignore[attr-defined]
    return command


def _is_settings(form: Any) -> bool:
    return inspect.isclass(form) and issubclass(form, Strict)


def _pairs(form: Any) -> tuple[Any, Any] | None:
    """Return the dict and the option of a parameter that takes NAME=VALUE; None for others."""
    if get_origin(form) is not Annotated:
        return None
    kind, option = get_args(form)[:2]
    found = [one for one in (kind, *get_args(kind)) if get_origin(one) is dict]
    return (found[0], option) if found else None


def _without_panel(flag: inspect.Parameter) -> inspect.Parameter:
    """Return the flag under the one heading of a command with few flags."""
    kind, *parts = get_args(flag.annotation)
    parts = [copy.copy(part) for part in parts]  # commands share them
    for part in parts:
        part.rich_help_panel = None
    return flag.replace(annotation=Annotated[kind, *parts])


def setting_flags(model: type[Strict]) -> list[inspect.Parameter]:
    """Return a flag for each field of a settings class, its own before those that jobs share.

    The value None means that a flag was not given.
    """
    common = {name for base in model.__mro__ for name in getattr(base, "common", "").split()}
    flags = []
    for name in sorted(model.model_fields, key=lambda name: name not in model.__annotations__):
        info = model.model_fields[name]
        default = info.get_default(call_default_factory=True)
        forms = _forms(info.annotation)
        choices = [
            str(word) for form in forms if get_origin(form) is Literal for word in get_args(form)
        ]
        plain = {get_origin(form) or form for form in forms}
        numbers = bool(plain & {int, float})
        words, more = f"--{name.replace('_', '-')}", dict[str, Any]()
        kind: Any = next((one for one in (bool, int, float) if plain == {one}), str)
        if kind is bool:
            words += f"/--no-{words[2:]}" if default is not False else ""
        elif kind is not str:
            more["metavar"] = "N" if kind is int else "X"
        elif numbers:
            more["metavar"], more["parser"] = "|".join(["X", *choices]), _number_or_word
        elif choices and not plain & {dict}:
            more["metavar"] = "WORD"
        else:
            more["metavar"] = "FILE" if Path in plain else name.rpartition("_")[2].upper()
        if choices:
            more["autocompletion"] = choices.copy  # a function that returns them
        help_text = _help(info.description or "", choices, default, numbers=numbers)
        panel = None if name in common else ADVANCED
        option = typer.Option(
            words, help=help_text, show_default=False, rich_help_panel=panel, **more
        )
        form: Any = list[kind] if tuple in plain else kind
        annotation: Any = Annotated[form | None, option]
        flags.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
            )
        )
    return flags


def _forms(annotation: Any) -> list[Any]:
    """Return the alternatives of a type, without None and `Annotated`."""
    if annotation is type(None):
        return []
    if get_origin(annotation) is Annotated:
        return _forms(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [form for part in get_args(annotation) for form in _forms(part)]
    return [annotation]


def _number_or_word(text: str) -> int | float | str:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _help(text: str, choices: list[str], default: Any, *, numbers: bool) -> str:
    """`Router the solver starts from: merged, average or zero (default: merged).`"""
    words = text[:1].upper() + text[1:]
    if choices and not all(choice in words for choice in choices):
        *first, last = (*choices, *(["a number"] if numbers else []))
        words += f": {', '.join(first)} or {last}"
    # The description explains a default of None.
    if default is None or default is False or default in ("", (), {}):
        return f"{words}."
    shown = "on" if default is True else default
    if isinstance(default, tuple):
        shown = ", ".join(map(str, default))
    if f"({shown}: " in words:  # the description explains the default
        return words.replace(f"({shown}: ", f"(default: {shown}, ") + "."
    return f"{words} (default: {shown})."


def _settings(model: type[Strict], values: Mapping[str, Any]) -> Strict:
    given = {n: values[n] for n in model.model_fields if values[n] not in (None, ())}
    return parse_settings(model, given, "command line", lambda name: f"--{name.replace('_', '-')}")


def given(settings: Strict) -> Any:
    """The settings that flags were given for, by name, in the fields' order."""
    names = (n for n in type(settings).model_fields if n in settings.model_fields_set)
    values = ((name, getattr(settings, name)) for name in names)
    return {name: value for name, value in values if value is not None}


def named(flag: str, given: Iterable[str], form: Any) -> dict[str, Any]:
    """Return NAME=VALUE texts by name: the text, a number, or a list of texts, as `form` states."""
    result: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise UsageError(f"{flag} {text}: expected NAME=VALUE", hint=f"{flag} math=PATH")
        if form not in (str, float):
            result.setdefault(name, []).append(value)
            continue
        if name in result:
            raise UsageError(f"{flag}: {name!r} is given twice", hint="a source has one model")
        try:
            result[name] = form(value)
        except ValueError:
            raise UsageError(f"{flag} {text}: expected a number", hint=f"{flag} {name}=2") from None
    return result
