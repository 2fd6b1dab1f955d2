"""Records that are tuples of numbers travel as arrays: the same come out, and nothing else is taken."""

from __future__ import annotations

import enum
import marshal
import math
import random
import struct
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import BadRecordError, ExchangeError, UserCodeError
from headgate.operators.elements import ObjectBatch, Positions
from headgate.operators.partitioning import HashFunction
from headgate.runtime.exchange import numbers
from headgate.runtime.exchange.gate import InputChannelSpec, InputGate, LocalOutputChannel
from headgate.runtime.exchange.numbers import (
    PLACES_MAX,
    WAIT_MAX,
    NumberFinder,
    arrays_of,
    decode_numbers,
    encode_numbers,
)
from headgate.runtime.exchange.partition import ResultPartition
from headgate.runtime.exchange.partitioners import make_partitioner
from headgate.runtime.exchange.settings import ExchangeSettings
from headgate.runtime.exchange.slicing import RECORD_BYTES_MIN, BatchSizer, Coalescer, cut
from headgate.runtime.exchange.wire import ElementDecoder, ElementEncoder, FrameKind, unpack_header


class Point(NamedTuple):
    x: int
    y: int


class Colour(enum.IntEnum):
    RED = 1


NAN = struct.unpack("<d", bytes.fromhex("efbeadde0000f87f"))[0]
"""A float that is no number, with bits of its own."""


def exactly(records: list[Any]) -> list[Any]:
    """Records in a form in which values are equal only if they have the same type and bits."""
    return [
        (type(record), [(type(v), struct.pack("<d", v) if type(v) is float else v) for v in record])
        for record in records
    ]


FORMS: dict[str, Any] = {
    "int32": lambda n: (n, -n, 2**31 - 1 - n, -(2**31) + n),
    "int64": lambda n: (2**62 + n, -(2**62) - n, 2**63 - 1 - n, -(2**63) + 1 + n),
    "milliseconds": lambda n: (1_436_918_400_000 + n, n),
    "either sign": lambda n: (2**40 + n if n % 2 else -(2**40) - n,),
    "floats": lambda n: (n / 7, [math.inf, -0.0, 0.0, NAN, 5e-324][n % 5]),
    "bools": lambda n: (n % 3 == 0, True, False, n),
    "many places": lambda n: tuple(range(n, n + PLACES_MAX)),
}


@pytest.mark.parametrize("with_times", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, 2, 300])
def test_records_of_a_form_come_out_as_they_went_in(form, count, with_times):
    records = [FORMS[form](n) for n in range(count)]
    times = np.arange(count) * 10 if with_times else None
    arrays = arrays_of(records)
    assert arrays is not None
    got = decode_numbers(bytearray(encode_numbers(arrays, times)))
    assert exactly(got.records) == exactly(records)
    assert (got.timestamps is None) == (times is None)
    assert times is None or got.timestamps.tolist() == times.tolist()


OTHERS: dict[str, Any] = {
    "a bool among ints": (1, True),
    "a float among ints": (1, 1.0),
    "a long int among short ones": (1, 2**31),
    "a text": (1, "1"),
    "None": (1, None),
    "numpy's int": (1, np.int64(1)),
    "numpy's float": (1, np.float64(1)),
    "an array": (1, np.arange(2)),
    "an enum": (1, Colour.RED),
    "a longer tuple": (1, 1, 1),
    "a shorter tuple": (1,),
    "no value": (),
    "a list": [1, 1],
    "a tuple of a class": Point(1, 1),
    "a nested tuple": (1, (1,)),
    "a number": 1,
    "an object": object(),
    "a type": int,
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("place", [0, 17, 299])
def test_a_single_other_record_is_noticed(other, place):
    """Also where no sample looks."""
    records: list[Any] = [(n, n) for n in range(300)]
    assert arrays_of(records) is not None
    records[place] = OTHERS[other]
    assert arrays_of(records) is None
    assert arrays_of([OTHERS[other]] * 300) is None or other in (
        "a bool among ints",
        "a float among ints",
        "a long int among short ones",
        "a longer tuple",
        "a shorter tuple",
    )


def test_what_no_array_holds_stays_an_object():
    for number in (2**63, -(2**63), -(2**63) - 1, 2**75, 2**80):
        assert arrays_of([(number,)] * 300) is None, number
    assert arrays_of([tuple(range(PLACES_MAX + 1))] * 300) is None
    circle: list[Any] = []
    circle.append(circle)
    assert arrays_of([(n, 1) for n in range(150)] + circle + [(n, 1) for n in range(150)]) is None


VALUES = (
    st.integers(-(2**66), 2**66)
    | st.integers(-3, 3)
    | st.floats()
    | st.booleans()
    | st.none()
    | st.text(max_size=3)
    | st.binary(max_size=3)
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(VALUES) | st.tuples(VALUES, VALUES), min_size=1, max_size=6), st.data())
def test_arrays_are_exact_or_there_are_none(records, data):
    if data.draw(st.booleans()):  # mostly of one form
        records = [records[0]] * 40 + records[-1:] + [records[0]] * 40
    arrays = arrays_of(records)
    if arrays is not None:
        assert exactly(ObjectBatch.of_numbers(arrays).records) == exactly(records)


