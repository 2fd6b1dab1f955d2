"""The schema registry: the client, the header of messages, and Avro through both."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headgate.connectors.formats.avro import avro_format
from headgate.connectors.formats.format import Decode, UndecodableError
from headgate.connectors.formats.schema_registry import (
    RegistryClient,
    RegistryError,
    SchemaRegistry,
    UnknownSchema,
    header_of,
    schema_registry,
)
from headgate.errors import HeadgateError, UsageError
from headgate.testing.servers.authority import Authority
from headgate.tests.formats.test_avro import OLD, record, rows_of, written
from headgate.tests.support.registry_stub import RegistryStub, registry_stub

COLUMNS = pa.schema([("a", pa.int64()), ("b", pa.string())])
NEW = record(
    {"name": "b", "type": "string"}, {"name": "a", "type": "long"}, {"name": "c", "type": "int"}
)


@pytest.fixture
def stub() -> Iterator[RegistryStub]:
    with registry_stub() as running:
        yield running


def settings(stub: RegistryStub, **options: Any) -> SchemaRegistry:
    return schema_registry(stub.url, **{"patience": "200ms", **options})


def client(stub: RegistryStub, **options: Any) -> RegistryClient:
    return RegistryClient(settings(stub, **options), sleep=lambda seconds: time.sleep(0.001))


def decoder(stub: RegistryStub, columns: pa.Schema = COLUMNS, **options: Any) -> Decode:
    return avro_format(registry=settings(stub, **options)).decoder(columns)


def framed(id: int, schema: Any, rows: list[Any]) -> list[bytes]:
    return [header_of(id) + each for each in written(schema, rows)]


# -- messages ---------------------------------------------------------------------------------------


def test_messages_of_several_schemas_keep_their_order(stub: RegistryStub) -> None:
    old, new = stub.add("t-value", OLD), stub.add("t-value", NEW)
    first = framed(old, OLD, [{"a": n, "b": f"old {n}"} for n in range(20)])
    second = framed(new, NEW, [{"a": -n, "b": f"new {n}", "c": 5} for n in range(20)])
    mixed: list[bytes | None] = [each for pair in zip(first, second, strict=True) for each in pair]
    mixed[7] = None
    mixed[10] = mixed[10][:6]  # type: ignore[index]
    mixed[39] = b"\x01" + second[0][1:]
    mixed.insert(0, b"\0\0\0")
    decoded = decoder(stub)(mixed)
    assert [index for index, _ in decoded.bad] == [0, 8, 11, 40]
    rows = [
        (n, f"old {n}") if kind == 0 else (-n, f"new {n}") for n in range(20) for kind in (0, 1)
    ]
    expected = [row for index, row in enumerate(rows) if index not in (7, 10, 39)]
    assert [(row["a"], row["b"]) for row in rows_of(decoded)] == expected
    assert "header" in decoded.bad[0][1]
    assert stub.asked == ["GET /schemas/ids/1", "GET /schemas/ids/2"]


def test_known_schemas_need_no_registry(stub: RegistryStub) -> None:
    decode = decoder(stub)
    messages = framed(stub.add("t-value", OLD), OLD, [{"a": 1, "b": "x"}])
    assert rows_of(decode(messages)) == [{"a": 1, "b": "x"}]
    stub.trouble = lambda path: (503, b"{}")
    assert rows_of(decode(messages * 3)) == [{"a": 1, "b": "x"}] * 3


def test_an_unknown_schema_and_no_registry_is_an_error_that_names_the_message(
    stub: RegistryStub,
) -> None:
    decode = decoder(stub)
    known = framed(stub.add("t-value", OLD), OLD, [{"a": 1, "b": "x"}])
    decode(known)
    stub.trouble = lambda path: (503, b'{"message": "asleep"}')
    with pytest.raises(UndecodableError, match=r"schema 9.*status 503: asleep") as raised:
        decode([*known, header_of(9)])
    assert raised.value.index == 1


def test_an_id_that_the_registry_does_not_have_makes_bad_records(stub: RegistryStub) -> None:
    decode = decoder(stub)
    known = framed(stub.add("t-value", OLD), OLD, [{"a": 1, "b": "x"}])
    decoded = decode([header_of(9), *known, header_of(9)])
    assert [index for index, _ in decoded.bad] == [0, 2]
    assert "no schema with the id 9" in decoded.bad[0][1]
    assert rows_of(decoded) == [{"a": 1, "b": "x"}]
    asked = len(stub.asked)
    decode([header_of(9)])
    assert len(stub.asked) == asked, "it was asked again at once"


@pytest.mark.parametrize(
    ("schema", "kind", "text"),
    [
        (record({"name": "a", "type": "string"}), "AVRO", "`a` is string in Avro"),
        ('{"type": "object"}', "JSON", "of type JSON"),
        ("{", "AVRO", "no JSON"),
    ],
)
def test_a_schema_that_does_not_fit_makes_bad_records(
    stub: RegistryStub, schema: Any, kind: str, text: str
) -> None:
    decoded = decoder(stub)([header_of(stub.add("t-value", schema, kind)) + b"\0"])
    ((index, reason),) = decoded.bad
    assert index == 0
    assert text in reason


def test_schemas_refer_to_others(stub: RegistryStub) -> None:
    inner = {"type": "record", "name": "x.In", "fields": [{"name": "n", "type": "int"}]}
    middle = {"type": "record", "name": "x.Mid", "fields": [{"name": "i", "type": "x.In"}]}
    outer = record({"name": "a", "type": "x.Mid"}, {"name": "b", "type": "x.In"})
    stub.add("in", inner)
    stub.add("mid", middle, references=[{"name": "x.In", "subject": "in", "version": 1}])
    references = [
        {"name": "x.Mid", "subject": "mid", "version": 1},
        {"name": "x.In", "subject": "in", "version": 1},
    ]
    id = stub.add("t-value", outer, references=references)
    columns = pa.schema([("a", pa.struct([("i", pa.struct([("n", pa.int32())]))]))])
    decoded = decoder(stub, columns)([header_of(id) + b"\x02\x04"])
    assert rows_of(decoded) == [{"a": {"i": {"n": 1}}}]


def test_schemas_that_refer_to_each_other_are_refused(stub: RegistryStub) -> None:
    for name, other in (("p", "q"), ("q", "p")):
        reference = {"name": other, "subject": other, "version": 1}
        stub.add(name, {"type": other}, references=[reference])
    with pytest.raises(RegistryError, match="refers to more than"):
        client(stub).latest("p")


def test_the_cache_is_bounded(stub: RegistryStub) -> None:
    ids = [
        stub.add("t-value", record({"name": "a", "type": "long", "doc": str(n)})) for n in range(4)
    ]
    decode = decoder(stub, pa.schema([("a", pa.int64())]), cached=2)
    for id in [*ids, ids[3], ids[0], ids[3]]:
        assert decode([header_of(id) + b"\x02"]).bad == []
    assert len(stub.asked) == 5


# -- sinks ------------------------------------------------------------------------------------------


def encoded(stub: RegistryStub, schema: Any = None, **options: Any) -> list[bytes | None]:
    format = avro_format(schema=schema, registry=settings(stub, **options))
    columns = pa.schema(
        [pa.field("a", pa.int32(), nullable=False), pa.field("b", pa.string(), False)]
    )
    format.check_output(columns)
    return list(format.encoder(columns, "t")(pa.record_batch([[1], ["x"]], schema=columns)))


def test_a_sink_finds_its_schema(stub: RegistryStub) -> None:
    stub.add("other", NEW)
    id = stub.add("t-value", OLD)
    assert encoded(stub, OLD) == framed(id, OLD, [{"a": 1, "b": "x"}])
    assert stub.asked == ["POST /subjects/t-value"]


def test_a_sink_without_a_schema_takes_the_newest(stub: RegistryStub) -> None:
    stub.add("t-value", NEW)
    id = stub.add("t-value", OLD)
    assert encoded(stub) == framed(id, OLD, [{"a": 1, "b": "x"}])


def test_a_schema_is_registered_on_request_only(stub: RegistryStub) -> None:
    with pytest.raises(RegistryError, match="auto_register=True"):
        encoded(stub, OLD)
    with pytest.raises(RegistryError, match="auto_register=True"):
        encoded(stub)
    assert encoded(stub, OLD, auto_register=True) == framed(1, OLD, [{"a": 1, "b": "x"}])
    assert encoded(stub, OLD) == framed(1, OLD, [{"a": 1, "b": "x"}])
    (made,) = encoded(stub, auto_register=True)
    assert made is not None
    assert made.startswith(header_of(2))


def test_columns_that_do_not_fit_the_newest_schema(stub: RegistryStub) -> None:
    stub.add("t-value", NEW)
    with pytest.raises(UsageError, match="no column for the field `c`"):
        encoded(stub)


# -- the client -------------------------------------------------------------------------------------


def test_a_registry_that_comes_back_is_asked_again(stub: RegistryStub) -> None:
    id, answers = stub.add("t-value", OLD), [503, 429, 500]
    stub.trouble = lambda path: (answers.pop(), b"") if answers else None
    assert client(stub, patience="1h").schema(id).kind == "AVRO"
    assert len(stub.asked) == 4


def test_a_schema_that_is_new_is_asked_for_more_than_once(stub: RegistryStub) -> None:
    def appear(path: str) -> None:
        if len(stub.asked) == 2:
            stub.add("t-value", OLD)

    stub.trouble = appear
    assert client(stub).schema(1).id == 1
    with pytest.raises(UnknownSchema):
        client(stub).schema(2)


def test_the_next_address_is_tried(stub: RegistryStub) -> None:
    id = stub.add("t-value", OLD)
    both = schema_registry(f"http://127.0.0.1:1,{stub.url}/", patience="0s")
    assert RegistryClient(both).schema(id).id == id


def no_answer(path: str) -> None:
    time.sleep(3)


@pytest.mark.parametrize(
    ("trouble", "text"),
    [
        (lambda path: (401, b'{"message": "who are you?"}'), "status 401: who are you"),
        (lambda path: (302, b""), "status 302"),
        (lambda path: (200, b"<html>"), "no object of JSON"),
        (lambda path: (200, b"[" * 9_000), "no object of JSON"),
        (lambda path: (200, b"{}"), "has no schema"),
        (lambda path: (200, b'{"schema": "' + b"x" * 20_000), "more than 10000 bytes"),
        (lambda path: (200, b'{"schema": "1", "references": [{}]}'), "reference"),
        (lambda path: (500, b"secret"), "no answer.*status 500: no message"),
        (no_answer, "no answer.*time"),
    ],
)
def test_answers_that_are_refused(
    stub: RegistryStub, trouble: Callable[[str], Any], text: str
) -> None:
    stub.trouble = trouble
    with pytest.raises(RegistryError, match=text) as raised:
        client(stub, timeout="300ms", response_max=10_000, patience="0s").schema(1)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "header"),
    [
        ({"username": "u", "password": "p:w"}, "Basic dTpwOnc="),
        ({"username": "u", "password": "env:REGISTRY"}, "Basic dTpwOnc="),
        ({"token": "p:w"}, "Bearer p:w"),
        ({"token": "file:{file}"}, "Bearer p:w"),
    ],
)
def test_credentials(
    stub: RegistryStub,
    options: dict[str, str],
    header: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("REGISTRY", "p:w")
    (tmp_path / "token").write_text("p:w\n")
    given = {name: each.format(file=tmp_path / "token") for name, each in options.items()}
    stub.authorization = header
    stub.add("t-value", OLD)
    assert client(stub, **given).schema(1).id == 1
    assert "p:w" not in repr(settings(stub, **given))
    with pytest.raises(RegistryError, match="who are you") as raised:
        client(stub, **{**given, "token": "wrong", "username": None, "password": None}).schema(1)
    assert "wrong" not in str(raised.value)


def test_a_secret_that_is_no_header_is_not_shown(stub: RegistryStub) -> None:
    for secret in ("secret\nline", "secret\u2026"):
        with pytest.raises(UsageError, match="token") as raised:
            client(stub, token=secret).schema(1)
        assert "secret" not in str(raised.value)


def test_tls_is_verified(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    with registry_stub(authority.server_context()) as stub:
        stub.add("t-value", OLD)
        assert client(stub, ca=str(authority.file)).schema(1).id == 1
        with pytest.raises(RegistryError, match=r"(?i)certificate verify failed"):
            client(stub, patience="1h").schema(1)


@pytest.mark.parametrize(
    ("url", "options", "text"),
    [
        ("registry:8081", {}, "not the address"),
        ("http://u:secret@registry", {}, "password in it"),
        ("http://registry?x=1", {}, "query"),
        ("http://registry", {"username": "u"}, "username and a password"),
        ("http://registry", {"username": "u", "password": "p", "token": "t"}, "or a token"),
        ("http://registry", {"key": "k"}, "belongs to a certificate"),
        ("http://registry", {"cached": 0}, "cached"),
    ],
)
def test_settings_that_are_refused(url: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text) as raised:
        schema_registry(url, **options)
    assert "secret" not in str(raised.value)


def test_a_registry_can_be_asked_before_a_run(stub: RegistryStub) -> None:
    def checked(password: str) -> None:
        registry = schema_registry(stub.url, username="ann", password=password)
        avro_format(registry=registry).check_connection()

    stub.authorization = f"Basic {base64.b64encode(b'ann:open sesame').decode()}"
    checked("open sesame")
    assert [each.split()[0] for each in stub.asked] == ["GET"]
    with pytest.raises(HeadgateError, match="status 401") as refused:
        checked("s3cr3t")
    assert "s3cr3t" not in str(refused.value)
    stub.trouble = lambda path: (503, b"{}")
    asked = len(stub.asked)
    with pytest.raises(HeadgateError, match="no answer, the last one was: status 503"):
        checked("open sesame")
    assert len(stub.asked) == asked + 1, "it is asked once"
