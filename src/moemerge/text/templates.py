"""Render chat templates of checkpoints, which are untrusted programs, in a sandbox with limits.

Jinja's sandbox keeps them from the interpreter, but not from endless loops or huge results. Here
every loop step and call is counted, and the size of every value is checked when it is made and when
it is printed, by `text.template_sizes`. A template sees the same variables as in transformers.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from transformers import PreTrainedTokenizerBase

from moemerge.errors import DataError, TokenizerError, library_errors
from moemerge.text.template_sizes import (
    MOST_CHARACTERS,
    MOST_WIDTH,
    bound,
    check_filter,
    check_format,
    check_method,
    check_operation,
    size_of,
)

MOST_SECONDS: Final = 5.0  # processor time for one row: the machine may be busy
MOST_MADE: Final = 2**29  # characters of all texts that a template makes of one row


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def render_turns(
    turns: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    *,
    add_generation_prompt: bool,
) -> str:
    """Render turns with the tokenizer's chat template."""
    what = f"{where}: the tokenizer's chat template refuses this row"
    hint = "if the row is correct, fix the template: chat_template.jinja of the model"
    with library_errors(TokenizerError, "the tokenizer's chat template cannot be used"):
        source = str(tokenizer.get_chat_template())
        template = _compiled(source)
        names = dict(tokenizer.special_tokens_map)
    with library_errors(DataError, what, hint=hint):
        environment = cast(_Limited, template.environment)
        environment.begin()
        plain = json.loads(json.dumps(list(turns)))  # without methods that a template could call
        values = {"messages": plain, "tools": None, "documents": None}
        pieces = template.generate(
            **{**names, **values, "add_generation_prompt": add_generation_prompt}
        )
        text = environment.joined(pieces)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: the tokenizer's chat template makes half a character (a lone surrogate)",
            hint="remove it from chat_template.jinja or tokenizer_config.json of the model",
        ) from error
    return text


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    return _Limited().from_string(source)


class _Generation(Extension):
    """`{% generation %}` marks an assistant's text and otherwise has no effect."""

    tags = {"generation"}  # noqa: RUF012  # jinja wants it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Limited(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            finalize=_print,
        )
        self.filters = {name: _limited(self, f) for name, f in self.filters.items()}
        self.filters["tojson"] = functools.partial(_to_json, self)
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        self.begin()

    def begin(self) -> None:
        self._end = time.thread_time() + MOST_SECONDS
        self._made = 0

    def tick(self) -> None:
        if time.thread_time() > self._end:
            raise SecurityError(f"it takes more than {MOST_SECONDS:g} seconds")

    def ticking(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of a loop, and count them."""
        for value in values:
            self.tick()
            yield value

    def literal(self, value: Any) -> Any:
        """Return a list, tuple or dict of the template, whose size `call` checks."""
        return value

    def weighed(self, value: Any) -> Any:
        """Return a value that was made or is printed, and count its characters."""
        self.tick()
        size = size_of(value)
        self._made += size if isinstance(value, str) else 0
        bound(self._made, MOST_MADE)
        return value

    def joined(self, pieces: Iterable[str]) -> str:
        """Return the text of pieces, within the limits."""
        kept, size = [], 0
        for piece in pieces:
            self.tick()
            size += len(piece)
            bound(size, MOST_CHARACTERS)
            kept.append(piece)
        return "".join(kept)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Watched().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.tick()
        check_operation(operator, left, right)
        return self.weighed(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(wrapped)
        def call(*args: Any, **kwargs: Any) -> str:
            check_format(str(value.__self__), "{", [*args, kwargs])
            return wrapped(*args, **kwargs)

        return call

    def call(self, context: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        if getattr(call, "__name__", "") == "join" and args:
            args = (list(args[0]), *args[1:])  # an iterator could be read only once
        check_method(call, args)
        return self.weighed(super().call(context, call, *args, **kwargs))


class _Watched(NodeTransformer):
    """Let the environment count and weigh what Jinja does by itself.

    These are loop steps, lists, dicts and plain text; `~` becomes `+` of texts.
    """

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.iter = _of_environment("ticking", node.iter)
        return node

    def visit_List(self, node: Any) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _of_environment("literal", node)

    visit_Dict = visit_List  # noqa: N815

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _of_environment("literal", node) if node.ctx == "load" else node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        return nodes.Const(node.data, lineno=node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        line = node.lineno
        texts: list[nodes.Expr] = [
            nodes.Filter(part, "string", [], [], None, None, lineno=line) for part in node.nodes
        ]
        return functools.reduce(lambda left, right: nodes.Add(left, right, lineno=line), texts)


def _of_environment(name: str, argument: Any) -> nodes.Call:
    """Return a call of the environment's method: the template cannot define another of its name."""
    line = argument.lineno
    method = nodes.EnvironmentAttribute(name, lineno=line)
    return nodes.Call(method, [argument], [], None, None, lineno=line)


@jinja2.pass_context  # so that Jinja computes no constants in advance
def _print(context: Any, value: Any) -> Any:
    return context.environment.weighed(value)


def _limited(environment: _Limited, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that refuses large numbers and large results."""
    first = int(hasattr(function, "jinja_pass_arg"))  # the place of the filtered value

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        environment.tick()
        if function.__name__ == "do_join":
            args = (*args[:first], list(args[first]), *args[first + 1 :])
        check_filter(function.__name__, args[first:], kwargs)
        return environment.weighed(function(*args, **kwargs))

    return call


def _to_json(
    environment: _Limited,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own filter, without HTML escapes."""
    bound(indent or 0, MOST_WIDTH)
    size_of(value)
    bound(size_of(separators), MOST_WIDTH)
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    text: str = environment.weighed(environment.joined(encoder.iterencode(value)))
    return text


def _refuse(message: Any) -> None:
    size_of(message)
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
