"""The programs of a Kubernetes control plane, of the versions that the tests run against.

They come from package registries alone: Kubernetes, Helm and KubeRay's operator from the Go module proxy,
etcd from Debian. The modules that Kubernetes is built from are pinned by `binaries/go.sum`.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headgate.testing.servers.programs import (
    NotAvailableError,
    go_command,
    made,
    made_once,
    run_command,
)

KUBERNETES = "v1.34.2"
HELM = "v3.21.4"
KUBERAY = "v1.6.2"
BUILD_S_MAX = 2400
"""On two idle cores, building Kubernetes takes about eight minutes, Helm two, KubeRay two."""
MODULE = Path(__file__).with_name("binaries")
KUBERNETES_PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kubectl")
NODE_PROGRAMS = ("kubelet", "kube-proxy", "kube-scheduler")
"""A node that is real needs these, too."""
KUBERAY_MODULE = f"github.com/ray-project/kuberay/ray-operator@{KUBERAY}"
KUBERAY_PROGRAM = "ray-operator"
KUBERAY_DEFINITIONS = "definitions"


@dataclass(frozen=True)
class Programs:
    """Paths of the programs."""

    apiserver: Path
    controller_manager: Path
    kubectl: Path
    etcd: Path
    helm: Path


def find() -> Programs:
    """Return the programs, which `make kube-programs` puts into the cache.

    Raises:
        NotAvailableError: something is missing; the text says what would help.
    """
    try:
        return _paths(*(made(name, files) for name, (files, _) in PARTS.items()))
    except NotAvailableError as error:
        raise NotAvailableError(f"{error}: {HINT}") from error


@dataclass(frozen=True)
class KubeRay:
    """KubeRay's operator, and the directory of its resource definitions."""

    operator: Path
    definitions: Path


def find_kuberay() -> KubeRay:
    """Return KubeRay, which `make kube-programs` puts into the cache.

    Raises:
        NotAvailableError: it is missing; the text says what would help.
    """
    try:
        return _kuberay(made(*KUBERAY_PART))
    except NotAvailableError as error:
        raise NotAvailableError(f"{error}: {HINT}") from error


def build() -> Programs:
    """Return the programs, and make those that are not in the cache yet.

    Raises:
        NotAvailableError: there is no Go, no network, or not enough time.
    """
    programs = _paths(*(made_once(name, files, make) for name, (files, make) in PARTS.items()))
    made_once(*KUBERAY_PART, _build_kuberay)
    return programs


def build_node() -> dict[str, Path]:
    """Return the programs of a real node, by name, and make those that are not in the cache yet.

    Raises:
        NotAvailableError: there is no Go, no network, or not enough time.
    """

    def make(directory: Path) -> None:
        _build_kubernetes(directory, NODE_PROGRAMS)

    directory = made_once(f"kubernetes-node-{KUBERNETES}", NODE_PROGRAMS, make)
    return {name: directory / name for name in NODE_PROGRAMS}


def _paths(kubernetes: Path, etcd: Path, helm: Path) -> Programs:
    return Programs(
        *(kubernetes / name for name in KUBERNETES_PROGRAMS), etcd / "etcd", helm / "helm"
    )


def _kuberay(directory: Path) -> KubeRay:
    return KubeRay(directory / KUBERAY_PROGRAM, directory / KUBERAY_DEFINITIONS)


def _build_kubernetes(directory: Path, programs: Sequence[str] = KUBERNETES_PROGRAMS) -> None:
    # Built from a copy, because Go writes beside go.mod.
    source = directory / "source"
    shutil.copytree(MODULE, source)
    version = f"-s -w -X k8s.io/component-base/version.gitVersion={KUBERNETES}"
    go_command(
        *("build", "-trimpath", "-ldflags", version, "-o", f"{directory}/"),
        *(f"k8s.io/kubernetes/cmd/{name}" for name in programs),
        seconds_max=BUILD_S_MAX,
        cwd=source,
    )
    shutil.rmtree(source)


def _build_helm(directory: Path) -> None:
    # Without these, Helm takes a chart that is rendered without a cluster for one of Kubernetes 1.20.
    minor = KUBERNETES.split(".")[1]
    flags = " ".join(
        f"-X helm.sh/helm/v3/pkg/{package}.k8sVersionMajor=1 "
        f"-X helm.sh/helm/v3/pkg/{package}.k8sVersionMinor={minor}"
        for package in ("chartutil", "lint/rules")
    )
    go_command(
        *("install", "-trimpath", "-ldflags", f"-s -w {flags}"),
        f"helm.sh/helm/v3/cmd/helm@{HELM}",
        seconds_max=BUILD_S_MAX,
        GOBIN=str(directory),
    )


def _build_kuberay(directory: Path) -> None:
    # In a copy of its module, whose own go.sum pins what it is built from; the cache of Go is read-only.
    download = ("go", "mod", "download", "-json", KUBERAY_MODULE)
    found = run_command(*download, seconds_max=300, cwd=directory)
    source = directory / "source"
    shutil.copytree(json.loads(found)["Dir"], source, copy_function=shutil.copyfile)
    for path in (source, *source.rglob("*/")):
        path.chmod(0o755)
    go_command(
        *("build", "-trimpath", "-ldflags", "-s -w", "-o", str(directory / KUBERAY_PROGRAM), "."),
        seconds_max=BUILD_S_MAX,
        cwd=source,
    )
    (source / "config" / "crd" / "bases").rename(directory / KUBERAY_DEFINITIONS)
    shutil.rmtree(source)


def _unpack_etcd(directory: Path) -> None:
    installed = shutil.which("etcd")
    if installed:
        (directory / "etcd").symlink_to(installed)
        return
    try:
        _download_etcd(directory)
    except NotAvailableError as error:
        raise NotAvailableError(
            f"{error}; install etcd yourself (apt-get install etcd-server)"
        ) from error
    package = next(directory.glob("etcd-server*.deb"))
    run_command("dpkg-deb", "-x", str(package), str(directory / "unpacked"), seconds_max=60)
    (directory / "unpacked/usr/bin/etcd").rename(directory / "etcd")
    shutil.rmtree(directory / "unpacked")
    package.unlink()


def _download_etcd(directory: Path) -> None:
    download = ("apt-get", "download", "etcd-server")
    try:
        run_command(*download, seconds_max=300, cwd=directory)
    except NotAvailableError:
        # A fresh container has no lists of packages.
        run_command("apt-get", "update", seconds_max=300)
        run_command(*download, seconds_max=300, cwd=directory)


PARTS: dict[str, tuple[Sequence[str], Callable[[Path], None]]] = {
    f"kubernetes-{KUBERNETES}": (KUBERNETES_PROGRAMS, _build_kubernetes),
    "etcd-debian": (["etcd"], _unpack_etcd),
    f"helm-{HELM}": (["helm"], _build_helm),
}
"""Directories of the cache: the files in them, and who makes them."""
KUBERAY_PART = (
    f"kuberay-{KUBERAY}",
    (KUBERAY_PROGRAM, f"{KUBERAY_DEFINITIONS}/ray.io_rayclusters.yaml"),
)
"""The same for KubeRay, without which only its own tests are skipped."""
HINT = "run `make kube-programs` (once; ten minutes of two cores, with Go and a network)"


if __name__ == "__main__":
    try:
        print(build().apiserver.parent.parent)
    except NotAvailableError as error:
        sys.exit(f"the programs of Kubernetes cannot be made here: {error}")
