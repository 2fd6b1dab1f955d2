"""The wire format: everything that goes in comes out, and nothing wrong is taken."""

import datetime
import decimal
import enum
import pickletools
import subprocess
import sys
import threading
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from headgate.errors import DataError, ExchangeError
from headgate.operators.elements import (
    WATERMARK_MAX,
    WATERMARK_MIN,
    CancelCheckpointMarker,
    CheckpointBarrier,
    CheckpointOptions,
    ColumnBatch,
    EndOfData,
    EndOfPartition,
    LatencyMarker,
    ObjectBatch,
    Watermark,
    WatermarkStatus,
)
from headgate.runtime.exchange.wire import (
    HEADER,
    HEADER_BYTES,
    ElementDecoder,
    ElementEncoder,
    FrameKind,
    frame,
    share_nothing,
    unpack_header,
)


def frames_of(parts):
    data = b"".join(bytes(part) for part in parts)
    while data:
        header = unpack_header(data)
        end = HEADER_BYTES + header.length
        yield header, bytearray(data[HEADER_BYTES:end])
        data = data[end:]


class Wire:
    """An encoder and a decoder of one channel."""

    def __init__(self):
        self.encoder, self.decoder = ElementEncoder(5), ElementDecoder(5)
        self.kinds = []

    def send(self, batch, backlog=0):
        result = None
        for header, payload in frames_of(self.encoder.batch(batch, backlog)):
            self.kinds.append(header.kind)
            assert header.backlog == backlog
            assert header.channel == 5
            result = self.decoder.decode(header, payload)
        return result


UTC = datetime.UTC
COLUMNS = {
    "int8": pa.array([1, None, -3], pa.int8()),
    "uint64": pa.array([2**64 - 1, 0, None], pa.uint64()),
    "float": pa.array([1.5, float("inf"), None]),
    "bool": pa.array([True, None, False]),
    "string": pa.array(["a", None, "ünïcode " * 50]),
    "large_string": pa.array(["a", None, ""], pa.large_string()),
    "string_view": pa.array(["a" * 30, None, ""], pa.string_view()),
    "binary": pa.array([b"\0\xff", None, b""]),
    "fixed": pa.array([b"ab", None, b"cd"], pa.binary(2)),
    "decimal": pa.array([decimal.Decimal("1.25"), None, decimal.Decimal("-3.50")]),
    "date": pa.array([datetime.date(2024, 2, 29), None, datetime.date(1, 1, 1)]),
    "timestamp": pa.array([0, None, 5], pa.timestamp("us", "Europe/Berlin")),
    "naive": pa.array([0, None, 5], pa.timestamp("ns")),
    "duration": pa.array([1, None, 3], pa.duration("ms")),
    "null": pa.nulls(3),
    "list": pa.array([[1, 2], None, []], pa.list_(pa.int32())),
    "struct": pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": None}]),
    "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
    "nested": pa.array([[{"a": [1]}], None, [{"a": None}]]),
    "dictionary": pa.array(["x", None, "x"]).dictionary_encode(),
    "dictionary8": pa.array(["x", None, "y"], pa.dictionary(pa.int8(), pa.string())),
    "list_of_dictionary": pa.array(
        [["x"], None, ["y", "x"]], pa.list_(pa.dictionary(pa.int16(), pa.string()))
    ),
    "union": pa.UnionArray.from_sparse(
        pa.array([0, 1, 0], pa.int8()), [pa.array([1, 2, 3]), pa.array(["a", "b", "c"])]
    ),
    "runs": pa.RunEndEncodedArray.from_arrays([2, 3], [7, 8]),
}


@pytest.mark.parametrize("with_times", [False, True])
@pytest.mark.parametrize("name", COLUMNS)
def test_columns_survive(name, with_times):
    """Whole batches, slices and empty batches of each type, with and without event times."""
    data = pa.record_batch({"c": COLUMNS[name], "n": [1, 2, 3]})
    times = np.array([10, -20, 2**62]) if with_times else None
    whole = ColumnBatch(data, times)
    wire = Wire()
    for batch in (whole, whole.slice(1, 2), whole.slice(2, 0), whole):
        received = wire.send(batch, backlog=3)
        assert received.data.schema.equals(data.schema, check_metadata=True)
        assert received.data.to_pylist() == batch.data.to_pylist()
        received.data.validate(full=True)
        if with_times:
            assert received.timestamps.dtype == np.int64
            assert received.timestamps.tolist() == batch.timestamps.tolist()
        else:
            assert received.timestamps is None


def test_schema_travels_once_and_again_when_it_changes():
    wire = Wire()
    plain = ColumnBatch(pa.record_batch({"a": [1]}))
    tagged = ColumnBatch(plain.data.replace_schema_metadata({"unit": "m"}))
    for batch in (plain, plain, tagged, tagged, plain):
        assert wire.send(batch).data.schema.equals(batch.data.schema, check_metadata=True)
    assert [kind.name for kind in wire.kinds] == [
        "SCHEMA", "COLUMNS", "COLUMNS", "SCHEMA", "COLUMNS", "COLUMNS", "SCHEMA", "COLUMNS",
    ]  # fmt: skip


