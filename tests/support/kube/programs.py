"""The programs of a Kubernetes control plane, of the versions that the tests run against.

They come from package registries alone: Kubernetes and Helm from the Go module proxy, etcd from Debian. The
modules that Kubernetes is built from are pinned by `binaries/go.sum`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headgate.tests.support.built import (
    NotAvailableError,
    go_command,
    made,
    made_once,
    run_command,
)

KUBERNETES = "v1.34.2"
HELM = "v3.21.4"
BUILD_S_MAX = 2400
"""On two idle cores, building Kubernetes takes about eight minutes, and Helm two."""
MODULE = Path(__file__).with_name("binaries")
KUBERNETES_PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kubectl")


@dataclass(frozen=True)
class Programs:
    """Paths of the programs."""

    apiserver: Path
    controller_manager: Path
    kubectl: Path
    etcd: Path
    helm: Path


def find() -> Programs:
    """The programs, which `make kube-programs` puts into the cache.

    Raises:
        NotAvailableError: something is missing; the text says what would help.
    """
    try:
        return _paths(*(made(name, files) for name, (files, _) in PARTS.items()))
    except NotAvailableError as error:
        hint = "run `make kube-programs` (once; ten minutes of two cores, with Go and a network)"
        raise NotAvailableError(f"{error}: {hint}") from error


def build() -> Programs:
    """The programs; those that are not in the cache yet are made.

    Raises:
        NotAvailableError: there is no Go, no network, or not enough time.
    """
    return _paths(*(made_once(name, files, make) for name, (files, make) in PARTS.items()))


def _paths(kubernetes: Path, etcd: Path, helm: Path) -> Programs:
    return Programs(
        *(kubernetes / name for name in KUBERNETES_PROGRAMS), etcd / "etcd", helm / "helm"
    )


def _build_kubernetes(directory: Path) -> None:
    # Built from a copy, because Go writes beside go.mod.
    source = directory / "source"
    shutil.copytree(MODULE, source)
    version = f"-s -w -X k8s.io/component-base/version.gitVersion={KUBERNETES}"
    go_command(
        *("build", "-trimpath", "-ldflags", version, "-o", f"{directory}/"),
        *(f"k8s.io/kubernetes/cmd/{name}" for name in KUBERNETES_PROGRAMS),
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


if __name__ == "__main__":
    try:
        print(build().apiserver.parent.parent)
    except NotAvailableError as error:
        sys.exit(f"the programs of Kubernetes cannot be made here: {error}")
