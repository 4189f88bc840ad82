"""A terminal that a command writes to, and what a person sees on it after each piece of output."""

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from antiphon.benchmarks.parts.measure import DEFAULT_SIGNALS

_ESCAPE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\x1b[\]P][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[^\[\]P]")


class Screen:
    """The lines of a terminal so wide, with those that scrolled away; knows what Rich writes."""

    def __init__(self, columns: int = 100) -> None:
        self.columns = columns
        self.lines: list[list[str]] = [[]]
        self.row = self.column = 0
        self.cursor_shown = True
        self._rest = ""

    def feed(self, text: str) -> None:
        """Take output; an escape sequence may be cut between two calls."""
        text, at = self._rest + text, 0
        self._rest = ""
        while at < len(text):
            if text[at] != "\x1b":
                self._put(text[at])
                at += 1
            elif match := _ESCAPE.match(text, at):
                self._obey(match[1] or "", match[2] or "")
                at = match.end()
            else:
                self._rest = text[at:]
                return

    def shown(self) -> list[str]:
        """Return the lines as they stand now."""
        return ["".join(line).rstrip() for line in self.lines]

    def _put(self, sign: str) -> None:
        if sign == "\r":
            self.column = 0
        elif sign == "\n":
            self.row += 1
            self.column = 0  # a terminal's driver writes both
        elif sign >= " ":
            if self.column >= self.columns:
                self.row, self.column = self.row + 1, 0
            while len(self.lines) <= self.row:
                self.lines.append([])
            line = self.lines[self.row]
            line.extend(" " * (self.column + 1 - len(line)))
            line[self.column] = sign
            self.column += 1
        while len(self.lines) <= self.row:
            self.lines.append([])

    def _obey(self, given: str, order: str) -> None:
        number = int(given) if given.isdigit() else 1
        if order == "A":
            self.row = max(0, self.row - number)
        elif order == "B":
            self.row += number
        elif order == "K":
            kept = self.lines[self.row]
            self.lines[self.row] = [] if given == "2" else kept[: self.column]
        elif order in "hl" and given == "?25":
            self.cursor_shown = order == "h"
        elif order not in "m" and order:
            raise AssertionError(f"the screen does not know the order {given}{order}")


class Terminal:
    """One command on a terminal of its own."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, columns: int = 100
    ) -> None:
        """Start it; its screen is `columns` wide and 60 lines high."""
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 60, columns, 0, 0))
        self.screen = Screen(columns)
        self.output = ""
        self._master = master
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.process = subprocess.Popen(
            [*DEFAULT_SIGNALS, *arguments],
            cwd=folder,
            env={**_without_size(environment), "TERM": "xterm-256color"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)

    def read(self, timeout_s: float) -> bool:
        """Wait for output and take it in; False when there was none, or the command has closed its end."""
        if not select.select([self._master], [], [], timeout_s)[0]:
            return False
        try:
            piece = self._decoder.decode(os.read(self._master, 4096))
        except OSError:  # the other end is closed
            return False
        self.output += piece
        self.screen.feed(piece)
        return True

    def until(self, words: str, deadline_s: float) -> None:
        """Read until the output has these words.

        Raises:
            AssertionError: when it ended or the deadline passed before.
        """
        ends = time.perf_counter() + deadline_s
        while words not in self.output:
            alive = self.process.poll() is None
            if (not self.read(0.2) and not alive) or time.perf_counter() > ends:
                raise AssertionError(f"{words!r} did not come:\n" + "\n".join(self.screen.shown()))

    def finish(self, deadline_s: float) -> int:
        """Read to the end and return the exit code."""
        ends = time.perf_counter() + deadline_s
        while self.process.poll() is None and time.perf_counter() < ends:
            self.read(0.2)
        while self.read(0.2):
            pass
        return self.process.wait(1.0)

    def close(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10.0)
        os.close(self._master)


def _without_size(environment: Mapping[str, str]) -> dict[str, str]:
    """Leave out the variables that say another size than the terminal's own."""
    return {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}


def panels(lines: Sequence[str]) -> int:
    """Return how many panels stand on a screen, whole or in part."""
    return max(sum("╭" in line for line in lines), sum("╰" in line for line in lines))