def test_rows_without_columns_and_doubled_names_survive():
    wire = Wire()
    empty = pa.record_batch({"a": [1, 2, 3]}).select([])
    assert len(wire.send(ColumnBatch(empty))) == 3
    received = wire.send(ColumnBatch(empty, np.arange(3)))
    assert len(received) == 3
    assert received.data.num_columns == 0
    doubled = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    assert wire.send(ColumnBatch(doubled)).data.equals(doubled)


def test_unused_dictionary_values_stay_at_home():
    names = pa.array([f"{n:0100d}" for n in range(10_000)])
    column = pa.DictionaryArray.from_arrays(pa.array([5, None, 9_999], pa.int32()), names)
    batch = ColumnBatch(pa.record_batch({"c": column}))
    assert sum(len(part) for part in ElementEncoder(1).batch(batch, 0)) < 5_000
    received = Wire().send(batch)
    assert received.data.schema == batch.data.schema
    assert received.data.to_pylist() == batch.data.to_pylist()


def test_objects_keep_their_types():
    records = [(1, "a"), [1, "a"], {"k": {1, 2}}, None, b"x", decimal.Decimal("1.0"), float("inf")]
    received = Wire().send(ObjectBatch(records, np.arange(len(records))))
    assert received.records == records
    assert [type(each) for each in received.records] == [type(each) for each in records]
    assert received.timestamps.tolist() == list(range(len(records)))
    assert Wire().send(ObjectBatch([1])).timestamps is None


def test_objects_of_a_local_class_survive():
    """Classes of the user's script cannot be pickled by reference."""

    class Click:
        def __init__(self, url):
            self.url = url

    wire = Wire()
    assert wire.send(ObjectBatch([Click("/a")])).records[0].url == "/a"
    assert wire.send(ObjectBatch([Click("/b")])).records[0].url == "/b"


class Colour(enum.IntEnum):
    RED = 1


class Point(NamedTuple):
    x: int
    y: str


PLAIN = [
    lambda n: n,
    lambda n: f"name {n}",
    lambda n: (n, 1),
    lambda n: (f"name {n}", n / 3, n % 2 == 0, None, b"bytes %d" % n),
    lambda n: (),
]
NOT_PLAIN = [
    lambda n: (n, "click"),  # a constant, so that all share it
    lambda n: [n, 1],
    lambda n: {"n": n},
    lambda n: (n, (n, 1)),
    lambda n: (n, Colour.RED),
    lambda n: Point(n, "x"),
    lambda n: (n, np.int64(n)),
    lambda n: (n, datetime.date(2025, 1, 1)),
]


def opcodes_of(batch):
    """The names of the pickle's instructions in the last frame of a batch."""
    *_, (_, payload) = frames_of(ElementEncoder(5).batch(batch, 0))
    return {opcode.name for opcode, _, _ in pickletools.genops(bytes(payload))}


@pytest.mark.parametrize("with_times", [False, True])
@pytest.mark.parametrize("make", [*PLAIN, *NOT_PLAIN])
@pytest.mark.parametrize("count", [1, 2, 100, 2048])
def test_records_that_share_nothing_are_pickled_without_a_memo(make, count, with_times):
    records = [make(n) for n in range(count)]
    times = np.arange(count) if with_times else None
    got = Wire().send(ObjectBatch(records, times))
    assert got.records == records
    assert list(map(types_of, got.records)) == list(map(types_of, records))
    assert (got.timestamps is None) == (times is None)
    assert times is None or got.timestamps.tolist() == times.tolist()
    if count > 1 and not with_times:
        assert ("MEMOIZE" in opcodes_of(ObjectBatch(records))) == (make in NOT_PLAIN)


def types_of(value):
    inner = [types_of(each) for each in value] if isinstance(value, tuple | list) else []
    return type(value), inner


def circle():
    members = []
    members.append(members)
    return members


def test_a_sample_that_misleads_loses_nothing():
    """A list that refers to itself, one that two records share, and a class of the script."""
    Local = type("Local", (), {})
    shared, local = [1], Local()
    odd = [circle(), (shared, shared), Point(1, "x"), Colour.RED, np.int64(3), {"a": {"b": "c"}}]
    for special in ([each] for each in odd):
        plain = [(n, 1) for n in range(2000)]
        records = plain[:1001] + special + plain
        assert share_nothing(records)
        got = Wire().send(ObjectBatch(records)).records
        assert got[:1001] + got[1002:] == plain[:1001] + plain
        assert type(got[1001]) is type(special[0])
        assert repr(got[1001]) == repr(special[0])
    got = Wire().send(ObjectBatch([(1, 2)] * 40 + [local])).records
    assert type(got[40]).__name__ == "Local"


