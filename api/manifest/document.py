"""A parsed manifest: values that know their line, and the list of problems found in them.

`load` parses YAML text; duplicate keys and tags are refused, `${ENV}` is substituted. Where the versions of
YAML differ, 1.2 applies: only `true` and `false` are booleans, only plain decimal digits are integers.
Anchors, aliases and `<<` merges are supported.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml

from ...errors import HeadgateError, ManifestErrors, UsageError

MANIFEST_BYTES_MAX = 1_048_576
"""A manifest must fit into a Kubernetes object."""

_VARIABLE = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|\$\{[^}]*\}?")
_HIDDEN = {ord(each): 0xF8E0 + index for index, each in enumerate("{}[],:#?")}
_SHOWN = {hidden: shown for shown, hidden in _HIDDEN.items()}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_NO_CHARACTER = re.compile(r"\\U(?!000|0010)[0-9A-Fa-f]{8}")
_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = frozenset(
    _TAG + name
    for name in ("str", "int", "float", "bool", "null", "timestamp", "map", "seq", "merge", "value")
)


@dataclass(frozen=True, slots=True)
class Scalar:
    """A single value.

    Attributes:
        text: as written, after substitution of `${ENV}`.
        value: the text as YAML understands it.
        substituted: a variable was substituted; `value` may then have an unintended type.
        broken: a problem was already reported for it.
    """

    line: int
    text: str
    value: str | int | float | bool | None
    substituted: bool = False
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """A value in a mapping, and the line of its key."""

    line: int
    value: Value


@dataclass(frozen=True, slots=True)
class Mapping:
    """Keys and values, in the order of the file."""

    line: int
    entries: dict[str, Entry]


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list."""

    line: int
    items: tuple[Value, ...]


Value: TypeAlias = Scalar | Mapping | Sequence


def size_of(value: Value) -> int:
    """Return the number of values with aliases expanded; each value is visited once."""
    known: dict[int, int] = {}

    def size(part: Value) -> int:
        if id(part) not in known:
            match part:
                case Mapping():
                    inside = [entry.value for entry in part.entries.values()]
                case Sequence():
                    inside = list(part.items)
                case Scalar():
                    inside = []
            known[id(part)] = 1 + sum(map(size, inside))
        return known[id(part)]

    return size(value)


def kind_of(value: Value) -> str:
    """Describe a value for an error message."""
    match value:
        case Mapping() if not value.entries:
            return "an empty mapping"
        case Mapping():
            return "a mapping"
        case Sequence(items=()):
            return "an empty list"
        case Sequence():
            return "a list"
        case Scalar(value=bool()):
            return f"the boolean `{value.text}`"
        case Scalar(value=int() | float()):
            return f"the number `{value.text}`"
        case Scalar(value=None):
            return "nothing"
        case _:
            return f"the text `{value.text}`"


@dataclass(slots=True)
class Problems:
    """Collects problems, so that all of them can be reported at once."""

    file: str
    field: str = "the manifest"
    """The name of the field being read, for messages."""
    found: list[tuple[int, HeadgateError]] = dataclasses.field(default_factory=list)

    def where(self, line: int) -> str:
        """Return the printed form of `line`, as a place."""
        return f"{self.file}:{line}"

    def add(self, line: int, message: str, fix: str = "") -> None:
        """Report a problem at `line`; reporting the same one again has no effect."""
        problem = UsageError(message, where=self.where(line), fix=fix)
        if not any(at == line and str(other) == str(problem) for at, other in self.found):
            self.found.append((line, problem))

    def raise_if_any(self) -> None:
        """Raise ManifestErrors with all problems, in the order of the file."""
        if self.found:
            raise ManifestErrors([problem for _, problem in sorted(self.found, key=_line)])


def _line(found: tuple[int, HeadgateError]) -> int:
    return found[0]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that `word` was most likely meant to be."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return by_lower[close[0]] if close else None


def load(text: str, problems: Problems, variables: MappingABC[str, str]) -> Value | None:
    """Parse `text`; return None if it is no YAML at all. Mistakes go to `problems`.

    Args:
        variables: the values of `${NAME}`. `${NAME:-default}` needs no variable; `$${` is a plain
            `${`.
    """
    if len(text.encode()) > MANIFEST_BYTES_MAX:
        problems.add(1, f"manifest is larger than {MANIFEST_BYTES_MAX} bytes")
        return None
    try:
        # A text that already has these characters is read as it is.
        shown = {} if any(chr(each) in text for each in _SHOWN) else _SHOWN
        hidden = _VARIABLE.sub(_hide, text) if shown else text
        root: yaml.Node | None = yaml.compose(hidden, Loader=yaml.SafeLoader)
        if root is None:
            problems.add(1, "manifest is empty", "start with apiVersion: headgate.io/v1alpha1")
            return None
        return _Converter(problems, variables, shown).convert(root)
    except yaml.MarkedYAMLError as error:
        _add_syntax_error(error, problems)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problems.add(line, f"yaml syntax: character not allowed code=`{error.character:#x}`")
    except (ValueError, OverflowError):  # PyYAML raises these for "\UFFFFFFFF"
        found = _NO_CHARACTER.search(text)
        line = text.count("\n", 0, found.start() if found else 0) + 1
        problems.add(line, "yaml syntax: an escape stands for no character")
    except RecursionError:
        problems.add(1, "yaml is nested too deeply")
    return None


