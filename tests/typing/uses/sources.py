"""Sources by the class of their records, sinks and their policies, and names that are not there."""

from collections.abc import Mapping
from typing import Any, assert_type

import msgspec

import headgate as hg
from headgate import connectors as c


class Pay(msgspec.Struct):
    card: str
    cents: int


def made(number: int) -> Pay:
    return Pay("a", number)


def of_pay(pay: Pay) -> int:
    return pay.cents


def of_text(text: str) -> int:
    return len(text)


COLUMNS: Mapping[str, Any] = {"card": "string", "cents": "int64"}


def files(job: hg.Job) -> None:
    assert_type(job.read(c.csv_source("in", Pay), name="csv"), hg.Stream[Pay])
    assert_type(job.read(c.json_source("in", Pay, split_bytes="1mb"), name="json"), hg.Stream[Pay])
    assert_type(job.read(c.parquet_source("in", Pay), name="parquet"), hg.Stream[Pay])
    assert_type(job.read(c.files_source("in", format="csv", schema=Pay), name="f"), hg.Stream[Pay])
    assert_type(job.read(c.csv_source("in", COLUMNS), name="columns"), hg.Stream[Any])
    assert_type(job.read(c.parquet_source("in"), name="any"), hg.Stream[Any])
    pays = job.read(c.csv_source("in", Pay, delimiter=";", on_bad_record="drop"), name="pays")
    pays.map(of_pay)
    pays.map(of_text)  # wrong
    pays.map(lambda pay: pay.euros)  # wrong
    c.csv_source("in")  # wrong
    c.csv_source("in", Pay, delimeter=";")  # wrong
    c.csv_source("in", Pay, on_bad_record="skip")  # wrong
    c.csv_source("in", Pay, batch_rows="8")  # wrong
    c.csv_source(["in"], Pay)  # wrong
    c.json_source("in", Pay, delimiter=";")  # wrong
    c.parquet_source("in", Pay, header=True)  # wrong
    c.files_source("in", format="orc", schema=Pay)  # wrong


def made_up(job: hg.Job) -> None:
    assert_type(job.read(c.generator(Pay, rows=3), name="a"), hg.Stream[Pay])
    assert_type(job.read(c.generator(function=made, rows=3), name="b"), hg.Stream[Pay])
    assert_type(job.read(c.generator({"n": c.sequence()}), name="c"), hg.Stream[Any])
    assert_type(job.read(c.numbers(3), name="d"), hg.Stream[int])
    assert_type(job.read(c.from_list([made(1)]), name="e"), hg.Stream[Pay])
    assert_type(job.read(c.from_list([{"card": "a"}], schema=Pay), name="f"), hg.Stream[Pay])
    assert_type(job.read(c.from_list([{"n": 1}], schema={"n": int}), name="g"), hg.Stream[Any])
    assert_type(job.read(c.throttle(c.numbers(), 5), name="h"), hg.Stream[int])
    assert_type(job.read(c.stop_after_idle(c.numbers(), "5m"), name="k"), hg.Stream[int])
    history = c.csv_source("in", Pay)
    assert_type(job.read(hg.hybrid_source(history, history), name="i"), hg.Stream[Pay])
    assert_type(job.read(hg.spark_source(sql="SELECT 1", schema=Pay), name="j"), hg.Stream[Pay])
    c.generator(Pay, row=3)  # wrong
    c.generator(function=of_text)  # wrong
    c.numbers("3")  # wrong
    c.nexmark("bids")  # wrong
    c.from_list(3)  # wrong
    hg.spark_source(sql="SELECT 1", shema=Pay)  # wrong


def sinks(pays: hg.Stream[Pay]) -> None:
    pays.write(c.parquet_sink("out", guarantee="exactly_once", if_exists="append"), name="a")
    pays.write(c.collect(guarantee="none"), name="b")
    c.parquet_sink("out")  # wrong
    c.parquet_sink("out", guarantee="exactly-once")  # wrong
    c.csv_sink("out", guarantee="none", roll_size="1mb")  # wrong
    c.json_sink("out", guarantee="none", if_exists="replace")  # wrong
    c.files_sink("out", format="avro", guarantee="none")  # wrong
    c.collect(guarantee="once")  # wrong
    c.print_sink(guarantee="maybe")  # wrong
    c.blackhole(guarantee="some")  # wrong
    c.function_sink(print, guarantee="twice")  # wrong


async def found(key: str) -> dict[str, str]:
    return {"name": key}


def lookups(pays: hg.Stream[Pay]) -> None:
    pays.lookup("card", found, into={"name": "string"}, name="names", cache_rows=5)
    pays.lookup("card", found, into={"name": "string"}, nam="names")  # wrong
    pays.lookup("card", found, name="names")  # wrong
    pays.lookup("card", found, into={"name": "string"}, name="names", on_error="skip")  # wrong


class Client:
    def get(self, cents: int) -> str:
        return str(cents)


client = hg.per_worker(Client)


def per_worker() -> None:
    assert_type(client, hg.PerWorker[Client])
    assert_type(client().get(3), str)
    client.get(3)  # wrong
    client().got(3)  # wrong
    hg.per_worker(3)  # wrong
    hg.per_worker(of_text)  # wrong


def runs(job: hg.Job) -> None:
    job.run(if_exists="append")
    job.run(if_exists="replace")  # wrong
    job.run(frsh=True)  # wrong


def names() -> None:
    hg.count()
    hg.cnt()  # wrong
    print(hg.Sream)  # wrong
    hg.tumblin("1m")  # wrong
    c.csv_sorce("in", Pay)  # wrong
    hg.connectors.kafka_source("in")  # wrong
    print(hg.errors.PlanEror)  # wrong
    hg.triggers.AfterEnd()  # wrong
    hg.cep.patern("a")  # wrong
