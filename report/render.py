"""Rendering: pages from the templates beside this module, in one style, everything escaped."""

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from antiphon.core.reporting.figures import seconds, share
from antiphon.core.reporting.plain_text import plain
from antiphon.report.charts import PALETTE


def render(template: str, **values: object) -> Markup:
    """Return a template filled in; values are escaped unless they are Markup already."""
    light = ";".join(f"--{name}:{colour}" for name, colour in PALETTE.items())
    return Markup(_environment().get_template(template).render(light=light, **values))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"plain": plain, "seconds": seconds, "share": share}
    environment.filters["times"] = lambda count: "once" if count == 1 else f"{count} times"
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
    return environment
