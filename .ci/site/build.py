"""Builds the documentation site from docs/ into build/site: `make docs`.

The site generator wants all pages in one folder, so they are laid out in build/pages first:

* the pages of docs/, and those that lie elsewhere in the repository (README, ARCHITECTURE and others);
* a page with its text for each file or folder that a page links to and that is not documentation;
* a reference: a page for each group of public names, from their docstrings.

Links are rewritten to where their targets are on the site. A link that leads nowhere fails the build.
"""

from __future__ import annotations

import ast
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build"
PRODUCT = ("api", "connectors", "k8s", "operators", "runtime", "spark", "state", "testing")
RENAMED = {
    "README.md": "repository/readme.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "docs/README.md": "contents.md",
}
"""Where pages of the repository are on the site, if not at their own path."""
SHOWN_BYTES_MAX = 60_000
"""A longer text is cut on the page that shows it."""
REFERENCE = {
    "Jobs and streams": ("api", "runtime"),
    "Windows and aggregates": (
        "operators.aggregation",
        "operators.windows",
        "operators.watermarks",
    ),
    "Functions and state": ("operators", "state"),
    "Connectors": ("connectors",),
    "Tests of jobs": ("testing",),
    "Errors": ("errors",),
}
"""The pages of the reference, by the rooms whose public names they have; the first that fits counts."""
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=[)\s])")
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".js": "js",
    ".sh": "bash",
}


def main() -> int:
    """Build the site; return the exit code."""
    lay_out_sources(BUILD / "site-source" / "headgate")
    pages = all_pages()
    folder = BUILD / "pages"
    shutil.rmtree(folder, ignore_errors=True)
    for uri, text in pages.items():
        place = folder / uri
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    for path in (ROOT / "docs").rglob("*"):
        if path.suffix in (".png", ".webp", ".svg", ".json"):
            place = folder / path.relative_to(ROOT / "docs")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
    config = BUILD / "mkdocs.yml"
    config.write_text(_with_navigation((HERE / "mkdocs.yml").read_text(), pages))
    shutil.rmtree(BUILD / "site", ignore_errors=True)
    zensical = Path(sys.executable).with_name("zensical")
    command = [str(zensical), "build", "--clean", "--strict", "--config-file", str(config)]
    done = subprocess.run(command, cwd=BUILD, check=False)
    mistakes = [] if done.returncode else mistakes_of(BUILD / "site")
    for mistake in mistakes:
        print(mistake, file=sys.stderr)
    if not done.returncode:
        print(f"{len(pages)} pages in {BUILD / 'site'}; open index.html")
    return done.returncode or bool(mistakes)


def lay_out_sources(folder: Path) -> None:
    """Make a package of the product's rooms, as the repository holds more than the package."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("__init__.py", "errors.py", *PRODUCT):
        (folder / name).symlink_to(ROOT / name)


def all_pages() -> dict[str, str]:
    """Return the texts of all pages, by their paths on the site."""
    docs = [str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")]
    waiting = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", *docs]
    seen = set(waiting)
    pages = {"index.md": (HERE / "landing.md").read_text()}
    while waiting:
        origin = waiting.pop()
        text = _text_of(origin)
        if origin.endswith(".md"):
            found = {path for path, _ in _links(origin, text) if _is_page(path)} - seen
            waiting += found
            seen |= found
            text = _with_links_on_site(origin, text)
        pages[_uri(origin)] = text
    return pages | {f"reference/{_slug(title)}.md": _reference(title) for title in REFERENCE}


def _with_navigation(config: str, pages: dict[str, str]) -> str:
    """Complete the configuration with the pages that it does not name one by one."""

    def entries(named: list[str]) -> str:
        return "".join(f"\n{' ' * 10}- {name}" for name in named)

    records = sorted(uri for uri in pages if re.match(r"design/\d", uri))
    longer = ["design/README.md", "design/operator.md", "design/free_threading.md"]
    runbooks = sorted(uri for uri in pages if uri.startswith("runbooks/"))
    reference = [f'"{title}": reference/{_slug(title)}.md' for title in REFERENCE]
    config = config.replace("REFERENCE", entries(reference))
    config = config.replace("RUNBOOKS", entries(runbooks))
    return config.replace("RECORDS", entries([*longer, *records]))


def _with_links_on_site(origin: str, text: str) -> str:
    """Let the links of a page lead to the pages of the site."""
    here = posixpath.dirname(_uri(origin))

    def on_site(match: re.Match[str]) -> str:
        path, anchor = _resolved(origin, match[1])
        return posixpath.relpath(_uri(path), here or ".") + anchor if path else match[1]

    pieces, last = [], 0
    for fence in _FENCE.finditer(text):
        pieces += [_LINK.sub(on_site, text[last : fence.start()]), fence[0]]
        last = fence.end()
    return "".join([*pieces, _LINK.sub(on_site, text[last:])])


class _Html(HTMLParser):
    """Collects the anchors and references of a page of the site."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.references: list[str] = []
        self.loaded: list[str] = []
        """Addresses on other hosts from which the page would load something."""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        for target in (given[name] for name in ("href", "src") if name in given):
            if not re.match(r"(?:[a-z]+:|//)", target):
                self.references.append(target)
            elif tag not in ("a", "link") or given.get("rel") == "stylesheet":
                self.loaded.append(target)


