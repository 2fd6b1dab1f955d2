"""A job in this process never imports Ray, nor does anything that only reads a job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headgate.tests.support.commands import ended_with

SCRIPT = """
import headgate as hg
from headgate.connectors import blackhole, from_list

job = hg.Job("small", parallelism=2)
job.checkpoint(every="1h", storage="checkpoints")
numbers = job.read(from_list([1, 2, 3]), name="numbers")
numbers.key_with(lambda n: n % 2).reduce(lambda a, b: a + b, name="sum").write(blackhole(), name="out")
"""
COMMAND = "import sys; from headgate.runtime.cli import main; sys.argv[1:] = {}\ntry: main()\n"
ENTRIES = {
    "import": "import headgate; headgate.Job",
    "run": COMMAND.format(["run", "small.py", "--cluster", "in-process"]),
    "validate": COMMAND.format(["validate", "small.py"]),
    "explain": COMMAND.format(["explain", "small.py"]),
    "job.run": "from small import job; job.run(cluster='in-process')",
    "job.run by default": "from small import job; job.run()",
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_ray_is_not_imported(entry: str, tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(SCRIPT)
    source = ENTRIES[entry]
    source += "except SystemExit as end: assert not end.code\n" if "try:" in source else "\n"
    source += "import sys; print([m for m in sys.modules if m.partition('.')[0] == 'ray'])"
    ended = subprocess.run(
        [sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    ended_with(ended, 0)
    assert ended.stdout.splitlines()[-1] == "[]"


def test_importing_headgate_loads_no_large_library() -> None:
    """`import headgate` is quick: what takes long to import is loaded when it is needed."""
    source = "import sys, headgate; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    loaded = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=600
    ).stdout.split()
    assert not {"ray", "pyarrow", "duckdb", "pyspark", "boto3", "numpy"} & set(loaded)


OPERATOR = """
import importlib, pkgutil, sys
from headgate.k8s import cli, operator
from headgate.k8s.spec import Job, parse_job

for module in pkgutil.iter_modules(operator.__path__, operator.__name__ + "."):
    importlib.import_module(module.name)
spec = {
    "sources": {"numbers": {"generator": {"fields": {"n": "sequence"}, "rows": 10}}},
    "sinks": {"out": {"from": "numbers", "print": {}}},
}
assert isinstance(parse_job({"metadata": {"name": "small"}, "spec": spec}), Job)
print([m for m in sys.modules if m.partition(".")[0] == "ray"])
"""


def test_the_operator_never_loads_ray() -> None:
    """Its modules do not, nor does what they import at any depth, nor reading a StreamJob."""
    ended = subprocess.run(
        [sys.executable, "-c", OPERATOR], capture_output=True, text=True, timeout=600
    )
    ended_with(ended, 0)
    assert ended.stdout.splitlines()[-1] == "[]"
