"""The first page a newcomer reads: its example runs as it is printed, in both ways, and twice."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import headgate

README = (Path(headgate.__file__).parent / "README.md").read_text()
COMMAND = "$ python clicks.py\n"
HEADGATE = str(Path(sys.executable).with_name("headgate"))


def example() -> str:
    """The script that README has the reader save."""
    (code,) = re.findall(r"^```python\n(# clicks\.py\n.*?)^```", README, re.MULTILINE | re.DOTALL)
    return str(code)


def printed() -> list[str]:
    """The lines that README says it prints, without the number of the subtask."""
    (block,) = re.findall(rf"^```\n{re.escape(COMMAND)}(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return without_subtask(block)


def without_subtask(text: str) -> list[str]:
    # Windows of different keys are printed in no defined order.
    return sorted(line.partition("> ")[2] for line in text.splitlines())


def run(directory: Path, *command: str) -> list[str]:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True)
    return without_subtask(done.stdout)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "clicks.py").write_text(example())
    return tmp_path


def test_as_a_script_and_twice(directory: Path) -> None:
    assert len(printed()) == 4
    assert run(directory, sys.executable, "clicks.py") == printed()
    assert run(directory, sys.executable, "clicks.py") == printed()


def test_with_the_command_line_in_one_process(directory: Path) -> None:
    assert run(directory, HEADGATE, "run", "clicks.py", "--cluster", "in-process") == printed()


@pytest.mark.ray
def test_with_the_command_line_on_ray(directory: Path) -> None:
    assert run(directory, HEADGATE, "run", "clicks.py") == printed()
