"""A hostile neighbour in the file system: what a job writes below shared directories is not for others.

Each test looks with the eyes of another user (`nobody`), which takes a test run by root.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate.errors import StorageError, UsageError
from headgate.operators.private_directory import private_directory
from headgate.runtime.cluster.embedded import prepare_environment
from headgate.runtime.control import registry
from headgate.runtime.worker.local_directories import claim

NOBODY = 65534
GUARD_S = 600.0
as_root = pytest.mark.skipif(
    os.getuid() != 0, reason="only root can look at files as another user: run this test as root"
)

JOB = """
import sys
import headgate as hg
from headgate.connectors import blackhole, generator, json_sink


class Seen(hg.KeyedProcess):
    seen = hg.ValueState(default=0)

    def on_record(self, record, ctx):
        self.seen.set(self.seen.get() + 1)


if __name__ == "__main__":
    fields = {
        "user": {"kind": "pattern", "prefix": "u", "distinct": 100000},
        "at": {"kind": "timestamp", "every": "1s"},
    }
    options = {
        "state.backend.type": "rocksdb",
        "taskmanager.memory.managed.size": "1 mb",
        "state.backend.rocksdb.writebuffer.size": "64 kb",
        "metrics.port": "0",
    }
    job = hg.Job("private", parallelism=2, options=options)
    job.checkpoint(every="1s", storage=sys.argv[2])
    clicks = job.read(generator(fields, rate=5000), name="clicks").event_time("at")
    clicks.key_by("user").process(Seen(), name="seen").write(blackhole(), name="nowhere")
    counts = clicks.key_by("user").window(hg.tumbling("1d")).agg(n=hg.count(), name="counts")
    counts.write(json_sink(sys.argv[2] + "-out", guarantee="exactly_once"), name="files")
    job.run(cluster=sys.argv[1])
"""


def as_nobody(place: Path) -> list[str]:
    """Return the paths below `place` that another user can read, write or enter."""
    access = ["(", "-readable", "-o", "-writable", "-o", "-executable", ")"]
    found = subprocess.run(
        ["find", str(place), "-mindepth", "1", "!", "-type", "l", *access],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,  # files come and go, and directories are closed to it
    )
    return found.stdout.splitlines()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory like /tmp: everybody may make files there. pytest's own are private."""
    place = Path(tempfile.mkdtemp(prefix="hg-t-", dir="/tmp"))
    place.chmod(0o1777)
    yield place
    shutil.rmtree(place, ignore_errors=True)


@as_root
def test_the_test_sees_what_is_open(shared: Path) -> None:
    (shared / "open").write_text("x")
    (shared / "open").chmod(0o644)
    closed = shared / "closed"
    closed.mkdir(mode=0o700)
    (closed / "inside").write_text("x")
    assert as_nobody(shared) == [str(shared / "open")]


@as_root
@pytest.mark.parametrize(
    "cluster", ["in-process", pytest.param("local", marks=pytest.mark.ray, id="embedded-ray")]
)
def test_a_running_job_shows_nothing_to_other_users(
    cluster: str, shared: Path, tmp_path: Path
) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    environment = {**os.environ, "TMPDIR": str(shared), "PYTHONUNBUFFERED": "1"}
    environment.pop("XDG_RUNTIME_DIR", None)
    environment.pop("HEADGATE_RUN_DIR", None)
    with open(tmp_path / "log", "wb") as log:
        job = subprocess.Popen(
            [sys.executable, str(script), cluster, str(tmp_path / "checkpoints")],
            env=environment,
            stdout=log,
            stderr=log,
            cwd=tmp_path,
        )
    try:
        expected = ["*.sst", "windows/*.arrow", "job-*.json", "headgate-*/*.sock"]
        if cluster == "local":
            expected += ["hg-worker-*/*.sock", "hg-ray-*/**/raylet", "hg-ray-*/**/*.log"]
        seen: set[str] = set()
        until = time.monotonic() + GUARD_S
        while seen != set(expected):
            assert job.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < until, f"never seen: {set(expected) - seen}"
            seen |= {pattern for pattern in expected if any(shared.rglob(pattern))}
            assert as_nobody(shared) == []
            time.sleep(0.2)
    finally:
        job.send_signal(signal.SIGINT)
        job.wait(GUARD_S)
    assert as_nobody(shared) == []


@as_root
@pytest.mark.ray
def test_the_directory_of_an_embedded_ray_is_closed(shared: Path) -> None:
    """Ray makes its directory 0777 without the sticky bit: others could put files of theirs there."""
    prepare_environment()
    script = (
        "from headgate.runtime.cluster.embedded import embedded_ray, prepare_environment\n"
        "prepare_environment()\n"
        "with embedded_ray() as directory:\n"
        "    print(directory, flush=True)\n"
        "    input()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "TMPDIR": str(shared)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    directory = Path(process.stdout.readline().strip())
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert any(directory.rglob("session_*"))
    assert as_nobody(shared) == []
    process.communicate("\n", GUARD_S)
    assert process.returncode == 0
    assert not directory.exists()


# -- directories whose names others can guess ----------------------------------------------------------


def test_a_directory_that_is_open_is_closed(tmp_path: Path) -> None:
    place = tmp_path / "a" / "b"
    assert stat.S_IMODE(private_directory(place).stat().st_mode) == 0o700
    place.chmod(0o777)
    assert stat.S_IMODE(private_directory(place).stat().st_mode) == 0o700


@as_root
@pytest.mark.parametrize("trap", ["directory", "link to ours", "link to nowhere", "file"])
def test_a_directory_that_somebody_else_made_is_refused(
    trap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "squatted"
    if trap == "directory":
        place.mkdir(mode=0o777)
    elif trap == "file":
        place.write_text("")
    else:
        target = tmp_path / "ours"
        place.symlink_to(target)
        if trap == "link to ours":
            target.mkdir(mode=0o755)
    os.chown(place, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(OSError, match="squatted"):
        private_directory(place)
    with pytest.raises(OSError, match="squatted"):
        claim(place, "w")
    monkeypatch.setenv("HEADGATE_RUN_DIR", str(place))
    with pytest.raises(StorageError, match="the run directory cannot be used path=`.*squatted`"):
        registry.run_dir()
    if trap == "link to ours":
        assert stat.S_IMODE(target.stat().st_mode) == 0o755


@as_root
def test_a_squatted_directory_of_spark_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    from headgate.connectors.spark.process import SparkProcess
    from headgate.connectors.spark.task import SparkPlan, Task

    place = tmp_path / f"headgate-spark-{os.getuid()}"
    place.mkdir(mode=0o777)
    os.chown(place, NOBODY, NOBODY)
    process = SparkProcess(
        Task(SparkPlan(sql="SELECT 1"), "query"), str(tmp_path), "job.py:1", lambda text: None
    )
    with pytest.raises(UsageError, match="the directory for Spark's files cannot be used"):
        process.run()
