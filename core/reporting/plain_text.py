"""Plain text: what others wrote, made harmless for a terminal, a log line or a page.

Models, scorers, other programs and people elsewhere may write any character. Some of them are orders to a
terminal (set its title, fill the clipboard, go back over the line), some end a line early, and some turn
the order of what follows around. Each of these is shown as its number; all else stays as it is.
"""

import re

_ORDERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, what ends lines or turns their direction, and halves of a character."""


def plain(text: str, keep: str = "") -> str:
    r"""Return `text` with every character that is an order written as its number.

    Args:
        text: what somebody else wrote.
        keep: orders that stay, such as line ends where a text may have several lines.

    >>> print(plain("red \x1b[31m, a clipboard \x1b]52;c;eA==\x07 and one\nline"))
    red \x1b[31m, a clipboard \x1b]52;c;eA==\x07 and one\x0aline
    >>> plain("two\nlines", keep="\n") == "two\nlines"
    True
    """

    def number(found: re.Match[str]) -> str:
        character, code = found[0], ord(found[0])
        if character in keep:
            return character
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"

    return _ORDERS.sub(number, text)
