"""Addresses of directories: paths and URLs. A misspelt URL must not become a local directory."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from ..errors import UsageError

SCHEMES: Final = frozenset(
    {
        "file",
        "s3",
        "s3a",
        "s3n",
        "gs",
        "gcs",
        "hdfs",
        "abfs",
        "abfss",
        "wasb",
        "az",
        "http",
        "https",
    }
)
"""The schemes that people write before `://`. Not all of them are supported."""
STORAGE_SCHEMES: Final = ("file", "s3", "s3a", "memory")
"""The kinds of checkpoint storage. `memory` ends with the process."""
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(:/*|//+)(.*)", re.DOTALL)


def check_address(address: str, usable: Collection[str]) -> None:
    """Refuse a URL that is misspelt, such as `s3:/bucket`, or whose scheme is not in `usable`.

    Raises:
        UsageError: it names the right form.
    """
    found = _URL.match(address)
    if found is None:
        return
    written, separator, rest = found.groups()
    scheme = written.lower()
    slashes = ("://", ":///") if written == "file" else ("://",)
    if separator in slashes and written in usable:
        return
    if scheme in usable and (separator.startswith("//") or ":" in separator):
        right = f"file:///{rest}" if scheme == "file" else f"{scheme}://{rest}"
        raise UsageError(
            f"the address is malformed address=`{address}`",
            fix=f"write `{right}`, or `./{address}` for a directory of that name",
        )
    if separator.startswith("://") or scheme in SCHEMES:
        kinds = ", ".join(f"{each}://" for each in sorted(usable))
        raise UsageError(
            f"no such kind of storage scheme=`{written}` address=`{address}`",
            fix=f"write a directory, or an address that begins with one of {kinds}",
        )
