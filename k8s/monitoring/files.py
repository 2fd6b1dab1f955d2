"""The generated files of the chart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import yaml

from .alerts import template
from .boards import BOARDS

CHART: Final = Path("helm") / "headgate"
_HEAD: Final = """\
# generated: python -m headgate.k8s.monitoring write
# The chart puts its thresholds where a name is between < and >. For a Prometheus without the chart:
# python -m headgate.k8s.monitoring rules
"""


def generated() -> dict[Path, str]:
    """Return the content of each file, by its path from the top of the repository."""
    files = {
        CHART / "dashboards" / f"{board.uid}.json": json.dumps(board.as_json(), indent=2) + "\n"
        for board in BOARDS
    }
    text = yaml.safe_dump(template(), sort_keys=False, width=100)
    files[CHART / "rules" / "headgate.yaml"] = _HEAD + text
    return files
