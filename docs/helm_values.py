"""Prints the table of values in docs/helm.md from the chart's comments: `python docs/helm_values.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

VALUES = Path(__file__).resolve().parent.parent / "helm" / "headgate" / "values.yaml"
MARK = "# -- "


@dataclass(frozen=True)
class Setting:
    """A value that can be set.

    Attributes:
        path: its name with those of the mappings it is in, joined by dots.
        default: as in YAML.
        meaning: its comment.
    """

    path: str
    default: Any
    meaning: str


def settings() -> Iterator[Setting]:
    """All values that have a comment, in the order of the file."""
    values = yaml.safe_load(VALUES.read_text())
    parents: list[str] = []
    meaning: list[str] = []
    for line in VALUES.read_text().splitlines():
        text = line.strip()
        if text.startswith(MARK):
            meaning = [text.removeprefix(MARK)]
        elif text.startswith("# ") and meaning:
            meaning.append(text.removeprefix("# "))
        elif not text.startswith("#") and ":" in text:
            depth = (len(line) - len(line.lstrip())) // 2
            parents = [*parents[:depth], text.partition(":")[0]]
            if meaning:
                default: Any = values
                for name in parents:
                    default = default[name]
                yield Setting(".".join(parents), default, " ".join(meaning))
            meaning = []


def table() -> str:
    """The table."""
    lines = ["| value | default | meaning |", "|---|---|---|"]
    for one in settings():
        default = yaml.safe_dump(one.default, default_flow_style=True, width=1000, sort_keys=False)
        shown = default.removesuffix("\n...\n").strip()
        lines.append(f"| `{one.path}` | `{shown}` | {one.meaning} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
