"""A plugin of mypy that refuses `dataclasses.replace` of a `msgspec.Struct`, which fails at run time.

mypy by itself takes a Struct for a dataclass, since its fields are declared as those of one.
"""

from __future__ import annotations

from collections.abc import Callable

from mypy.plugin import FunctionContext, Plugin
from mypy.types import Instance, Type, UnionType, get_proper_type


class Structs(Plugin):
    """Looks at all calls of `dataclasses.replace`."""

    def get_function_hook(self, fullname: str) -> Callable[[FunctionContext], Type] | None:
        return _check if fullname == "dataclasses.replace" else None


def _check(call: FunctionContext) -> Type:
    """Report the call if what it replaces is a Struct, or may be one."""
    for given in call.arg_types[0]:
        kind = get_proper_type(given)
        for each in kind.items if isinstance(kind, UnionType) else [kind]:
            each = get_proper_type(each)
            if isinstance(each, Instance) and each.type.has_base("msgspec.Struct"):
                call.api.fail(
                    f"`{each.type.name}` is a Struct: use msgspec.structs.replace", call.context
                )
    return call.default_return_type


def plugin(version: str) -> type[Plugin]:
    """Return the plugin, as mypy asks for it."""
    return Structs
