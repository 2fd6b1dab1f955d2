"""Random and damaged CSV and JSON lines: what is read does not depend on how a file is cut.

A file is read whole, and again in parts of random sizes with batches of random sizes. Both must give the
same rows and the same bad records, in order. JSON lines that are plainly right must be read as they are.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from headgate.connectors import csv_source, json_source
from headgate.connectors.files.blocks import FileSplit
from headgate.connectors.files.source import FileSource
from headgate.errors import HeadgateError, InternalError

SCHEMA = {"n": "long", "f": "float", "s": "string", "b": "boolean", "at": "timestamp"}
_TEXTS = ["", "a", "ä€😀", "x" * 300, 'say "hi"', "a,b", "null", " pad ", "\t", "'", "\\", "0"]
_ODD = [
    "NaN", "inf", "-0", "1e400", "9223372036854775807", "9223372036854775808", "1.5", "0x10", "true",
    "TRUE", "nan", "2025-13-01", "2025-01-01T00:00:00Z", "0001-01-01", "9999-12-31 23:59:59",
    "300000-01-01", "[]", "{}", '"', '""', "\ufeff", "\x00", "\u2028",
]  # fmt: skip


def run(rng: random.Random) -> None:
    """One file, read in several ways."""
    kind = rng.choice(["csv", "json"])
    data = _csv(rng) if kind == "csv" else _json(rng)
    for _ in range(rng.choice([0, 0, 0, 1, 2, 10])):
        data = _damaged(rng, data)
    with tempfile.TemporaryDirectory(prefix="headgate-fuzz-") as directory:
        path = Path(directory) / f"records.{kind}"
        path.write_bytes(data)
        whole = _read(path, kind, split_bytes=1 << 30, batch_rows=1 << 20)
        cut = _read(
            path,
            kind,
            split_bytes=rng.choice([1, 7, 64, 1_000]),
            batch_rows=rng.choice([1, 2, 5, 64]),
        )
        assert cut == whole, f"{kind}: cut into parts it is read as\n{cut}\nand whole as\n{whole}"


def _read(path: Path, kind: str, *, split_bytes: int, batch_rows: int) -> Any:
    """Rows and bad records with their places; or the error."""
    make = csv_source if kind == "csv" else json_source
    source: FileSource = make(
        str(path),
        SCHEMA,
        on_bad_record="side_output",
        split_bytes=split_bytes,
        batch_rows=batch_rows,
    )
    rows: list[tuple[Any, ...]] = []
    bad: list[tuple[int, str]] = []
    try:
        for split in source.splits(1):
            reader = source.open_split(msgspec.msgpack.decode(split, type=FileSplit), {})
            last = False
            while not last:
                for piece in reader.next_block():
                    if piece.batch is not None:
                        # repr: a NaN is equal to itself then, and -0.0 is not 0.0
                        columns = [map(repr, column.to_pylist()) for column in piece.batch.columns]
                        rows += zip(*columns, strict=True)
                    bad += [(record.offset, record.record) for record in piece.bad]
                    last = piece.last
            reader.close()
    except InternalError:
        raise
    except HeadgateError as error:
        return type(error).__name__, error.message
    return rows, bad


def _csv(rng: random.Random) -> bytes:
    names = list(SCHEMA)
    if rng.random() < 0.3:
        rng.shuffle(names)
    end = rng.choice(["\n", "\n", "\r\n"])
    lines = [",".join(names)]
    for _ in range(rng.randrange(40)):
        lines.append(",".join(_csv_value(rng, name) for name in names))
    return (end.join(lines) + rng.choice(["", end, end * 2])).encode(errors="surrogatepass")


def _csv_value(rng: random.Random, name: str) -> str:
    text = str(_value(rng, name)) if rng.random() < 0.9 else rng.choice(_ODD)
    if rng.random() < 0.3 or any(character in text for character in ',"'):
        return '"' + text.replace('"', '""') + '"'
    return text


def _json(rng: random.Random) -> bytes:
    lines = []
    for _ in range(rng.randrange(40)):
        if rng.random() < 0.1:
            lines.append(rng.choice(_ODD))
            continue
        names = [name for name in SCHEMA if rng.random() < 0.95]
        fields: dict[str, Any] = {name: _value(rng, name) for name in names}
        if rng.random() < 0.1:
            fields[rng.choice(["n", "other"])] = rng.choice(
                [None, [], {}, [{"a": 1}], True, "x", 1.5]
            )
        lines.append(json.dumps(fields, ensure_ascii=rng.random() < 0.5))
    return ("\n".join(lines) + rng.choice(["", "\n"])).encode(errors="surrogatepass")


def _value(rng: random.Random, name: str) -> Any:
    match name:
        case "n":
            return rng.choice([0, 1, -1, rng.randrange(-(2**63), 2**63), rng.randrange(1000)])
        case "f":
            return rng.choice([0.0, -1.5, rng.random(), rng.random() * 1e300, 1e-300])
        case "s":
            return rng.choice(_TEXTS)
        case "b":
            return rng.choice(["true", "false"]) if rng.random() < 0.1 else rng.random() < 0.5
        case _:
            day = f"20{rng.randrange(100):02}-0{rng.randrange(1, 10)}-1{rng.randrange(10)}"
            return f"{day}T01:02:{rng.randrange(60):02}"


def _damaged(rng: random.Random, data: bytes) -> bytes:
    if not data:
        return data
    at = rng.randrange(len(data))
    match rng.randrange(5):
        case 0:
            return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        case 1:
            return data[:at]
        case 2:
            return data[:at] + rng.randbytes(rng.randrange(1, 5)) + data[at:]
        case 3:
            odd = rng.choice(_ODD).encode()
            return data[:at] + odd + data[at:]
        case _:
            other = rng.randrange(len(data))
            return data[: min(at, other)] + data[max(at, other) :]
