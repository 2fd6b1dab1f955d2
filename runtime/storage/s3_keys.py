"""The keys of objects in a bucket: below one prefix, or with entropy in the prefix of state files.

S3 limits the rate of requests per prefix of keys. If the address of a storage contains the text
`s3.entropy.key`, the keys of state files of checkpoints have some characters there that differ from file to
file, and the keys of all other objects have nothing there. The characters are a hash of the name, so that
the key of a name is known without a look at anything else.
"""

from __future__ import annotations

from typing import Final

import xxhash

from ..protocol import names

ENTROPY_MAX: Final = 16
"""The most characters of entropy, those of the hash."""
_FILES: Final = f"{names.CHECKPOINTS}/"


class Keys:
    """The keys of the objects below one root, by their names."""

    def __init__(self, prefix: str, entropy_key: str = "", entropy_length: int = 0) -> None:
        """Begin.

        Args:
            prefix: the root, without a slash at its ends.
            entropy_key: the text that is replaced; empty: none is.
            entropy_length: the number of characters that replace it.
        """
        before, found, after = prefix.partition(entropy_key) if entropy_key else (prefix, "", "")
        self._before = before
        self._after = f"{after}/" if after else "/"
        self._length = min(entropy_length, ENTROPY_MAX) if found else 0
        joined = (
            f"{before}{after.removeprefix('/')}" if before.endswith("/") else f"{before}{after}"
        )
        plain = joined.strip("/")
        self.root = f"{plain}/" if plain else ""
        """What the keys of all objects without entropy begin with."""

    def key(self, name: str) -> str:
        """Return the key of an object."""
        if not self._length or not name.startswith(_FILES):
            return f"{self.root}{name}"
        entropy = xxhash.xxh3_64_hexdigest(name.encode())[: self._length]
        return f"{self._before}{entropy}{self._after}{name}"

    def name(self, key: str) -> str | None:
        """Return the name of the object with a key; None: it is not below this root."""
        if self._length and key.startswith(self._before):
            rest = key[len(self._before) + self._length :]
            name = rest.removeprefix(self._after)
            if name != rest and name.startswith(_FILES) and self.key(name) == key:
                return name
        if key.startswith(self.root):
            name = key[len(self.root) :]
            return name if self.key(name) == key else None
        return None

    def listed(self, prefix: str) -> str:
        """Return what the keys of all objects begin with whose names begin with a text.

        Keys of other roots may begin with it as well, if there is entropy.
        """
        files = prefix.startswith(_FILES) or _FILES.startswith(prefix)
        return self._before if self._length and files else f"{self.root}{prefix}"