def test_a_record_that_fits_only_with_a_memo_is_sent():
    """The sample does not see that its two halves are one object."""
    text = b"x" * 700_000
    records = [(n, 1) for n in range(40)]
    records[1] = (text, text)
    encoder = ElementEncoder(5, payload_bytes_max=1_000_000)
    assert share_nothing(records)
    ((_, payload),) = frames_of(encoder.batch(ObjectBatch(records), 0))
    assert len(payload) < 1_000_000


def test_unpicklable_record_is_named():
    with pytest.raises(DataError, match=r"cannot be sent.*`parse`(.|\n)*must be picklable"):
        ElementEncoder(1, "parse").batch(ObjectBatch([threading.Lock()]), 0)


@pytest.mark.parametrize(
    "batch",
    [
        ObjectBatch([b"x" * 5_000]),
        ColumnBatch(pa.record_batch({"b": [b"x" * 5_000]})),
        ColumnBatch(pa.record_batch({"b": pa.array([b"x" * 5_000]).dictionary_encode()})),
    ],
)
def test_what_the_receiver_would_refuse_is_not_sent(batch):
    encoder = ElementEncoder(1, "parse", payload_bytes_max=4_096)
    with pytest.raises(DataError, match=r"operator=`parse` bytes=`5\d\d\d` limit=`4096`") as caught:
        encoder.batch(batch, 0)
    assert "keep large contents in files" in caught.value.fix
    assert encoder.batch(ObjectBatch([b"x" * 3_000]), 0)


def test_control_elements_survive():
    encoder, decoder = ElementEncoder(1), ElementDecoder(1)
    for control in (
        Watermark(0),
        Watermark(WATERMARK_MAX),
        Watermark(WATERMARK_MIN),
        WatermarkStatus(True),
        WatermarkStatus(False),
        CheckpointBarrier(7, 1_700_000_000_000),
        CheckpointBarrier(8, 1, CheckpointOptions(stop=True)),
        CancelCheckpointMarker(9),
        EndOfData(),
        EndOfPartition(),
        LatencyMarker(5, "source", 3),
    ):
        ((header, payload),) = frames_of(encoder.control(control))
        received = decoder.decode(header, payload)
        assert received == control
        assert type(received) is type(control)


def test_sequence_gap_and_repeat_are_errors():
    encoder = ElementEncoder(9)
    first, second, third = (next(frames_of(encoder.control(Watermark(n)))) for n in range(3))
    decoder = ElementDecoder(9)
    decoder.decode(*first)
    with pytest.raises(ExchangeError, match="channel=`9` expected=`1` received=`2`"):
        decoder.decode(*third)
    decoder.decode(*second)
    with pytest.raises(ExchangeError, match="expected=`2` received=`1`"):
        decoder.decode(*second)


def test_sequence_wraps_around():
    encoder, decoder = ElementEncoder(1), ElementDecoder(1)
    encoder._sequence = decoder._expected = 2**32 - 1
    for n in range(3):
        assert decoder.decode(*next(frames_of(encoder.control(Watermark(n))))) == Watermark(n)


def test_wrong_frames_are_errors():
    with pytest.raises(ExchangeError, match="unknown kind of frame kind=`99`"):
        unpack_header(HEADER.pack(0, 99, 0, 0, 0, 0))
    for parts, message in (
        (frame(FrameKind.COLUMNS, b"x"), "columns without a schema"),
        (frame(FrameKind.CREDIT), "wrong kind kind=`CREDIT`"),
        (frame(FrameKind.CONTROL, b"\x92\x7f\x80"), "unknown control element tag=`127`"),
    ):
        with pytest.raises(ExchangeError, match=message):
            ElementDecoder(0).decode(*next(frames_of(parts)))


def test_backlog_saturates():
    ((header, _),) = frames_of(ElementEncoder(1).backlog(1_000_000))
    assert header.backlog == 0xFFFF


def test_received_columns_are_readable_in_a_process_of_their_own(tmp_path):
    """The payload of a COLUMNS frame is a standard IPC message: any Arrow reads it."""
    batch = pa.record_batch({"a": [1, 2, 3]})
    frames = list(frames_of(ElementEncoder(1).batch(ColumnBatch(batch), 0)))
    (tmp_path / "schema").write_bytes(frames[0][1])
    (tmp_path / "batch").write_bytes(frames[1][1])
    code = (
        "import pyarrow as pa, pathlib as p\n"
        "s = pa.ipc.read_schema(pa.py_buffer(p.Path('schema').read_bytes()))\n"
        "b = pa.ipc.read_record_batch(pa.py_buffer(p.Path('batch').read_bytes()), s)\n"
        "print(b.to_pydict())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "{'a': [1, 2, 3]}"


def test_a_dictionary_of_lists_that_is_not_all_used():
    from headgate.runtime.exchange.wire import _compact

    values = pa.array([[n] for n in range(10)])
    column = pa.DictionaryArray.from_arrays(pa.array([3], pa.int32()), values)
    assert _compact(column).to_pylist() == [[3]]
