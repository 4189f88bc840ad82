"""Guarded methods: a fault in what only saves time closes it, and the engine continues without it."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_F = TypeVar("_F")


class Closable(Protocol):
    """What can end by itself while others go on."""

    closed: bool
    """Whether a fault ended it."""

    def close(self, reason: str) -> None:
        """End, and say why in one line of the log."""


_C = TypeVar("_C", bound=Closable)


def guarded(
    fallback: _F,
) -> Callable[[Callable[Concatenate[_C, _P], _T]], Callable[Concatenate[_C, _P], _T | _F]]:
    """Let a method answer `fallback` once its object is closed; a method that fails closes it."""

    def wrap(method: Callable[Concatenate[_C, _P], _T]) -> Callable[Concatenate[_C, _P], _T | _F]:
        @wraps(method)
        def call(owner: _C, /, *arguments: _P.args, **options: _P.kwargs) -> _T | _F:
            if owner.closed:
                return fallback
            try:
                return method(owner, *arguments, **options)
            # Whatever is wrong with a draft source, the run must continue: drafts only save time.
            except Exception as error:  # noqa: BLE001
                owner.close(f"the drafter failed: {type(error).__name__}: {error}")
                return fallback

        return call

    return wrap
