"""Goal: the web UI is a set of files that load nothing else, and are served to any browser that asks."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import PurePosixPath
from typing import Any

import pytest

from headgate.runtime.rest.pages import FOLDER, POLICY, pages
from headgate.tests.support.npm import package

OWN = sorted(path for path in FOLDER.glob("*") if path.suffix in (".html", ".js", ".css", ".svg"))
VENDORED = json.loads((FOLDER / "vendor" / "vendored.json").read_text())
FILES = {name: (library, found) for library in VENDORED for name, found in library["files"].items()}
NAMESPACES = {"http://www.w3.org/2000/svg"}


def test_the_files_are_served_without_a_token(with_api: Any) -> None:
    async def script(api: Any) -> None:
        for name, page in pages().items():
            status, headers, body = await api.ask("GET", f"/ui/{name}", token=None)
            assert (name, status) == (name, 200)
            assert headers["Content-Security-Policy"] == POLICY
            assert headers["Content-Type"] == f"{page.type}; charset=utf-8"
            assert json.loads(page.body) == body if page.type.endswith("json") else body
        status, headers, _ = await api.ask("GET", "/ui/", token=None)
        assert status == 200
        same = {"If-None-Match": headers["ETag"]}
        assert (await api.ask("GET", "/ui/", token=None, headers=same))[0] == 304
        status, headers, _ = await api.ask("GET", "/ui", token=None, allow_redirects=False)
        assert (status, headers["Location"]) == (307, "ui/")  # right behind any prefix
        for missing in ("/ui/other.js", "/ui/../server.py", "/ui/%2e%2e/server.py", "/ui/vendor"):
            assert (await api.ask("GET", missing, token=None))[0] in (401, 404)
        assert (await api.ask("POST", "/ui/", token=None))[0] == 401

    with_api(script)


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_a_file_of_ours_names_no_other_host_and_has_nothing_inline(path: Any) -> None:
    text = path.read_text()
    assert set(re.findall(r"https?://[^\s\"'`<>)]+", text)) <= NAMESPACES
    if path.suffix == ".html":
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)", text)
        named = re.findall(r'(?:src|href)="([^"]+)"', text)
    else:
        named = re.findall(r'(?:from|import) "(\./[^"]+)"', text)
    assert [name for name in named if str(PurePosixPath(name)) not in pages()] == []
    assert len(text.splitlines()) <= 400


def test_the_libraries_are_those_that_were_vendored() -> None:
    there = {path.name for path in (FOLDER / "vendor").iterdir()}
    assert there == {*FILES, "vendored.json"}
    for name, (_, found) in FILES.items():
        digest = hashlib.sha256((FOLDER / "vendor" / name).read_bytes()).hexdigest()
        assert (name, digest) == (name, found["sha256"])
    for library in VENDORED:
        assert f"{library['name']}-LICENSE.txt" in library["files"]


@pytest.mark.parametrize("name", FILES)
def test_a_vendored_file_is_that_of_its_package(name: str) -> None:
    library, found = FILES[name]
    directory = package(library["name"], library["version"], library["integrity"])
    lines = (directory / found["from"]).read_text().splitlines()
    # The maps of sources are not part of the packages' code, and are not shipped.
    text = "\n".join(line for line in lines if not line.startswith("//# sourceMappingURL"))
    for before, after in found.get("replaced", ()):
        assert text.count(before) == 1
        text = text.replace(before, after)
    assert text.rstrip() + "\n" == (FOLDER / "vendor" / name).read_text()
