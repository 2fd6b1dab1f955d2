"""A small jar of what Flink needs for the benchmark: tables and functions in Java."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

_JAVA = sorted(Path(__file__).with_name("java").glob("*.java"))
_SERVICE = "META-INF/services/org.apache.flink.table.factories.Factory"


def build_jar(jar: Path, flink_home: Path) -> None:
    """Compile the Java sources. Needs a JDK; the classes of Flink are in `flink_home`/lib."""
    classes = jar.with_suffix(".classes")
    shutil.rmtree(classes, ignore_errors=True)
    (classes / _SERVICE).parent.mkdir(parents=True)
    (classes / _SERVICE).write_text("Bids\nSide\n")
    classpath = f"{flink_home}/lib/*"
    subprocess.run(
        ["javac", "-nowarn", "-proc:none", "-cp", classpath, "-d", str(classes), *map(str, _JAVA)],
        check=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    subprocess.run(["jar", "cf", str(jar), "-C", str(classes), "."], check=True)
