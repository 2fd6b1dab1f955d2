"""Renders the charts of this checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

import headgate
from headgate.tests.support.commands import ended_with
from headgate.tests.support.kube.programs import Programs

Object = dict[str, Any]
CHARTS = Path(headgate.__file__).resolve().parent / "helm"
CHART = CHARTS / "headgate"
CRDS = CHARTS / "headgate-crds"
SCENARIOS = sorted(path.stem for path in (CHART / "ci").glob("*.yaml"))
KUBERNETES = ("1.29.0", "1.31.0", "1.34.0")
MONITORING = ("--api-versions", "monitoring.coreos.com/v1")
RELEASE, NAMESPACE = "streams", "headgate-system"


def helm(programs: Programs, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Helm without a cluster."""
    command = [str(programs.helm), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)


def render(programs: Programs, *arguments: str, chart: Path = CHART) -> list[Object]:
    """Return all objects that an installation would make, those of `helm test` included."""
    done = helm(programs, "template", RELEASE, str(chart), "--namespace", NAMESPACE, *arguments)
    ended_with(done, 0)
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def scenario(name: str) -> tuple[str, str]:
    """Return the arguments for the values of a file in `ci`."""
    return "--values", str(CHART / "ci" / f"{name}.yaml")


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [found for found in objects if found["kind"] in kinds]


def pods(objects: list[Object]) -> list[Object]:
    """Return the specifications of all pods, also of those that a Deployment makes."""
    templates = [found["spec"]["template"] for found in of_kind(objects, "Deployment", "Job")]
    return [found["spec"] for found in [*templates, *of_kind(objects, "Pod")]]


def headgate_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Return the command line of this checkout."""
    command = [str(Path(sys.prefix) / "bin" / "headgate"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
