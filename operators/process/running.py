"""The copy of a user's object that a subtask runs, with quick access to its states."""

from __future__ import annotations

import copy
import inspect
from abc import ABCMeta
from collections.abc import Sequence
from typing import Any

from .functions import ProcessFunction


def running_copy(function: Any, attributes: Sequence[str]) -> Any:
    """Return a copy of a user's object, to whose attributes the handles of its states are to be set.

    The class declares the states under the same names. Up to Python 3.12 the interpreter therefore looks
    into the class and into the object at each access, which takes longer than the access to a state
    itself. So the class of the copy is a subclass with a slot for each handle, which is found at once. A
    class that makes, holds or finds its attributes in a way of its own is left as it is.
    """
    copied = copy.deepcopy(function)
    kind = type(copied)
    if not attributes or not _is_ordinary(kind):
        return copied
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    make: Any = type(kind)
    running = object.__new__(make(kind.__name__, (kind,), {"__slots__": (*attributes,), **names}))
    vars(running).update(vars(copied))
    return running


def _is_ordinary(kind: type[Any]) -> bool:
    """Return True if instances have all attributes in their dictionary, and subclasses are not noticed."""
    return (
        type(kind) in (type, ABCMeta)
        and kind.__basicsize__ == ProcessFunction.__basicsize__
        and not hasattr(kind, "__getattr__")
        and all(
            inspect.getattr_static(kind, name) is inspect.getattr_static(ProcessFunction, name)
            for name in ("__new__", "__getattribute__", "__init_subclass__")
        )
    )
