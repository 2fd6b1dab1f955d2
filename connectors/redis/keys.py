"""Scripts of the sink, and keys of it exactly once: staged entries, the index of them, markers of writers.

A script takes the entries of a chunk as one text, as `packed.py` makes it. So a chunk is one request with
one answer, which costs the client a fraction of a command for each entry.

Exactly once, entries between two barriers are *staged* in a list of chunks. Each chunk is moved to the
stream by one script, which is atomic: it adds the entries, removes the chunk from the list, and notes both
in the marker of the writer. So a chunk is added once, also if the script is repeated, and the marker tells
a chunk that was added from one that was lost. A chunk is small, because the server does nothing else while
a script runs.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final

import msgspec

from ...errors import UsageError
from ...operators.base import OperatorContext

MARKER_S: Final = 90 * 24 * 3600
"""A marker is forgotten so long after its last change. Nothing is added twice without it."""
_TAG: Final = re.compile(r"[^{}]*\{([^}]+)\}")

STAGE: Final = """
local there = redis.call('LLEN', KEYS[1])
local chunk = tonumber(ARGV[1])
if there > chunk then return 1 end
if there < chunk then return 0 end
redis.call('RPUSH', KEYS[1], ARGV[2])
if chunk == 0 then redis.call('HSET', KEYS[2], KEYS[1], '1') end
return 1
"""
"""Adds a chunk to staged entries. Returns 0 if those before it are not there."""

_ADD: Final = """
local function add(stream, packed, limit)
  local at = 1
  while at <= #packed do
    local texts, entry = 0, {}
    texts, at = struct.unpack('>I4', packed, at)
    for text = 1, texts do entry[text], at = struct.unpack('>I4c0', packed, at) end
    if limit == '' then
      redis.call('XADD', stream, '*', unpack(entry))
    else
      redis.call('XADD', stream, 'MAXLEN', '~', limit, '*', unpack(entry))
    end
  end
end
"""
"""The function of scripts that adds packed entries to a stream."""

ADD: Final = f"""{_ADD}
add(KEYS[1], ARGV[1], ARGV[2])
return 1
"""
"""Adds a chunk to the stream."""

MOVE: Final = f"""{_ADD}
local stream, staged, index, marker = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local number, chunk, chunks = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local known = redis.call('HMGET', marker, 'number', 'chunks')
local last, done = tonumber(known[1] or '0'), tonumber(known[2] or '0')
if last < tonumber(ARGV[6]) then return -1 end
if last > number or (last == number and done > chunk) then return 1 end
if last < number then done = 0 end
if done ~= chunk or redis.call('LLEN', staged) ~= chunks - chunk then return 0 end
add(stream, redis.call('LINDEX', staged, 0), ARGV[4])
redis.call('LPOP', staged)
redis.call('HSET', marker, 'number', ARGV[1], 'chunks', chunk + 1)
redis.call('EXPIRE', marker, ARGV[5])
if chunk + 1 == chunks then redis.call('HDEL', index, staged) end
return 1
"""
"""Moves the next chunk to the stream, unless that was done.

Returns 0 if the chunk is lost, and -1 if the marker of an epoch before it is: then the server has forgotten
what it had acknowledged, and perhaps the entries of that epoch as well.
"""

DROP: Final = """
redis.call('DEL', KEYS[1])
redis.call('HDEL', KEYS[2], KEYS[1])
"""
"""Deletes staged entries."""


class Staged(msgspec.Struct):
    """The committable of one epoch: what any process needs to commit it.

    Attributes:
        stream: to which the entries belong.
        key: of the staged entries.
        index: the key of the index of staged entries.
        marker: the key of the marker of the writer.
        number: of the epoch of the writer, by which the marker advances.
        chunks: of the staged entries.
        entries: in all of them.
    """

    stream: str
    key: str
    index: str
    marker: str
    number: int
    chunks: int
    entries: int


@dataclass(frozen=True, slots=True)
class SinkKeys:
    """The keys of one sink of a job, all of them in the slot of its stream in a cluster."""

    prefix: str

    @classmethod
    def of(cls, stream: str, context: OperatorContext) -> SinkKeys:
        """Return the keys of the sink of a context."""
        names = f"{context.job_name}\0{context.operator_name}".encode()
        known = hashlib.blake2s(names, digest_size=8).hexdigest()
        return cls(f"hg:{{{_tag_of(stream)}}}:{known}:")

    @staticmethod
    def check_cluster(stream: str) -> None:
        """Check that other keys can be in the slot of the stream.

        Raises:
            UsageError: they cannot, because of its name.
        """
        if _TAG.match(stream) is None and "}" in stream:
            raise UsageError(
                f"no other key can be in the slot of the stream stream=`{stream}`",
                fix="rename it; a name such as `{orders}:eu` has the hash tag `orders`",
            )

    @property
    def index(self) -> str:
        """The hash whose fields are the keys of all staged entries."""
        return f"{self.prefix}staged"

    def staged(self, writer: str) -> str:
        """Return a key for staged entries."""
        return f"{self.prefix}{writer}"

    def marker(self, writer: str) -> str:
        """Return the key of the marker of a writer."""
        return f"{self.prefix}marker:{writer}"


def _tag_of(stream: str) -> str:
    """Return the part of a name that decides on its slot."""
    found = _TAG.match(stream)
    return stream if found is None else found[1]