def mistakes_of(site: Path) -> list[str]:
    """Return the references of a site that lead nowhere, and what its pages load from other hosts."""
    pages = {
        path: _Html(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"
    }
    found = [f"{page}: loads {each}" for page, html in pages.items() for each in html.loaded]
    for page, html in pages.items():
        for target in html.references:
            path, _, anchor = target.partition("#")
            place = (page.parent / path.partition("?")[0]).resolve() if path else page
            place = place / "index.html" if place.is_dir() else place
            if not place.exists() or (
                anchor and place in pages and anchor not in pages[place].anchors
            ):
                found.append(f"{page}: leads nowhere: {target}")
    return sorted(set(found))


def _links(origin: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the paths in the repository that a page links to, with their anchors."""
    for match in _LINK.finditer(_FENCE.sub("", text)):
        path, anchor = _resolved(origin, match[1])
        if path:
            yield path, anchor


def _resolved(origin: str, target: str) -> tuple[str, str]:
    """Return the path in the repository and the anchor of a link; an empty path if it leads elsewhere."""
    path, mark, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", target):
        return "", ""
    found = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
    return (found, mark + anchor) if (ROOT / found).exists() else ("", "")


def _uri(path: str) -> str:
    """Return where a file of the repository is on the site."""
    if path in RENAMED:
        return RENAMED[path]
    if path.startswith("docs/") and (ROOT / path).is_file():
        return path.removeprefix("docs/")
    if path.endswith(".md"):
        return f"repository/{path.lower()}"
    return f"source/{path}.md"


def _is_page(path: str) -> bool:
    """Return False for pictures and data, which are copied."""
    return not (
        path.startswith("docs/") and Path(path).suffix in (".png", ".webp", ".svg", ".json")
    )


def _text_of(path: str) -> str:
    """Return the text of a page; that of a source file or a folder is its content."""
    place = ROOT / path
    if path.endswith(".md"):
        return place.read_text()
    if place.is_file():
        return f"# {path}\n\n{_shown(place)}"
    inside = sorted(each for each in place.iterdir() if each.is_file())
    listed = "\n".join(f"* `{each.name}`" for each in inside)
    texts = [f"## {each.name}\n\n{_shown(each)}" for each in inside if each.suffix in _LANGUAGES]
    return f"# {path}/\n\n{listed}\n\n" + "\n".join(texts)


def _shown(place: Path) -> str:
    text = place.read_text()
    if len(text) > SHOWN_BYTES_MAX:
        text = f"{text[:SHOWN_BYTES_MAX]}\n... (the rest is in the repository)"
    return f"````{_LANGUAGES.get(place.suffix, 'text')}\n{text}\n````\n"


def _reference(title: str) -> str:
    """Return a page with the public names of some rooms, whose docstrings mkdocstrings puts in."""
    names = "\n\n".join(f"::: headgate.{name}" for name in sorted(_public(title), key=_last))
    return f"# {title}\n\n{names}\n"


def _public(title: str) -> list[str]:
    """Return the public names of a page of the reference, with the modules that define them."""
    if title == "Errors":
        return ["errors"]
    if title == "Connectors":
        return _exported("connectors")
    if title == "Tests of jobs":
        return _exported("testing")
    return [
        f"{home}.{name}"
        for home, names in _homes().items()
        if _page(home) == title
        for name in names
    ]


def _page(home: str) -> str:
    return next(title for title, rooms in REFERENCE.items() if home.startswith(rooms))


def _homes() -> dict[str, tuple[str, ...]]:
    """Return the table of public names in `__init__.py`, which is read and not run."""
    for statement in ast.parse((ROOT / "__init__.py").read_text()).body:
        if (
            isinstance(statement, ast.Assign)
            and getattr(statement.targets[0], "id", "") == "_NAMES"
        ):
            found: dict[str, tuple[str, ...]] = ast.literal_eval(statement.value)
            return found
    raise AssertionError("__init__.py has no table of names")


def _exported(room: str) -> list[str]:
    """Return the public names of a room, with the modules that define them."""
    body = ast.parse((ROOT / room / "__init__.py").read_text()).body
    # Those that are loaded when they are first used are imported for type checkers only.
    parts = [part for each in body for part in (each.body if isinstance(each, ast.If) else [each])]
    imports = [each for each in parts if isinstance(each, ast.ImportFrom) and each.level]
    return [f"{room}.{each.module}.{alias.name}" for each in imports for alias in each.names]


def _last(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _slug(title: str) -> str:
    return title.lower().replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main())
