"""The table of all options of a job, and `Options`: checked texts as typed values.

Only options that some code reads are listed. Keys, defaults and meanings are Flink's where the meaning
is Flink's; keys of our own start with `headgate.`.
`python -m headgate.runtime.options.registry` prints the table as Markdown (docs/options.md).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final, TypeVar

from ...errors import OptionError, UsageError
from . import execution, monitoring, network, recovery, state
from .types import Option

T = TypeVar("T")

_THEMES: Final = (execution, state, recovery, network, monitoring)
OPTIONS: Final[tuple[Option[Any], ...]] = tuple(
    {
        option.key: option
        for theme in _THEMES
        for option in vars(theme).values()
        if isinstance(option, Option)
    }.values()
)
"""Every `Option` that a module of a theme defines."""
_BY_NAME: dict[str, Option[Any]] = {
    name: option for option in OPTIONS for name in (option.key, *option.aliases)
}


def find_option(key: str) -> Option[Any]:
    """The option named `key`, or of which `key` is an older name.

    Raises:
        OptionError: there is none; `fix` names the nearest.
    """
    option = _BY_NAME.get(key)
    if option is not None:
        return option
    near = difflib.get_close_matches(key, _BY_NAME, n=1, cutoff=0.6)
    raise OptionError(
        f"unknown option key=`{key}`",
        fix=f"did you mean `{near[0]}`?" if near else "see docs/options.md for all options",
    )


def current_key(key: str) -> str:
    """The key that `key` is an older name of; `key` itself if it is none."""
    option = _BY_NAME.get(key)
    return key if option is None else option.key


class Options:
    """The options of one job: checked texts, typed values, defaults for the rest. Immutable."""

    def __init__(self, texts: Mapping[str, str] | None = None) -> None:
        """Parse and check `texts`.

        Raises:
            OptionError: with all problems at once.
        """
        self._values, problems = _parse(texts or {})
        if len(problems) == 1:
            raise next(iter(problems.values()))
        if problems:
            lines = "\n".join(str(problem) for problem in problems.values())
            raise OptionError(f"{len(problems)} mistakes in the options:\n{lines}")

    @staticmethod
    def problems(texts: Mapping[str, str]) -> dict[str, OptionError]:
        """Return the mistakes in `texts`, by the key as the user wrote it."""
        return _parse(texts)[1]

    def get(self, option: Option[T]) -> T:
        """The value of `option`, in its unit."""
        value: T = self._values.get(option.key, option.default)
        return value

    def is_set(self, option: Option[Any]) -> bool:
        """True if the user set it, also if to the default."""
        return option.key in self._values

    def override(self, texts: Mapping[str, str]) -> Options:
        """These options with those of `texts` in their place."""
        return Options(
            {**self.explicit(), **{current_key(key): text for key, text in texts.items()}}
        )

    def explicit(self) -> dict[str, str]:
        """The texts of what the user set, under the current keys."""
        return {key: _BY_NAME[key].type.format(value) for key, value in self._values.items()}

    def effective(self) -> dict[str, str]:
        """The texts of everything with a value, set or default: what operators see."""
        return {**_default_texts(), **self.explicit()}


@cache
def _default_texts() -> Mapping[str, str]:
    """Return the texts of all defaults, which each operator is given."""
    return {o.key: o.default_text() for o in OPTIONS if o.default is not None}


def _parse(texts: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, OptionError]]:
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    problems: dict[str, OptionError] = {}
    for key, text in texts.items():
        try:
            option = find_option(key)
            if option.key in values:
                raise OptionError(
                    f"option is set twice key=`{option.key}` also_as=`{written[option.key]}`",
                    fix="keep one of them",
                )
            written[option.key] = key
            values[option.key] = _value(option, key, text)
        except OptionError as problem:
            problems[key] = problem
    for key, contradiction in _contradictions(values):
        problems.setdefault(written[key], contradiction)
    return values, problems


def _value(option: Option[T], key: str, text: object) -> T:
    if not isinstance(text, str):
        raise OptionError(
            f"option value must be text key=`{key}` value=`{text!r}`", fix=f'write "{text}"'
        )
    try:
        value: T = option.type.parse(text)
    except UsageError as error:
        raise OptionError(
            f"bad option value key=`{key}` value=`{text}`", fix=error.fix or error.message
        ) from None
    return value


def _contradictions(values: Mapping[str, Any]) -> Iterator[tuple[str, OptionError]]:
    """Options that are fine alone and wrong together, each with the key to blame."""
    yield from monitoring.contradictions(values)
    yield from network.contradictions(values)
    yield from state.contradictions(values)


def markdown() -> str:
    """The table of all options, for docs/options.md."""
    lines = [
        "# Options",
        "",
        "<!-- generated: python -m headgate.runtime.options.registry > docs/options.md -->",
        "",
        "Set them with `hg.Job(..., options={...})`, under `spec.options` of a manifest, or with",
        "`headgate run -D key=value`. Unknown keys are refused. Durations and sizes need a unit",
        "(`10 s`, `32 kb`).",
        "",
        "| key | type | default | unit | meaning |",
        "|---|---|---|---|---|",
    ]
    for option in OPTIONS:
        aliases = "".join(f" Also `{alias}`." for alias in option.aliases)
        lines.append(
            f"| `{option.key}` | {option.type.name} | `{option.default_text()}` | {option.type.unit} "
            f"| {option.doc}{aliases} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
