"""Render chat templates of checkpoints, which are untrusted programs, in a sandbox with limits.

Jinja's sandbox keeps them from the interpreter, but not from endless loops or huge results. Here
every loop step and call is counted, and the size of every large result is checked before it is
made. A template sees the same variables as in transformers.
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

MOST_SECONDS: Final = 5.0  # processor time for one row: the machine may be busy
MOST_CHARACTERS: Final = 2**25  # of one string, and of the whole output
MOST_ITEMS: Final = 10**6  # length of a list that a template makes
MOST_WIDTH: Final = 10**4  # width of padding and indents
_WIDE: Final = ("center", "ljust", "rjust", "zfill", "expandtabs")


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
        text = "".join(environment.weighed(pieces))
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
        )
        self.filters = {name: _limited(self, f) for name, f in self.filters.items()}
        self.filters["tojson"] = _to_json
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _refuse, "strftime_now": _now, "ticking": self.ticking}
        self.begin()

    def begin(self) -> None:
        self._end = time.thread_time() + MOST_SECONDS

    def tick(self) -> None:
        if time.thread_time() > self._end:
            raise SecurityError(f"it takes more than {MOST_SECONDS:g} seconds")

    def ticking(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of a loop, and count them."""
        for value in values:
            self.tick()
            yield value

    def weighed(self, pieces: Iterable[str]) -> Iterator[str]:
        size = 0
        for piece in pieces:
            self.tick()
            size += len(piece)
            _bound(size, MOST_CHARACTERS)
            yield piece

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Watched().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.tick()
        if operator == "**":
            _bound(max(abs(left), abs(right)), MOST_WIDTH)
        elif operator == "*" and (hasattr(left, "__len__") or hasattr(right, "__len__")):
            text, count = (left, right) if hasattr(left, "__len__") else (right, left)
            _bound(len(text) * int(count), MOST_ITEMS)
        elif operator == "+" and isinstance(left, str) and isinstance(right, str):
            _bound(len(left) + len(right), MOST_CHARACTERS)
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(str(value.__self__))
        return wrapped

    def call(self, context: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        _weigh_call(call, args)
        return super().call(context, call, *args, **kwargs)


class _Watched(NodeTransformer):
    """Counts loop steps, and compiles `~` as `+` of texts, which is intercepted."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        line = node.lineno
        node.iter = nodes.Call(
            nodes.Name("ticking", "load", lineno=line), [node.iter], [], None, None, lineno=line
        )
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        line = node.lineno
        texts: list[nodes.Expr] = [
            nodes.Filter(part, "string", [], [], None, None, lineno=line) for part in node.nodes
        ]
        return functools.reduce(lambda left, right: nodes.Add(left, right, lineno=line), texts)


def _limited(environment: _Limited, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that refuses large numbers and large results."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        environment.tick()
        for value in (*args[1:], *kwargs.values()):
            if isinstance(value, int):
                _bound(abs(value), MOST_WIDTH)
        texts = [value for value in args if isinstance(value, str)]
        if function.__name__ == "do_replace" and len(texts) == 3:
            _weigh_replacement(*texts)
        if function.__name__ == "do_format" and texts:
            _check_format(texts[0])
        if function.__name__ in ("sync_do_join", "do_join"):
            context, values, *rest = args
            args = (context, list(values), *rest)
            _bound(sum(len(str(value)) for value in args[1]), MOST_CHARACTERS)
        return function(*args, **kwargs)

    return call


def _weigh_call(call: Any, args: Sequence[Any]) -> None:
    """Check the size of a string method's result."""
    text, name = getattr(call, "__self__", None), getattr(call, "__name__", "")
    if not isinstance(text, str):
        return
    if name in _WIDE:
        _bound(max((value for value in args if isinstance(value, int)), default=0), MOST_WIDTH)
    elif name == "replace" and len(args) >= 2:
        _weigh_replacement(text, str(args[0]), str(args[1]))
    elif name == "join" and args:
        pieces = [len(str(piece)) + len(text) for piece in args[0]]
        _bound(sum(pieces), MOST_CHARACTERS)


def _weigh_replacement(text: str, old: str, new: str) -> None:
    _bound(len(text) + text.count(old) * len(new), MOST_CHARACTERS)


def _check_format(text: str) -> None:
    """Refuse long numbers in a format string, which may be widths."""
    digits = 0
    for character in text:
        digits = digits + 1 if character.isdigit() else 0
        _bound(digits, len(str(MOST_WIDTH)))


def _bound(size: int, most: int) -> None:
    if size > most:
        raise SecurityError("it makes something too large")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own filter, without HTML escapes."""
    _bound(indent or 0, MOST_WIDTH)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