def test_marshal_writes_what_is_read_here():
    """Were this to change, records would be sent as objects, and this test says why."""
    written = marshal.dumps([(7, 2**40, 0.5, True, False)], 2)
    digits = struct.pack("<i3H", 3, 0, 0, 2**10)
    values = b"i\7\0\0\0" + b"l" + digits + b"g" + struct.pack("<d", 0.5) + b"TF"
    assert written == b"[\1\0\0\0" + b"(\5\0\0\0" + values


def test_a_sender_of_others_seldom_tries(monkeypatch):
    tried = []
    monkeypatch.setattr(numbers, "arrays_of", lambda records: tried.append(records))
    find, batch = NumberFinder(), ObjectBatch(["a"] * ObjectBatch.NUMBERS_MIN)
    for _ in range(20 * WAIT_MAX):
        assert find(batch) is batch
    assert 20 <= len(tried) <= 30
    monkeypatch.undo()
    found = [
        find(ObjectBatch([(1,)] * ObjectBatch.NUMBERS_MIN)).numbers is not None for _ in range(100)
    ]
    assert found.index(True) <= WAIT_MAX
    assert all(found[found.index(True) :])


def test_few_records_stay_objects():
    few = ObjectBatch([(1, 2)] * (ObjectBatch.NUMBERS_MIN - 1))
    assert NumberFinder()(few) is few


def test_a_batch_of_numbers_is_one_of_objects():
    records = [(n, n / 2, n % 2 == 0) for n in range(500)]
    arrays = arrays_of(records)
    assert arrays is not None
    times, places = np.arange(500), Positions("s", "a", range(500))
    mask, chosen = np.arange(500) % 3 == 0, np.array([7, 3, 499, 3])
    for made in (None, list(records)):
        batch = ObjectBatch.of_numbers(arrays, times, places, made)
        plain = ObjectBatch(records, times, places)
        for part in (
            lambda b: b,
            lambda b: b.slice(10, 20),
            lambda b: b.slice(490, 10),
            lambda b: b.take(chosen),
            lambda b: b.where(mask),
            lambda b: b.slice(5, 0),
        ):
            got, wanted = part(batch), part(plain)
            assert exactly(got.records) == exactly(wanted.records)
            assert len(got) == len(wanted)
            assert got.timestamps.tolist() == wanted.timestamps.tolist()
            assert got.positions.offsets.tolist() == wanted.positions.offsets.tolist()
        sent = batch.without_positions()
        assert sent.positions is None
        assert sent.numbers is arrays
        assert sent.records == records


def test_joined_batches():
    one = ObjectBatch.of_numbers(arrays_of([(n, 1) for n in range(5)]), np.arange(5))
    other = ObjectBatch.of_numbers(arrays_of([(n, 1.5) for n in range(5)]), np.arange(5))
    plain = ObjectBatch([(9, 9)], np.arange(1))
    for pieces, are_numbers in (([one, one], True), ([one, other], False), ([one, plain], False)):
        coalescer = Coalescer()
        for piece in pieces:
            assert coalescer.accepts(piece)
            coalescer.add(piece, 0, 0)
        joined = coalescer.take()
        assert exactly(joined.records) == exactly([r for piece in pieces for r in piece.records])
        assert (joined.numbers is not None) == are_numbers
        assert len(joined.timestamps) == len(joined)


