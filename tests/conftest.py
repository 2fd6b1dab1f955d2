"""Fixtures shared by all tests."""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import logging
import os
import subprocess
import sys
import time
import tracemalloc  # noqa: F401  for imports in which memory is freed, see below
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from headgate.runtime.cluster.embedded import prepare_environment
from headgate.testing.servers import versitygw
from headgate.testing.servers.process import HeldPort
from headgate.testing.servers.programs import NotAvailableError
from headgate.tests.support.lab import by_subtask, faults, lab, raising, retained, trouble
from headgate.tests.tiers import Tiers, left_out

__all__ = ["by_subtask", "faults", "lab", "raising", "retained", "trouble"]
"""Fixtures of all folders that are defined in tests/support."""

# Why tracemalloc is imported: pytest does so when an object raises while the garbage collector frees it,
# such as a socket that nobody closed. If the collector runs within the import of another module, Python
# 3.11 loses the lock that this import waits for, and it fails with a KeyError of the number of its thread.

TESTS = Path(__file__).parent
ALONE = "HEADGATE_TEST_ALONE"
"""The environment variable of the process of a test that is marked `alone`."""
prepare_environment()  # test modules import ray, and some tests start one
# No test is a matter of how fast the machine is.
settings.register_profile("headgate", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headgate")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what a tier has no test of: each of its processes would import it for nothing."""
    if TESTS not in collection_path.parents:
        return None
    path = collection_path.relative_to(TESTS).as_posix()
    return left_out(path, config.getoption("markexpr")) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Let the processes of pytest-xdist import the test modules in different orders.

    Where there is no bytecode yet, as in a fresh clone, pytest rewrites the assertions of each module,
    which takes longer than all else of a collection. If each process begins at another place, it finds
    most of what it comes to later written by the others.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args_source != pytest.Config.ArgsSource.TESTPATHS:
        return
    paths = sorted(TESTS.glob("*/**/test_*.py"))
    number = int(worker["workerid"].removeprefix("gw"))
    first = len(paths) * number // worker["workercount"]
    for path in (*paths[first:], *paths[:first]):
        if not pytest_ignore_collect(path, session.config):
            module = path.relative_to(session.config.rootpath).with_suffix("")
            # What cannot be imported is reported when it is collected.
            with contextlib.suppress(Exception, pytest.skip.Exception):
                importlib.import_module(".".join(module.parts))


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that are not part of `make test` with `rest`."""
    tiers = Tiers()
    for item in items:
        path = item.path.relative_to(TESTS).as_posix()
        outside = any(item.get_closest_marker(name) for name in ("ray", "chaos"))
        if outside or not tiers.is_fast(path, getattr(item, "originalname", item.name)):
            item.add_marker("rest")


def pytest_collection_finish() -> None:
    """Take what collecting the tests has made out of the garbage collector's sight.

    It stays until the end, and is most of what there is: every collection would look at all of it again,
    and some tests collect after each job.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is marked `alone` in a process of its own."""
    if os.environ.get(ALONE) or pyfuncitem.get_closest_marker("alone") is None:
        return None
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", pyfuncitem.nodeid],
        cwd=pyfuncitem.config.rootpath,
        env={**os.environ, ALONE: "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    return True


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    """A command that runs in the process of the tests configures its loggers, for all tests behind it."""
    loggers = [logging.getLogger(name) for name in ("", "headgate", "headgate.job")]
    before = [(each.handlers[:], each.filters[:], each.level, each.propagate) for each in loggers]
    yield
    for each, (handlers, filters, level, propagate) in zip(loggers, before, strict=True):
        each.handlers[:], each.filters[:], each.propagate = handlers, filters, propagate
        each.setLevel(level)


AWS_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
START_SECONDS_MAX = 60
_bucket_numbers = itertools.count(1)


@dataclass(frozen=True)
class S3Server:
    """A running S3 server and a fresh bucket in it. `options` are what a job needs to reach it."""

    endpoint: str
    bucket: str

    @property
    def options(self) -> dict[str, str]:
        return {
            "s3.endpoint": self.endpoint,
            "s3.region": "us-east-1",
            "s3.path-style-access": "true",
        }

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/checkpoints"

    def inject(self, *faults: dict[str, object]) -> None:
        """Faults for the next matching requests (tests/s3_server_process.py); forgets `requests`."""
        self._control("PUT", json.dumps(faults).encode())

    def requests(self) -> list[list[str]]:
        """Method, path and query of every request since `inject`."""
        return self._control("GET")["seen"]

    def faults_left(self) -> list[dict[str, object]]:
        """Injected faults that no request has met yet."""
        return self._control("GET")["faults"]

    def _control(self, method: str, body: bytes | None = None) -> dict:
        request = urllib.request.Request(f"{self.endpoint}/__faults__", body, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


def _start_s3(*arguments: str) -> tuple[subprocess.Popen[bytes], str]:
    script = Path(__file__).with_name("s3_server_process.py")
    with HeldPort() as port:
        process = subprocess.Popen(
            [sys.executable, str(script), str(port), *arguments],
            env={**os.environ, **AWS_ENVIRONMENT},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        endpoint = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{endpoint}/__faults__", timeout=30).close()
                return process, endpoint
            time.sleep(0.1)
    process.kill()
    process.wait()
    raise RuntimeError("the S3 server did not start")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    process, endpoint = _start_s3()
    yield endpoint
    _stop(process)


@pytest.fixture(scope="session")
def s3_unconditional_endpoint() -> Iterator[str]:
    process, endpoint = _start_s3("--ignore-conditions")
    yield endpoint
    _stop(process)


def _with_bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for key, value in AWS_ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    for key in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(key, raising=False)
    server = S3Server(endpoint, f"bucket-{next(_bucket_numbers)}")
    url = f"{endpoint}/{server.bucket}"
    authorization = "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request"
    request = urllib.request.Request(url, method="PUT", headers={"Authorization": authorization})
    urllib.request.urlopen(request, timeout=60).close()
    server.inject()
    return server


@pytest.fixture
def s3_server(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A real S3 server on loopback with an empty bucket; AWS credentials are set to fake ones."""
    return _with_bucket(s3_endpoint, monkeypatch)


@pytest.fixture
def s3_unconditional_server(
    s3_unconditional_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> S3Server:
    """Like `s3_server`, but it ignores If-None-Match, as an old store or a careless proxy does."""
    return _with_bucket(s3_unconditional_endpoint, monkeypatch)


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Options that reach a versitygw over the directory `objects`, with an empty bucket."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", versitygw.ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", versitygw.SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for key in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(key, raising=False)
    try:
        with versitygw.running(tmp_path / "objects") as server:
            yield {
                "s3.endpoint": server.endpoint,
                "s3.region": "us-east-1",
                "s3.path-style-access": "true",
            }
    except NotAvailableError as error:
        pytest.fail(f"this test needs versitygw {versitygw.VERSION}: {error}")
