"""Processes that live now, by their commands."""

import psutil


def command_of(process: psutil.Process) -> list[str]:
    """Return a process's words; none of one that has ended, reaped or not."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def children_that_run(part: str, parent: int | None = None) -> list[psutil.Process]:
    """Return the living children of a process (this one unless one is named), a word of which has `part`."""
    children = psutil.Process(parent).children()
    return [one for one in children if any(part in word for word in command_of(one))]
