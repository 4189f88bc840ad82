"""Tracking figures: the report's figures as files that can be looked at on their own.

They are taken from the finished page, so nothing is drawn twice; the page's light palette and
a white ground come with them.
"""

import re

from antiphon.lineage.report.style import STYLE

_FIGURE = re.compile(r"<svg\b[^>]*>.*?</svg>", re.DOTALL)
_NAME = re.compile(r'\bid="([a-z-]+)-figure_1"')
_PALETTE = re.compile(r":root\{([^}]*)\}")


def plot_files(page: str) -> dict[str, str]:
    """Return each figure of a report page, as file name -> SVG.

    >>> page = '<p>x</p><svg role="img"><g id="learning-figure_1"></g></svg>'
    >>> list(plot_files(page))
    ['learning.svg']
    """
    palette = _PALETTE.search(STYLE)
    variables = palette.group(1).replace("color-scheme:light dark", "") if palette else ""
    ground = f"<style>svg{{{variables}background:#fff}}</style>"
    files = {}
    for found in _FIGURE.finditer(page):
        text, name = found.group(), _NAME.search(found.group())
        if name is not None:
            head, bracket, rest = text.partition(">")
            if "xmlns=" not in head:
                head += ' xmlns="http://www.w3.org/2000/svg"'
            files[f"{name.group(1)}.svg"] = head + bracket + ground + rest + "\n"
    return files
