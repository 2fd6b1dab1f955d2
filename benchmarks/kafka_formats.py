"""Formats of messages: rows per second and CPU time, `python benchmarks/kafka_formats.py`.

Batches of 8,192 messages in memory are decoded into columns, and columns are encoded into messages, in one
thread, without a broker. fastavro, which goes record by record, is measured for comparison.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv

from headgate.connectors import avro_format, protobuf_format
from headgate.connectors.formats.avro_schema import avro_of
from headgate.connectors.formats.format import Format
from headgate.connectors.formats.text import to_format

ROWS, ROUNDS, SECONDS = 8192, 5, 0.4
SIZES = {"100 B": 55, "1 KB": 950}
"""The length of a text of each record, by the size that its JSON has about."""
FORMATS: dict[str, Callable[[], Format]] = {
    "raw": lambda: to_format("raw"),
    "csv": lambda: to_format("csv"),
    "json": lambda: to_format("json"),
    "avro": avro_format,
    "protobuf": lambda: protobuf_format("Row", descriptor=descriptor()),
}
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("user", pa.string()),
        ("text", pa.string()),
        ("at", pa.timestamp("ms", "UTC")),
        ("price", pa.float64()),
    ]
)


def rows(length: int) -> pa.RecordBatch:
    """Records with a text of this length."""
    numbers = np.arange(ROWS)
    times = pa.array(1_700_000_000_000 + numbers * 7).cast(SCHEMA.field("at").type)
    texts = [f"{n:08}" + "x" * (length - 8) for n in range(ROWS)]
    users = [f"u{n % 1000}" for n in range(ROWS)]
    columns = [pa.array(numbers), pa.array(users), pa.array(texts), times, pa.array(numbers / 4)]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def descriptor() -> bytes:
    """The columns as a message of Protobuf."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

    file = FileDescriptorProto(name="row.proto", syntax="proto3")
    file.dependency.append("google/protobuf/timestamp.proto")
    message = file.message_type.add(name="Row")
    for number, (name, kind) in enumerate(
        {"id": 3, "user": 9, "text": 9, "at": 11, "price": 1}.items(), 1
    ):
        stamp = ".google.protobuf.Timestamp" if kind == 11 else None
        message.field.add(name=name, number=number, type=kind, label=1, type_name=stamp)
    return FileDescriptorSet(file=[file]).SerializeToString()


def us_per_row(work: Callable[[], object]) -> float:
    """CPU time per row; the median of some rounds."""
    work()
    found = []
    for _ in range(ROUNDS):
        calls, start = 0, time.process_time()
        while time.process_time() - start < SECONDS:
            work()
            calls += 1
        found.append((time.process_time() - start) / calls / ROWS * 1e6)
    return median(found)


def show(name: str, size: str, messages: Sequence[Any], read_us: float, write_us: float) -> None:
    length = sum(len(each or b"") for each in messages) / len(messages)
    read, write = (
        f"{1e3 / us:8,.0f} {us:8.2f}" if us else f"{'':17}" for us in (read_us, write_us)
    )
    print(f"{name:10} {size:6} {length:8.0f} {read} {write}", flush=True)


def measure(name: str, size: str, batch: pa.RecordBatch) -> None:
    format = FORMATS[name]()
    if name == "raw":
        batch = batch.select(["text"])
    if name == "csv":
        lines = io.BytesIO()
        pacsv.write_csv(batch, lines, pacsv.WriteOptions(include_header=False))
        messages: Sequence[Any] = lines.getvalue().split(b"\n")[:-1]
        write_us = 0.0
    else:
        encode = format.encoder(batch.schema, "topic")
        messages = encode(batch)
        write_us = us_per_row(lambda: encode(batch))
    if name == "avro":
        format = avro_format(schema=avro_of(batch.schema, "Value"))
    decode = format.decoder(batch.schema)
    assert not decode(messages).bad
    show(name, size, messages, us_per_row(lambda: decode(messages)), write_us)
    if name == "avro":
        schema: Any = fastavro.parse_schema(avro_of(batch.schema, "Value"))

        def read() -> pa.RecordBatch:
            found = [fastavro.schemaless_reader(io.BytesIO(m), schema, None) for m in messages]
            return pa.RecordBatch.from_pylist(found, schema=SCHEMA)

        show("fastavro", size, messages, us_per_row(read), 0.0)


def main() -> None:
    print(f"{'format':10} {'':6} {'bytes':>8} {'read':>8} {'':8} {'write':>8}")
    print(f"{'':10} {'':6} {'':8} {'k/s':>8} {'us':>8} {'k/s':>8} {'us':>8}")
    for size, length in SIZES.items():
        batch = rows(length)
        for name in FORMATS:
            if not sys.argv[1:] or name in sys.argv[1:]:
                measure(name, size, batch)


if __name__ == "__main__":
    main()
