"""A Kubernetes cluster for the tests of this directory: a real API server, and nodes that run processes.

All tests here carry the mark `kube`. `make test-kube` builds what they need and runs them.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from headgate.testing.servers.programs import NotAvailableError
from headgate.tests.kube.charts import CRDS
from headgate.tests.kube.stream_jobs import in_one_process, lasting, released
from headgate.tests.support.kube import cluster as clusters
from headgate.tests.support.kube.cluster import IMAGES, Cluster
from headgate.tests.support.kube.programs import KubeRay, Programs, find, find_kuberay
from headgate.tests.support.skips import skip_or_fail

NODES = ("node-a", "node-b")
STUB_JOB = Path(__file__).with_name("stub_job")
"""A job whose pods do nothing, as the image `stub/job`."""
STUBS = (f"stub/job:*={STUB_JOB}",)
LONG = (
    *("kills", "kept_state", "kuberay", "changes", "external_ray", "gcs_storage", "groups"),
    *("kubectl_jobs", "given_away", "operator_chaos", "install", "rights", "jobs", "kubectl"),
)
"""Files that take a minute and more come first, the longest before all others. pytest-xdist gives a process
several files at a time, so with long files at the end one process would work long after the others."""
TEST_S_MAX = 1800
"""A test that hangs ends after this time. Its own waits are shorter, and say what did not come."""
_numbers = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    places = [n for n, item in enumerate(items) if item.path.is_relative_to(here)]
    ours = sorted((items[n] for n in places), key=_rank)
    for n, item in zip(places, ours, strict=True):
        items[n] = item
        item.add_marker(pytest.mark.kube)
        # Starting a control plane and a release counts for the test that needs it first.
        item.add_marker(pytest.mark.timeout(TEST_S_MAX))


def _rank(item: pytest.Item) -> int:
    """Where the file of a test stands among the long ones; behind them if it is a short one."""
    name = item.path.stem.removeprefix("test_")
    return LONG.index(name) if name in LONG else len(LONG)


@pytest.fixture(scope="session")
def programs() -> Programs:
    """The programs of Kubernetes; if they are missing, the test names the command that makes them."""
    if not sys.platform.startswith("linux"):
        skip_or_fail("the Kubernetes tests need Linux")
    try:
        return find()
    except NotAvailableError as error:
        skip_or_fail(str(error))


@pytest.fixture(scope="session")
def api_server(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane, possibly without nodes, for tests of the API server's decisions."""
    with clusters.running(programs, tmp_path_factory.mktemp("kube")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def cluster(api_server: Cluster) -> Cluster:
    """The same with two nodes, whose containers are processes of this machine."""
    if os.geteuid() != 0:
        skip_or_fail("containers as processes need root: run `sudo make test-kube`")
    api_server.start_nodes(*NODES, images=(*IMAGES, *STUBS))
    return api_server


@pytest.fixture
def namespace(api_server: Cluster) -> Iterator[str]:
    """A new namespace, in which every pod must be restricted; it is deleted after the test."""
    with api_server.namespace(f"test-{next(_numbers)}") as name:
        yield name


@pytest.fixture(scope="module")
def definitions(api_server: Cluster) -> None:
    """The definitions of StreamJob and StreamSnapshot, from their chart."""
    release = ("headgate-crds", str(CRDS), "-n", "kube-system")
    api_server.helm("upgrade", "--install", *release, "--take-ownership")


@pytest.fixture(scope="module")
def kuberay(api_server: Cluster) -> Iterator[KubeRay]:
    """KubeRay's own resource definitions; other tests see a cluster without them."""
    try:
        found = find_kuberay()
    except NotAvailableError as error:
        skip_or_fail(str(error))
    made = api_server.kubectl(
        *("apply", "--server-side", "-f", str(found.definitions), "-o", "name")
    ).split()
    for each in made:
        api_server.established(each.partition("/")[2])
    yield found
    api_server.kubectl("delete", *made)


@pytest.fixture
def operated(cluster: Cluster, namespace: str, definitions: None) -> Iterator[str]:
    """A namespace with the real operator."""
    with released(cluster, namespace):
        yield namespace


@pytest.fixture(scope="module")
def air(cluster: Cluster, definitions: None) -> Iterator[str]:
    """A namespace with the real operator, for all tests of a file."""
    with cluster.namespace(f"air-{next(_numbers)}") as namespace, released(cluster, namespace):
        yield namespace


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """The result of every `lasting` job, from one process."""
    _, job = lasting("expected")
    return in_one_process(job, tmp_path_factory.mktemp("expected"))