def _hide(variable: re.Match[str]) -> str:
    """Replace characters that have a meaning in `{...}` and `[...]`, keeping the length."""
    return variable.group() if variable[1] is None else variable.group().translate(_HIDDEN)


def _add_syntax_error(error: yaml.MarkedYAMLError, problems: Problems) -> None:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    problem = error.problem or error.context or "unreadable"
    fix = ""
    if "found character '\\t'" in problem:
        fix = "indent with spaces"
    elif "single document" in (error.context or ""):
        problem, fix = "more than one document", "one file holds one StreamJob; remove the `---`"
    elif error.context and error.context_mark:
        fix = f"{error.context} in line {error.context_mark.line + 1}"
    problems.add(line, f"yaml syntax: {problem}", fix)


class _Converter:
    """Turns PyYAML nodes into values, each node once, however many aliases point to it."""

    def __init__(
        self, problems: Problems, variables: MappingABC[str, str], shown: MappingABC[int, int]
    ) -> None:
        self._problems = problems
        self._variables = variables
        self._shown = shown
        """Maps the substitutes for characters in variables back."""
        self._done: dict[int, Value] = {}
        self._open: set[int] = set()

    def convert(self, node: yaml.Node) -> Value:
        line = node.start_mark.line + 1
        if id(node) in self._open:
            self._problems.add(line, "alias refers to a value it is part of")
            return _broken(line)
        if id(node) not in self._done:
            self._open.add(id(node))
            self._done[id(node)] = self._convert(node, line)
            self._open.discard(id(node))
        return self._done[id(node)]

    def _convert(self, node: yaml.Node, line: int) -> Value:
        if node.tag not in _PLAIN_TAGS:
            self._problems.add(line, f"yaml tags are not allowed tag=`{node.tag}`", "remove it")
            return _broken(line)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, line)
        if isinstance(node, yaml.SequenceNode):
            return Sequence(line, tuple(self.convert(item) for item in node.value))
        return self._scalar(node, line)

    def _mapping(self, node: yaml.MappingNode, line: int) -> Mapping:
        entries: dict[str, Entry] = {}
        merged: dict[str, Entry] = {}
        for key_node, value_node in node.value:
            key_line = key_node.start_mark.line + 1
            if key_node.tag == _TAG + "merge":
                self._merge(value_node, key_line, merged)
            elif not isinstance(key_node, yaml.ScalarNode):
                self._problems.add(key_line, "a key must be a text")
            elif (key := key_node.value.translate(self._shown)) in entries:
                first = entries[key].line
                self._problems.add(
                    key_line,
                    f"duplicate key key=`{key}`",
                    f"it is in line {first} already; rename or remove one",
                )
            else:
                entries[key] = Entry(key_line, self.convert(value_node))
        return Mapping(line, merged | entries)

    def _merge(self, node: yaml.Node, line: int, merged: dict[str, Entry]) -> None:
        """Handle `<<: *other`: take its entries; those written out, or merged earlier, win."""
        value = self.convert(node)
        parts = value.items if isinstance(value, Sequence) else (value,)
        for part in parts:
            if isinstance(part, Mapping):
                for key, entry in part.entries.items():
                    merged.setdefault(key, entry)
            elif not (isinstance(part, Scalar) and part.broken):
                self._problems.add(line, "`<<` must refer to a mapping")

    def _scalar(self, node: yaml.Node, line: int) -> Scalar:
        text: str = node.value.translate(self._shown)
        if "${" not in text:
            return Scalar(line, text, _resolve(node.tag, text))
        complete = True

        def replace(match: re.Match[str]) -> str:
            nonlocal complete
            replacement = self._variable(match, line)
            complete = complete and replacement is not None
            return replacement or ""

        text = _VARIABLE.sub(replace, text)
        if not complete:
            return _broken(line)
        resolver: Any = yaml.resolver.Resolver()
        tag = resolver.resolve(yaml.ScalarNode, text, (True, False))
        return Scalar(line, text, _resolve(tag, text), substituted=True)

    def _variable(self, match: re.Match[str], line: int) -> str | None:
        written, (name, default) = match.group(), match.groups()
        if written == "$${":
            return "${"
        if name is None:
            self._problems.add(
                line,
                f"not a variable text=`{written}`",
                "write ${NAME} or ${NAME:-default}; $${ for a plain ${",
            )
            return None
        value = self._variables.get(name)
        if default is not None:
            return value or default
        if value is None:
            self._problems.add(
                line,
                f"environment variable is not set name=`{name}`",
                f"set it, or write ${{{name}:-default}}",
            )
        return value


def _broken(line: int) -> Scalar:
    return Scalar(line, "", None, broken=True)


def _resolve(tag: Any, text: str) -> str | int | float | bool | None:
    match str(tag).removeprefix(_TAG):
        case "null":
            return None
        case "bool" if text.lower() in ("true", "false"):
            return text.lower() == "true"
        case "int" if len(text) < 20 and _INTEGER.fullmatch(text):
            return int(text)
        case "float":
            try:
                return float(text)
            except ValueError:  # .inf, 1:30.5
                return text
        case _:
            return text
