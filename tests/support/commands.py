"""The end of commands that tests run: a failure shows all that the command has said."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from typing import Any, Final

_DEMO_S_MAX: Final = 900


def ended_with(done: subprocess.CompletedProcess[str], code: int) -> None:
    """Check the exit code of a command that has ended."""
    assert done.returncode == code, _said(done.args, done.returncode, done.stdout, done.stderr)


def ends_with(running: subprocess.Popen[str], code: int, seconds: float = 300) -> None:
    """Wait for the end of a command, and check its exit code."""
    try:
        stdout, stderr = running.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        running.kill()
        stdout, stderr = running.communicate()
        text = _said(running.args, running.returncode, stdout, stderr)
        raise AssertionError(f"it did not end within {seconds:g} s. {text}") from None
    assert running.returncode == code, _said(running.args, running.returncode, stdout, stderr)


def output_of_demo(command: Sequence[str]) -> str:
    """Run a demo that must end well, and return what it has said."""
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = running.communicate(timeout=_DEMO_S_MAX)
    except subprocess.TimeoutExpired:
        running.send_signal(signal.SIGINT)  # so that it ends what it has started
        output, _ = running.communicate()
    assert running.returncode == 0, output
    return output


def _said(command: Any, code: int, stdout: str | None, stderr: str | None) -> str:
    """Return the command, its exit code and its output, as far as that was kept."""
    parts = command if isinstance(command, list | tuple) else [command]
    text = f"exit code {code} of: {' '.join(map(str, parts))}\n"
    kept = (("stdout", stdout), ("stderr", stderr))
    return text + "".join(f"--- {name}\n{output}\n" for name, output in kept if output)
