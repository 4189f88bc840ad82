"""Rendering: pages from the templates beside this module, in one style, everything escaped."""

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from antiphon.core.reporting.plain_text import plain

LIGHT = (
    "--ink:#1d2329;--muted:#5d6873;--grid:#e3e7eb;--paper:#fff;--page:#f6f7f8;--blue:#2f6db3;"
    "--orange:#d9822b;--green:#3d8f6a;--violet:#7a62b8;--red:#c23b3b"
)
"""Light palette as CSS; the dark one stands in `templates/style.css`."""


def render(template: str, **values: object) -> Markup:
    """Return a template filled in; values are escaped unless they are Markup already."""
    return Markup(_environment().get_template(template).render(light=LIGHT, **values))


def standalone(svg: str) -> str:
    """Return a plot of a page as a file of its own: light palette, white ground.

    >>> standalone('<svg role="img"><path/></svg>')[:60]
    '<svg role="img" xmlns="http://www.w3.org/2000/svg"><style>sv'
    """
    head, _, rest = svg.partition(">")
    if "xmlns=" not in head:
        head += ' xmlns="http://www.w3.org/2000/svg"'
    return f"{head}><style>svg{{{LIGHT};background:#fff;font-family:sans-serif}}</style>{rest}\n"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["plain"] = plain
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
    return environment
