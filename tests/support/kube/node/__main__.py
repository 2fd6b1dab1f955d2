"""A StreamJob in real containers: `make test-k8s-node`, as root.

The image is built from the Dockerfile by buildah and loaded into containerd. Then a user's steps are made:
both charts are installed, the example is applied, and its output is that of one process.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from headgate.testing.servers.programs import NotAvailableError, cache_dir
from headgate.tests.support.kube import image, programs
from headgate.tests.support.kube.node import machine, packages, trial
from headgate.tests.support.kube.node.configuration import PAUSE

MODULE = "headgate.tests.support.kube.node"
IMAGES = ("headgate", "pause")


def images() -> Path:
    """The directory with both images as archives, which containerd takes."""
    buildah = image.Buildah(cache_dir() / "image")
    image.timed("the base", image.build_base, buildah)
    image.timed("the image", image.build, buildah)
    container = buildah("from", image.BASE)
    buildah("config", "--entrypoint", '["/bin/sleep", "infinity"]', container)
    buildah("commit", "--quiet", container, PAUSE)
    buildah("rm", container)
    directory = cache_dir() / "node-images"
    directory.mkdir(exist_ok=True)
    for name, tag in zip(IMAGES, (image.IMAGE, PAUSE), strict=True):
        archive = directory / f"{name}.tar"
        archive.unlink(missing_ok=True)
        buildah("push", "--quiet", tag, f"docker-archive:{archive}:{tag}")
    return directory


def main() -> None:
    image.check_host()
    try:
        programs.build()
        programs.build_node()
        packages.unpacked()
    except NotAvailableError as error:
        sys.exit(str(error))
    images()
    # It is removed when the mounts in it are gone, together with the namespaces.
    with tempfile.TemporaryDirectory(prefix="hg-node-") as directory:
        machine.inside(MODULE, directory)


def run_inside(directory: Path) -> None:
    """Do the work inside the namespaces."""
    began = time.monotonic()
    found = (programs.find(), programs.build_node(), packages.unpacked())
    with machine.running(*found, directory) as cluster:
        print(f"==> the node is ready: {time.monotonic() - began:.0f} s", flush=True)
        for each in IMAGES:
            archive = cache_dir() / "node-images" / f"{each}.tar"
            machine.containerd_command(directory, "images", "import", str(archive))
        print(f"==> the images are loaded: {time.monotonic() - began:.0f} s", flush=True)
        trial.run(cluster, directory, image.IMAGE)


if __name__ == "__main__":
    if sys.argv[1:]:
        run_inside(Path(sys.argv[1]))
    else:
        main()
