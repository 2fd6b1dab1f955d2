"""Resolves `module:name` references of a manifest to the user's functions and classes."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any, Final

from ...errors import HeadgateError, PlanError
from ...operators.suggestions import suggest

REFERENCE_PATTERN: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def resolve(reference: str) -> Any:
    """Return the object that `module:name` names; the name may have dots.

    Raises:
        PlanError: the module cannot be imported, or has no such name.
    """
    module_name, _, path = reference.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except BaseException as error:  # the user's module may raise anything
        if type(error) is KeyboardInterrupt:
            raise  # Ctrl-C; a derived class is the module's own
        raise PlanError(
            f"module cannot be imported module=`{module_name}` "
            f"error=`{type(error).__name__}: {error}`",
            fix="modules are looked up as by `python -m`: in the working directory and on PYTHONPATH",
        ) from error
    for name in path.split("."):
        if not hasattr(found, name):
            public = [known for known in vars(found) if not known.startswith("_")]
            raise PlanError(
                f"module has no such name name=`{path}` module=`{module_name}`",
                fix=suggest(name, public, "names"),
            )
        found = getattr(found, name)
    return found


def resolve_function(reference: str) -> Any:
    """Return the function (any callable) named by `module:name`."""
    found = resolve(reference)
    if not callable(found):
        raise PlanError(f"not a function reference=`{reference}` type=`{type(found).__name__}`")
    return found


def resolve_class(reference: str) -> type[Any]:
    """Return the class named by `module:name`."""
    found = resolve(reference)
    if not isinstance(found, type):
        raise PlanError(f"not a class reference=`{reference}` type=`{type(found).__name__}`")
    return found


def resolve_instance(reference: str, arguments: Mapping[str, Any] | None = None) -> Any:
    """Return the object that `module:name` names; a class stands for an instance of it.

    Args:
        arguments: by name, for the class, or for a function that makes the object.

    Raises:
        PlanError: as for `resolve`, or the object cannot be made with these arguments.
    """
    found = resolve(reference)
    if arguments is None and not isinstance(found, type):
        return found
    if not callable(found):
        raise PlanError(
            f"takes no arguments reference=`{reference}` type=`{type(found).__name__}`",
            fix="name a class, or a function that makes what is meant",
        )
    try:
        return found(**(arguments or {}))
    except HeadgateError:
        raise
    except Exception as error:  # the user's class may raise anything
        what = "class cannot be made" if isinstance(found, type) else "function cannot be called"
        how = "with these arguments" if arguments else "without arguments"
        raise PlanError(
            f"{what} {how} reference=`{reference}` error=`{type(error).__name__}: {error}`",
            fix="give them with {python: module:name, arguments: {name: value}}",
        ) from error


def is_reference(text: str) -> bool:
    """Return True for `module:name`, which neither SQL nor durations match."""
    return REFERENCE_PATTERN.fullmatch(text) is not None
