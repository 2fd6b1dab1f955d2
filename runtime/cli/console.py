"""Output and exit codes of all verbs. Results go to stdout, everything about the run to stderr."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from ...errors import HeadgateError, InternalError, ManifestErrors, UsageError, UserCodeError

if TYPE_CHECKING:
    from rich.console import Console

OK = 0
FAILED = 1
USAGE = 2
CANCELLED = 130
"""As shells report a process that was ended by Ctrl-C."""

PIPE_COLUMNS = 250
"""The width of tables that go into a pipe, where no window can be widened."""
REPORT = "this is a bug in headgate; please report it with the text above"
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')


def say(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)


def make_console() -> Console:
    """Return the console on stdout, on which tables are printed."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=PIPE_COLUMNS)


def print_table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Collection[str] = (),
    fold: bool = False,
) -> None:
    """A table without lines on stdout.

    Args:
        titles: of the columns.
        rows: their cells, which are shown as they are: brackets are no markup.
        right: titles of the columns that are aligned to the right.
        fold: long cells are folded where the window is narrow; else they are cut.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        justify: Literal["left", "right"] = "right" if title in right else "left"
        table.add_column(
            title, justify=justify, overflow="fold" if fold else "ellipsis", no_wrap=not fold
        )
    for row in rows:
        table.add_row(*map(Text, row))
    make_console().print(table)


def report(error: BaseException) -> int:
    """Print an error as text; returns the exit code it stands for."""
    if isinstance(error, InternalError) or not isinstance(error, HeadgateError):
        say("".join(traceback.format_exception(error)).rstrip())
        say(REPORT)
        return FAILED
    for text in texts(error):
        say(f"error: {text}")
    return USAGE if isinstance(error, UsageError) else FAILED


def texts(error: HeadgateError) -> list[str]:
    """The error as text; one text for each mistake of a manifest."""
    if isinstance(error, ManifestErrors):
        return [str(problem) for problem in error.problems]
    text = str(error)
    place = user_frame(error.detail) if isinstance(error, UserCodeError) else ""
    return [f"{text}\n  raised in {place}" if place else text]


def user_frame(detail: str) -> str:
    """The innermost line of a traceback text: `file:line (function)`; empty if there is none."""
    frames = list(_FRAME.finditer(detail))
    return f"{frames[-1]['file']}:{frames[-1]['line']} ({frames[-1]['name']})" if frames else ""