@pytest.mark.parametrize("rows", [1, 3_000, 10_000])
def test_slices_of_numbers_fit_a_buffer(rows):
    batch = ObjectBatch.of_numbers((np.arange(rows), np.arange(rows)))
    sizer = BatchSizer()
    assert sizer.nbytes(batch) == rows * RECORD_BYTES_MIN
    slices = list(cut(batch, ExchangeSettings(), sizer, 64 * 1024))
    assert [record for piece, _ in slices for record in piece.records] == batch.records
    assert all(size <= 64 * 1024 for _, size in slices)
    assert all(piece.numbers is not None for piece, _ in slices)


def damaged(payload: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return payload[: rng.randrange(len(payload))]
    at = rng.randrange(min(len(payload), 24))
    return payload[:at] + bytes([rng.randrange(256)]) + payload[at + 1 :]


def test_damaged_frames_are_refused_or_give_records():
    """A changed number is one; a changed length, code or count of places is an error of ours."""
    refused = 0
    for seed in range(400):
        rng = random.Random(seed)
        times = np.arange(9) if seed % 2 else None
        payload = encode_numbers((np.arange(9), np.arange(9) / 2, np.arange(9) > 3), times)
        try:
            got = decode_numbers(damaged(payload, rng))
        except ExchangeError:
            refused += 1
        else:
            assert len(got.records) == len(got)
    assert 200 < refused < 400


def test_the_frames_of_a_channel():
    encoder, decoder = ElementEncoder(5), ElementDecoder(5)
    count = ObjectBatch.NUMBERS_MIN
    batch = NumberFinder()(ObjectBatch([(n, n) for n in range(count)], np.arange(count)))
    for sent, kind in ((batch, FrameKind.NUMBERS), (ObjectBatch([(1, "a")]), FrameKind.OBJECTS)):
        data = b"".join(bytes(part) for part in encoder.batch(sent, 0))
        header = unpack_header(data)
        assert header.kind is kind
        got = decoder.decode(header, bytearray(data[16:]))
        assert got.records == sent.records


def partition_to(
    receivers: int, key: Any, settings: ExchangeSettings
) -> tuple[InputGate, Any, Any]:
    gate = InputGate([InputChannelSpec(i, 0) for i in range(receivers)], settings)
    channels = [LocalOutputChannel(i, settings) for i in range(receivers)]
    for channel in channels:
        channel.bind(gate)
    split = make_partitioner(
        HashFunction(key), receivers, sender=0, max_parallelism=128, rng=random.Random(0)
    )
    return gate, split, channels


@pytest.mark.parametrize("receivers", [1, 2, 3])
@pytest.mark.parametrize(
    "key", [lambda r: r[0], lambda r: r[-1], lambda r: r[2], lambda r: r[0] % 7, lambda r: r[:2]]
)
def test_records_go_where_they_go_as_objects(clock, drain, monkeypatch, receivers, key):
    """In the same order, with their event times, cut into the same buffers."""
    records = [(n * 7919 % 1000, n, n % 3 == 0, n % 50) for n in range(9_000)]
    found = []
    for least in (1, len(records) + 1):
        monkeypatch.setattr(ObjectBatch, "NUMBERS_MIN", least)
        settings = ExchangeSettings(exclusive_buffers=100)
        gate, split, channels = partition_to(receivers, key, settings)
        partition = ResultPartition(channels, split, settings, clock)
        for begin in range(0, len(records), 3_000):
            times = np.arange(begin, begin + 3_000)
            partition.emit(ObjectBatch(records[begin : begin + 3_000], times))
        partition.flush()
        polled = drain(gate)
        are_numbers = {batch.numbers is not None for _, batch in polled}
        assert are_numbers == {least == 1 and receivers > 1}
        found.append([(at, b.timestamps.tolist(), exactly(b.records)) for at, b in polled])
    assert found[0] == found[1]


def test_keys_that_are_none_are_reported_as_those_of_objects(clock):
    settings = ExchangeSettings()
    for key, error, message in (
        (lambda record: record[1], BadRecordError, "cannot be a key"),
        (lambda record: record[7], UserCodeError, "key function failed"),
    ):
        _, split, channels = partition_to(2, key, settings)
        partition = ResultPartition(channels, split, settings, clock)
        with pytest.raises(error, match=message) as caught:
            partition.emit(ObjectBatch([(n, n / 2) for n in range(ObjectBatch.NUMBERS_MIN)]))
        assert "record=`(0, 0.0)`" in str(caught.value)
