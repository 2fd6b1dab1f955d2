"""Modules that travel by value: those that only the user's machine can be expected to have."""

from __future__ import annotations

import importlib
import pickletools
import sys
import types
from pathlib import Path

import cloudpickle
import pytest

from headgate.runtime.shipping import ship

DIST_INFO = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"


def install(root: Path, name: str, *, described: bool) -> None:
    (root / name).mkdir(parents=True)
    (root / name / "__init__.py").write_text("def one(n):\n    return 1\n")
    if described:
        info = root / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(DIST_INFO.format(name=name))
        (info / "RECORD").write_text(f"{name}/__init__.py,,\n{info.name}/METADATA,,\n")


def by_value(function: object) -> bool:
    """True if the code of a function is in the pickle, and not only its name."""
    operations = pickletools.genops(ship(function))
    return any(value == "_make_function" for _, value, _ in operations)


@pytest.mark.parametrize(
    ("folder", "described", "travels"),
    [
        ("target", True, False),  # pip install --target
        ("other/lib/python3/site-packages", False, False),  # a .pth file to another environment
        ("other/lib/python3/dist-packages", False, False),  # those of the system
        ("src", False, True),  # a user's own
    ],
)
def test_what_is_installed_outside_of_the_prefix_goes_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, described: bool, travels: bool
) -> None:
    name = "pkg_" + "".join(each for each in folder if each.isalnum())
    install(tmp_path / folder, name, described=described)
    monkeypatch.syspath_prepend(str(tmp_path / folder))
    module = importlib.import_module(name)
    try:
        assert by_value(module.one) is travels
    finally:
        del sys.modules[name]


def test_a_module_beside_installed_ones_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "pkg_installed", described=True)
    (tmp_path / "pkg_mine.py").write_text("def one(n):\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    installed, mine = map(importlib.import_module, ("pkg_installed", "pkg_mine"))
    try:
        assert (by_value(installed.one), by_value(mine.one)) == (False, True)
    finally:
        del sys.modules["pkg_installed"], sys.modules["pkg_mine"]


def test_odd_entries_of_sys_modules_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pkg_real.py").write_text("def one(n):\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    real = importlib.import_module("pkg_real")

    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            raise ImportError(f"not today: {name}")

    lazy = Lazy("pkg_lazy")
    nameless = types.ModuleType("pkg_nameless")
    nameless.__file__ = str(tmp_path / "pkg_nameless.py")
    nameless.__spec__ = None
    # An alias, as `py.error` is of pytest, was taken back twice: ship failed with a ValueError.
    entries = {
        "pkg_alias": real,
        "pkg_lazy": lazy,
        "pkg_object": object(),
        "pkg_none": None,
        "pkg_nameless": nameless,
    }
    for name, entry in entries.items():
        monkeypatch.setitem(sys.modules, name, entry)  # type: ignore[arg-type]
    try:
        assert by_value(real.one)
        assert cloudpickle.list_registry_pickle_by_value() == set()
    finally:
        del sys.modules["pkg_real"]


def test_what_the_user_registered_stays_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pkg_registered.py").write_text("def one(n):\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("pkg_registered")
    cloudpickle.register_pickle_by_value(module)
    try:
        assert by_value(module.one)
        assert cloudpickle.list_registry_pickle_by_value() == {"pkg_registered"}
    finally:
        cloudpickle.unregister_pickle_by_value(module)
        del sys.modules["pkg_registered"]
