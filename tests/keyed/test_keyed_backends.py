"""Each backend against a plain model: random operations, open cuts, deltas, restore, rescale, expiry."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headgate.errors import StateError
from headgate.state.hashing import hash_keys, key_groups_of
from headgate.state.keyed.base import ABSENT
from headgate.state.keyed.keys import OPAQUE_KEYS, keys_of_type, token
from headgate.tests.support.keyed import visits

TTL = 50
KEYS: dict[str, tuple[Any, list[Any]]] = {
    "int": (keys_of_type(int), [-3, 0, 1, 2**40, 251, 502]),
    "str": (keys_of_type(str), ["", "a", "b", "key" * 20, "é", "z"]),
    "tuple": (keys_of_type(tuple[str, int]), [("a", 1), ("a", 2), ("b", 1), ("", 0)]),
    "mixed": (OPAQUE_KEYS, [1, True, "1", b"1", None, (1, True), (1, 1)]),
}


def specs_of(make_spec: Any, keys: Any) -> dict[str, Any]:
    made = [
        make_spec("number", "value", int, keys=keys),
        make_spec("list_value", "value", list[int], keys=keys),
        make_spec("pane", "value", str, keys=keys, namespaced=True),
        make_spec("elements", "list", int, int, keys=keys),
        make_spec("entries", "map", list[int], str, keys=keys),
        make_spec("brief", "value", int, keys=keys, ttl_ms=TTL),
    ]
    return {spec.name: spec for spec in made}


class Run:
    """One random life of a backend beside its model."""

    def __init__(self, fixtures: Any, kind: str, seed: int) -> None:
        self.fixtures = fixtures
        self.keys, self.some = KEYS[kind]
        self.rng = random.Random(seed)
        self.specs = specs_of(fixtures.spec, self.keys)
        self.backend = fixtures.make(self.keys, self.specs)
        self.model = fixtures.model(self.specs)
        self.now = 1_000
        self.open: list[Any] = []
        self.stored: dict[str, Any] = {}
        self.base: dict[str, int] = {}
        self.dropped = 0

    def step(self, operation: str) -> None:
        key = self.rng.choice(self.some)
        namespace = self.rng.choice([None, 1, "w"])
        self.backend.set_key(key)
        self.backend.set_namespace(namespace)
        getattr(self, operation)((token(key), token(None)), (token(key), token(namespace)))
        self.now += 1

    def put_value(self, place: Any, spaced: Any) -> None:
        number = self.rng.randrange(1000)
        for name, where, value in (
            ("number", place, number),
            ("list_value", place, [number]),
            ("pane", spaced, str(number)),
            ("brief", place, (number, self.now)),
        ):
            if self.rng.random() < 0.6:
                self.backend.value_table(name).put(value)
                self.model.tables[name][*where, None] = value

    def visit(self, place: Any, spaced: Any) -> None:
        """Several keys in turn, some of them more than once, as the records of a batch have them."""
        keys = self.rng.choices(self.some, k=self.rng.randrange(6))
        stop = self.rng.choice([None, 2])  # as when a function raises
        groups = key_groups_of(hash_keys(keys), self.backend.max_parallelism).tolist()
        numbers, lists = map(self.backend.value_table, ("number", "list_value"))
        number, some = numbers.handle(0), lists.handle([7])
        for key in islice(visits(self.backend, keys, groups), stop):
            where = (token(key), token(None), None)
            before = self.model.tables["number"].get(where, ABSENT)
            assert numbers.get() == before
            assert number.get() == (0 if before is ABSENT else before)
            assert number.exists() is (before is not ABSENT)
            listed = self.model.tables["list_value"].get(where, ABSENT)
            assert lists.get() == listed
            assert some.get() == ([7] if listed is ABSENT else listed)
            some.get().append(8)
            value = self.rng.randrange(1000)
            if value < 200:
                self.rng.choice([number.clear, numbers.delete])()
                self.model.tables["number"].pop(where, None)
            else:
                self.rng.choice([number.set, numbers.put])(value)
                self.rng.choice([some.set, lists.put])([value])
                self.model.tables["number"][where] = value
                self.model.tables["list_value"][where] = [value]
        self.backend.clear_key()

    def delete_value(self, place: Any, spaced: Any) -> None:
        for name, where in (("number", place), ("list_value", place), ("pane", spaced)):
            self.backend.value_table(name).delete()
            self.model.tables[name].pop((*where, None), None)

    def mutate(self, place: Any, spaced: Any) -> None:
        """Changes in place are not state."""
        value = self.backend.value_table("list_value").get()
        assert value == self.model.tables["list_value"].get((*place, None), value)
        if value is not ABSENT:
            value.append(-1)
        for _, entry in self.backend.entry_table("entries").entries():
            entry.append(-1)

    def append(self, place: Any, spaced: Any) -> None:
        table = self.backend.entry_table("elements")
        position = table.last() + 1
        known = [entry for *where, entry in self.model.tables["elements"] if tuple(where) == place]
        assert position == max(known, default=-1) + 1
        table.put(position, position * 10)
        self.model.tables["elements"][*place, position] = position * 10

    def put_entry(self, place: Any, spaced: Any) -> None:
        entry = self.rng.choice("abc")
        self.backend.entry_table("entries").put(entry, [self.now])
        self.model.tables["entries"][*place, entry] = [self.now]

    def delete_entry(self, place: Any, spaced: Any) -> None:
        entry = self.rng.choice("abc")
        self.backend.entry_table("entries").delete(entry)
        self.model.tables["entries"].pop((*place, entry), None)

    def clear(self, place: Any, spaced: Any) -> None:
        name = self.rng.choice(["elements", "entries"])
        self.backend.entry_table(name).clear()
        assert self.backend.entry_table(name).empty()
        rows = self.model.tables[name]
        for where in [where for where in rows if where[:2] == place]:
            del rows[where]

    def sweep(self, place: Any, spaced: Any) -> None:
        dead_until = self.now - TTL
        self.backend.value_table("brief").sweep(2000, dead_until)
        rows = self.model.tables["brief"]
        for where in [where for where, pair in rows.items() if pair[1] <= dead_until]:
            del rows[where]

    def cut(self, place: Any, spaced: Any) -> None:
        """Take a cut, and let a thread make it while the next operations run."""
        dead = {"brief": self.now - TTL} if self.rng.random() < 0.5 else {}
        cutting = self.fixtures.cutting(self.backend, self.model.copy(), dead)
        if self.rng.random() < 0.2:
            cutting.discard()
            return
        since = self.base if self.rng.random() < 0.7 else {}
        self.open.append((cutting, since, dict(self.stored), dead))
        if self.rng.random() < 0.5:
            cutting.start(since)
        if len(self.open) > 2:
            self.settle()

    def complete(self, place: Any, spaced: Any) -> None:
        """All cuts complete: the next may be a delta on the newest."""
        while self.open:
            self.settle()

    def settle(self) -> None:
        """The oldest open cut completes: what is stored equals the model as it was at the cut."""
        cutting, since, before, dead = self.open.pop(0)
        if cutting._thread is None:
            cutting.start(since)
        for name, table in cutting.tables().items():
            base = before.get(name) if name in since else None
            spec = self.specs[name]
            merged = self.fixtures.merge(base, table, spec.layout.identity)
            expected = dict(cutting.model[name])
            found = self.fixtures.content(merged, spec)
            if name == "brief":  # the dead may be left out, here or in the table built on
                self.dropped = max(self.dropped, dead.get(name, 0))
                alive = {w: p for w, p in expected.items() if p[1] > self.dropped}
                assert alive.items() <= found.items() <= expected.items()
                if name not in since:
                    dead_until = dead.get(name, 0)
                    assert found == {w: p for w, p in expected.items() if p[1] > dead_until}
            else:
                assert found == expected
            self.stored[name] = merged
        if not self.open:
            self.base = cutting.epochs
            for name, cut in cutting.cuts.items():
                if getattr(cut, "confirm", None):
                    cut.confirm(self.base[name])

    def finish(self) -> None:
        while self.open:
            self.settle()
        assert self.fixtures.read(self.backend, self.specs) == self.model.tables
        self.open.append((self.fixtures.cutting(self.backend, self.model.copy(), {}), {}, {}, {}))
        self.settle()
        halves = self.fixtures.restore(self.fixtures.make, self.keys, self.specs, self.stored)
        both = [self.fixtures.read(half, self.specs) for half in halves]
        for name, rows in self.model.tables.items():
            assert not both[0][name].keys() & both[1][name].keys()
            assert both[0][name] | both[1][name] == rows
        self._deltas_after_a_restore()

    def _deltas_after_a_restore(self) -> None:
        """The restored values stand for cut 1."""
        backend = self.fixtures.make(self.keys, self.specs)
        backend.restore(self.fixtures.restored(self.stored, self.specs), 0)
        self.backend, self.base = backend, dict.fromkeys(self.specs, 1)
        for operation in ("put_value", "append", "delete_value", "clear", "put_entry"):
            self.step(operation)
        cutting = self.fixtures.cutting(backend, self.model.copy(), {})
        self.base = dict.fromkeys(cutting.epochs, 1)
        assert set(cutting.epochs.values()) <= {2}
        self.open.append((cutting, self.base, dict(self.stored), {}))
        self.settle()


OPERATIONS = [
    "visit", "visit", "put_value", "put_value", "delete_value", "mutate", "append", "put_entry",
    "put_entry", "delete_entry", "clear", "sweep", "cut", "cut",
    "cut", "complete",
]  # fmt: skip


@pytest.fixture
def fixtures(
    make_backend: Any, make_spec: Any, empty_model: Any, cutting: Any, merge_tables: Any,
    content_of: Any, restore_halves: Any, read_all: Any, restored_state: Any,
) -> Any:  # fmt: skip
    class Fixtures:
        make = make_backend
        spec = staticmethod(make_spec)
        model = empty_model
        merge = staticmethod(merge_tables)
        content = staticmethod(content_of)
        restore = staticmethod(restore_halves)
        read = staticmethod(read_all)
        restored = staticmethod(restored_state)

    Fixtures.cutting = cutting
    return Fixtures


@pytest.mark.parametrize("kind", KEYS)
def test_a_backend_is_its_model(fixtures: Any, kind: str) -> None:
    some = st.lists(st.sampled_from(OPERATIONS), max_size=40)

    @settings(
        max_examples=fixtures.make.examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(seed=st.integers(0, 2**32), operations=some)
    def live(seed: int, operations: list[str]) -> None:
        run = Run(fixtures, kind, seed)
        try:
            for operation in operations:
                run.step(operation)
            run.finish()
        finally:
            fixtures.make.close()

    live()


def test_without_a_key_there_is_no_state(fixtures: Any, int_keys: Any) -> None:
    backend = fixtures.make(int_keys, specs_of(fixtures.spec, int_keys))
    with pytest.raises(StateError, match="without a current key"):
        backend.value_table("number").get()
    backend.set_key(1)
    backend.value_table("number").put(5)
    backend.clear_key()
    with pytest.raises(StateError, match="without a current key"):
        backend.entry_table("entries").put("a", [1])
    with pytest.raises(StateError, match="without a current key"):
        backend.value_table("pane").get()


def test_keys_that_python_calls_equal_are_not_one_key(fixtures: Any) -> None:
    specs = specs_of(fixtures.spec, OPAQUE_KEYS)
    backend = fixtures.make(OPAQUE_KEYS, specs)
    for key, value in ((1, 10), (True, 20), ((1,), 30), ((True,), 40)):
        backend.set_key(key)
        assert backend.value_table("number").get() is ABSENT
        backend.value_table("number").put(value)
    backend.set_key(1)
    assert backend.value_table("number").get() == 10
    with pytest.raises(StateError, match="cannot be a key"):
        backend.set_key(1.0)


def test_a_large_state_is_consistent_while_threads_read_it(fixtures: Any, int_keys: Any) -> None:
    """Long enough for the thread and the writer to interleave many times."""
    specs = {"number": fixtures.spec("number", "value", int, keys=int_keys)}
    backend = fixtures.make(int_keys, specs)
    table = backend.value_table("number")
    model = fixtures.model(specs)
    rng = random.Random(7)

    def write(count: int) -> None:
        for _ in range(count):
            key = rng.randrange(20_000)
            backend.set_key(key)
            if rng.random() < 0.2:
                table.delete()
                model.tables["number"].pop((key, token(None), None), None)
            else:
                value = rng.randrange(10**9)
                table.put(value)
                model.tables["number"][key, token(None), None] = value

    write(20_000)
    for _ in range(4):
        first = fixtures.cutting(backend, model.copy(), {})
        first.start({})
        write(3_000)
        second = fixtures.cutting(backend, model.copy(), {})
        second.start({})
        write(6_000)
        for cutting in (second, first):
            found = fixtures.content(cutting.tables()["number"], specs["number"])
            assert found == cutting.model["number"]
