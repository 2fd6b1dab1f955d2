"""The programs of a node that come from Debian: unpacked, and not installed."""

from __future__ import annotations

import os
from pathlib import Path

from headgate.testing.servers.programs import NotAvailableError, made_once, run_command

PROGRAMS = ("containerd", "runc", "containernetworking-plugins", "nftables", "dnsmasq-base")
LIBRARIES = (
    *("libseccomp2", "libnftables1", "libnftnl11", "libjansson4", "libmnl0", "libxtables12"),
    *("libedit2", "libbsd0", "libgmp10", "libidn2-0", "libnettle8", "libhogweed6", "libdbus-1-3"),
    *("libnetfilter-conntrack3", "libnfnetlink0"),
)
"""Libraries that they need and a small Debian may not have."""
PLUGINS = "usr/lib/cni"
WANTED = (
    "usr/bin/containerd",
    "usr/sbin/runc",
    "usr/sbin/nft",
    "usr/sbin/dnsmasq",
    f"{PLUGINS}/bridge",
)


def unpacked() -> Path:
    """The directory with the packages' files; it is made if it is not in the cache.

    Raises:
        NotAvailableError: the packages cannot be had.
    """
    return made_once("node-debian", WANTED, _unpack)


def environment(directory: Path) -> dict[str, str]:
    """The variables with which these programs find each other and their libraries."""
    path = [str(directory / each) for each in ("usr/sbin", "usr/bin", "sbin")]
    libraries = [str(directory / each / "x86_64-linux-gnu") for each in ("usr/lib", "lib")]
    return {
        **os.environ,
        "PATH": ":".join([*path, os.environ["PATH"]]),
        "LD_LIBRARY_PATH": ":".join(libraries),
    }


def _unpack(directory: Path) -> None:
    download = ("apt-get", "download", *PROGRAMS, *LIBRARIES)
    try:
        run_command(*download, seconds_max=300, cwd=directory)
    except NotAvailableError:
        # A fresh container has no lists of packages.
        run_command("apt-get", "update", seconds_max=300)
        run_command(*download, seconds_max=300, cwd=directory)
    for package in directory.glob("*.deb"):
        run_command("dpkg-deb", "-x", str(package), str(directory), seconds_max=60)
        package.unlink()
