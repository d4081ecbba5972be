"""The frame of all pages: head, bar, colours, light and dark theme. A page's template extends
frame.html, and its style and script follow the frame's. A page is one file and loads nothing.
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
    """Render `name`.html of a package with its .css and .js, if it has them.

    `top` names the start of the page.
    """

    def text(of: str, file: str) -> str:
        return files(of).joinpath(file).read_text("utf-8")

    def own(kind: str) -> str:
        return text(package, name + kind) if files(package).joinpath(name + kind).is_file() else ""

    # Autoescape always: labels come from untrusted files.
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
        # Our own files, which contain no data.
        style=Markup(text(__package__, "frame.css") + own(".css")),
        script=Markup(text(__package__, "frame.js") + own(".js")),
        **values,
    )
