"""Build the image of the Dockerfile without Docker, and run a job in it: `make test-image`, as root.

It needs Debian's `buildah` and `debootstrap`. The base is not the one of the Dockerfile, which would come
from a registry, but a minimal Debian with its Python: this tries the Dockerfile, and not Docker Hub.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import headgate
from headgate.testing.servers.programs import cache_dir

ROOT = Path(headgate.__file__).resolve().parent
PACKAGES = "python3,python3-venv,ca-certificates"
BASE, IMAGE = "localhost/headgate-base:slim", "localhost/headgate:test"
NOT_IN_SLIM = (
    *("usr/share/doc", "usr/share/man", "usr/share/locale"),
    *("var/cache/apt", "var/lib/apt/lists"),
)
"""Directories of a Debian that the slim images of registries do not have either."""
TRUSTED = ("/etc/ssl/certs", "/etc/pip.conf")
"""Files that the build needs to reach the package index, where they exist."""
JOB = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {name: smoke}
spec:
  checkpoint: {every: 1s, storage: /tmp/checkpoints}
  sources:
    numbers: {generator: {fields: {n: sequence}, rows: 1000}}
  sinks:
    out: {from: numbers, blackhole: {}}
"""


class Buildah:
    """Buildah with a separate store, and without a daemon or rights beyond those of root."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "registries.conf").touch()
        self.policy = directory / "policy.json"
        self.policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')

    def __call__(self, verb: str, *arguments: str, show: bool = False) -> str:
        """Run a verb, and return what it wrote."""
        store = ["--root", f"{self.directory}/store", "--runroot", f"{self.directory}/run"]
        policy = (
            ["--signature-policy", str(self.policy)] if verb in ("from", "commit", "bud") else []
        )
        isolation = ["--isolation=chroot"] if verb in ("bud", "run") else []
        done = subprocess.run(
            ["buildah", *store, "--storage-driver=vfs", verb, *policy, *isolation, *arguments],
            env={
                **os.environ,
                "XDG_RUNTIME_DIR": str(self.directory),
                "CONTAINERS_REGISTRIES_CONF": f"{self.directory}/registries.conf",
            },
            stdout=None if show else subprocess.PIPE,
            text=True,
            check=True,
        )
        return (done.stdout or "").strip()


def build_base(buildah: Buildah) -> None:
    """Build a minimal Debian with Python, unless it was built before."""
    if BASE in buildah("images", "--format", "{{.Name}}:{{.Tag}}").split():
        return
    tree = buildah.directory / "debian"
    shutil.rmtree(tree, ignore_errors=True)
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(tree)]
    subprocess.run(command, check=True)
    for path in NOT_IN_SLIM:
        shutil.rmtree(tree / path)
    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, str(tree), "/")
    buildah("config", "--env", f"PATH={os.defpath}", container)
    buildah("commit", "--quiet", container, BASE)
    buildah("rm", container)
    shutil.rmtree(tree)


def build(buildah: Buildah) -> None:
    """Build the image of the Dockerfile."""
    volumes = [f"--volume={path}:{path}:ro" for path in TRUSTED if Path(path).exists()]
    arguments = ["--format=docker", f"--build-arg=BASE={BASE}", "--network=host"]
    files = ["--tag", IMAGE, "--file", str(ROOT / "Dockerfile"), str(ROOT)]
    buildah("bud", *arguments, *volumes, *files, show=True)


def run(buildah: Buildah) -> None:
    """Run a job in the image, as its user, and the command line of the operator."""
    container = buildah("from", IMAGE)
    try:
        job = buildah.directory / "smoke.yaml"
        job.write_text(JOB)
        mounted = f"--volume={job}:/home/headgate/smoke.yaml:ro"
        print(buildah("run", container, "--", "headgate", "--version"))
        print(buildah("run", container, "--", "id", "-u"))
        buildah("run", container, "--", "headgate", "k8s", "operator", "--help")
        for cluster in ("in-process", "local"):  # local: with Ray
            command = ["headgate", "run", "--cluster", cluster, "smoke.yaml"]
            print(buildah("run", mounted, container, "--", *command))
    finally:
        buildah("rm", container)


def timed(what: str, step: Callable[[Buildah], None], buildah: Buildah) -> None:
    began = time.monotonic()
    step(buildah)
    print(f"==> {what}: {time.monotonic() - began:.0f} s", flush=True)


def check_host() -> None:
    """Exit if images cannot be built on this machine."""
    missing = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        sys.exit(
            "this needs root, and buildah and debootstrap: apt-get install buildah debootstrap"
        )


def main() -> None:
    check_host()
    buildah = Buildah(cache_dir() / "image")
    timed("the base", build_base, buildah)
    timed("the image", build, buildah)
    timed("a job in it", run, buildah)
    print(buildah("images", "--format", "{{.Name}}:{{.Tag}} {{.Size}}"))


if __name__ == "__main__":
    main()
