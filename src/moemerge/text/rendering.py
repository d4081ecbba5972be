"""Render chat templates: the program that `text.templates` runs in a process of its own.

Each line of stdin is a request, each line of stdout an answer. Templates are untrusted programs.
Jinja's sandbox keeps them from the interpreter; the limits of this process end what grows or runs
for too long.
"""

from __future__ import annotations

import functools
import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_BYTES: Final = 2**30  # of this process's address space
MOST_CHARACTERS: Final = 2**25  # of one rendered row
TOO_LARGE: Final = "it makes something too large"


class _Generation(Extension):
    """`{% generation %}` marks an assistant's text and otherwise has no effect."""

    tags = {"generation"}  # noqa: RUF012  # jinja wants it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    """Return the template, in an environment like that of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own filter, without HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: Any) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _rendered(request: dict[str, Any]) -> dict[str, str]:
    """Return the text, or why there is none."""
    try:
        text = _compiled(request["source"]).render(**request["values"])
    except TemplateSyntaxError as error:
        return {"broken": _described(error)}
    except MemoryError:
        return {"refused": TOO_LARGE}
    except Exception as error:  # whatever an untrusted program raises
        return {"refused": _described(error)}
    return {"refused": TOO_LARGE} if len(text) > MOST_CHARACTERS else {"text": text}


def _described(error: Exception) -> str:
    line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {line[:200]}"


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [MOST_BYTES] if hard == resource.RLIM_INFINITY else [MOST_BYTES, hard]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    for line in sys.stdin:
        request = json.loads(line)
        # The signal ends this process, also inside a long operation of the interpreter.
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        answer = json.dumps(_rendered(request))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
