"""The `headgate` command: a module per group of verbs.

Nothing heavy is imported before a verb needs it, so that `headgate --help` answers at once.
"""

from __future__ import annotations

import faulthandler
import sys


def main() -> None:
    """Entry point: run the verb, and turn errors into text and an exit code."""
    from .app import app
    from .console import report

    if sys.stderr is not None:
        # Native code that a script calls may end the process: this prints the line of the script.
        faulthandler.enable(all_threads=False)
    try:
        app()
    except Exception as error:
        sys.exit(report(error))
