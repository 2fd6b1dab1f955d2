"""The documentation site: its pages are complete, and its check finds what is broken."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import headgate

ROOT = Path(headgate.__file__).parent


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_build", ROOT / ".ci" / "site" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(site: ModuleType) -> dict[str, str]:
    return dict(site.all_pages())


def test_every_page_of_the_docs_is_on_the_site_and_in_its_navigation(
    site: ModuleType, pages: dict[str, str]
) -> None:
    navigation = site._with_navigation((ROOT / ".ci" / "site" / "mkdocs.yml").read_text(), pages)
    docs = ROOT / "docs"
    expected = {str(path.relative_to(docs)) for path in docs.rglob("*.md")} - {"README.md"}
    assert expected <= set(pages)
    missing = {page for page in expected if page not in navigation}
    assert missing == set(), "add these pages to `nav` in .ci/site/mkdocs.yml"


def test_the_reference_has_every_public_name(pages: dict[str, str]) -> None:
    reference = "".join(text for uri, text in pages.items() if uri.startswith("reference/"))
    public = set(headgate._HOMES) - set(headgate._MODULES)
    assert {name for name in public if f".{name}\n" not in reference + "\n"} == set()


def test_links_to_the_repository_lead_to_pages_of_the_site(pages: dict[str, str]) -> None:
    assert "(architecture.md)" in pages["contents.md"]
    assert "(source/tests/test_structure.py.md)" in pages["contributing.md"]
    assert "def test_" in pages["source/tests/test_structure.py.md"]


@pytest.mark.parametrize(
    ("page", "mistake"),
    [
        ('<a href="other.html">', "leads nowhere: other.html"),
        ('<a href="page.html#there">', "leads nowhere: page.html#there"),
        ('<script src="https://example.org/a.js">', "loads https://example.org/a.js"),
        ('<link rel="stylesheet" href="//example.org/a.css">', "loads //example.org/a.css"),
    ],
)
def test_a_broken_page_is_found(site: ModuleType, tmp_path: Path, page: str, mistake: str) -> None:
    good = '<h1 id="here"></h1><a href="#here"></a><a href="https://example.org">elsewhere</a>'
    (tmp_path / "page.html").write_text(good)
    assert site.mistakes_of(tmp_path) == []
    (tmp_path / "page.html").write_text(good + page)
    (found,) = site.mistakes_of(tmp_path)
    assert found.endswith(mistake)
