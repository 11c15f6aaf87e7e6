"""The Markdown pages as a site: `make site`.

The pages stay as they are and readable on their own. Everything that README.md leads to is staged in the layout of the repository, other
files (results, recipes, source) as downloads, so that no link has to be rewritten; zensical builds it; then every link and
anchor of the built pages is followed.
"""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def linked_files(first: Path) -> set[Path]:
    """All files of the repository that links lead to, page after page."""
    found, waiting = {first}, [first]
    while waiting:
        page = waiting.pop()
        for target in LINK.findall(page.read_text("utf-8")):
            path = (page.parent / target.partition("#")[0]).resolve()
            if "://" not in target and path not in found and path.is_file() and path.is_relative_to(ROOT):
                found.add(path)
                waiting += [path] if path.suffix == ".md" else []
    return found


class Page(HTMLParser):
    """Where a built page leads, and what can be led to in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.links, self.anchors = path, list[str](), set[str]()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def broken_links(site: Path) -> list[str]:
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    broken = []
    for page in pages.values():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            path = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
            path = path / "index.html" if path.is_dir() else path
            anchor = unquote(parts.fragment)
            if not path.is_file() or (anchor and path in pages and anchor not in pages[path].anchors):
                broken.append(f"{page.path.relative_to(site)} leads to {link}")
    return sorted(set(broken))


def build() -> list[str]:
    pages, site = ROOT / "site" / "pages", ROOT / "site" / "html"
    shutil.rmtree(ROOT / "site", ignore_errors=True)
    for file in linked_files(ROOT / "README.md"):
        copy = pages / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    subprocess.run([Path(sys.executable).parent / "zensical", "build", "--clean"], cwd=ROOT, check=True)
    return broken_links(site)


if __name__ == "__main__":
    if problems := build():
        sys.exit("\n".join(problems))
    print(f"{ROOT / 'site' / 'html' / 'index.html'}: every link leads somewhere")
