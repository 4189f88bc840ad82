"""Frozen: slotted dataclasses that no one changes, as cheap to make as any other.

The standard library's frozen dataclasses set each field through a call, which takes eight times as long: what
is made a dozen times for each group would cost the coordinator a tenth of its time. So here the type checker
alone refuses an assignment.
"""

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[_T]) -> type[_T]:
    """Make a class a slotted dataclass that compares by its fields and has a hash of them."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
def frozen_by_identity(cls: type[_T]) -> type[_T]:
    """Make a class a slotted dataclass of which each object equals only itself: it holds arrays."""
    return dataclass(slots=True, eq=False)(cls)
