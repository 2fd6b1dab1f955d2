"""Goal: the Dockerfile has all of the package and none of what an image should not have.

A real build is `make test-image`, which needs buildah and takes minutes.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import headgate

ROOT = Path(headgate.__file__).resolve().parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_extras_of_the_image_exist(project) -> None:
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", DOCKERFILE, re.MULTILINE)
    assert set(extras.split(",")) <= project["project"]["optional-dependencies"].keys()


def test_the_image_does_not_run_as_root_and_has_no_healthcheck() -> None:
    users = re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE)
    assert users[-1] == "10001:10001"
    # Kubernetes ignores it, and a stream job is not healthy or ill by what one command finds.
    assert not re.search(r"^HEALTHCHECK", DOCKERFILE, re.MULTILINE)
    assert "org.opencontainers.image.licenses" in DOCKERFILE
