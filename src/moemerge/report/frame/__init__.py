"""What all pages share: head, bar, colours, light and dark. A page's template extends frame.html,
and its style and script follow the frame's. A page is one file, and loads nothing from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup


def render_in_frame(
    package: str,
    name: str,
    *,
    title: str,
    top: str,
    version: str,
    filters: Mapping[str, Callable[..., object]],
    **values: Any,
) -> str:
    """`name`.html of a package filled in, with its .css and .js where it has them.

    `top` is what the page begins with, in a word.
    """

    def text(of: str, file: str) -> str:
        return files(of).joinpath(file).read_text("utf-8")

    def own(kind: str) -> str:
        return text(package, name + kind) if files(package).joinpath(name + kind).is_file() else ""

    # Autoescape on, whatever the template's name: every label comes from somebody's file.
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(lambda file: text(__package__, file)),
    )
    environment.filters |= filters
    return environment.from_string(text(package, f"{name}.html")).render(
        title=title,
        top=top,
        version=version,
        # Our own files; nothing that is shown is in them.
        style=Markup(text(__package__, "frame.css") + own(".css")),
        script=Markup(text(__package__, "frame.js") + own(".js")),
        **values,
    )
