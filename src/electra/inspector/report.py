"""The views of the server as one HTML file that opens from disk: the page's own modules and styles, with the data that they would
ask the server for. Nothing in it can load anything from elsewhere."""

import base64
import hashlib
import html
import re
from importlib import resources
from pathlib import Path
from typing import Any

from electra.base.errors import DataError, SettingsError
from electra.base.files import json_text
from electra.base.progress import visible
from electra.data.files import whole_file
from electra.inspector.gallery import Gallery
from electra.inspector.results import result_view, results_view, wrong_rows
from electra.inspector.watch import run_view, runs_view

MODULES = ("dom", "api", "tokens", "plot", "try", "watch", "compare", "docs", "main")
"""Each module comes after those that it imports."""
IMPORT = re.compile(r"^import .*\n", re.MULTILINE)
EXPORT = re.compile(r"^export (?=const|function|async)", re.MULTILINE)


def write_html(path: Path, out: Path) -> Path:
    """Writes the report of `path`, a run, results, or a folder of them. An existing .html file is overwritten, no other ever."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise SettingsError(f"{out}: a report is a .html file. Choose another out.")
    gallery = Gallery([path])
    if not gallery.runs and not gallery.results:
        raise DataError(
            f"{path} has neither a run nor results: there is nothing to report. A model alone is for electra serve."
        )
    page = report_page(visible(path.resolve().name), report_content(gallery)).encode()
    with whole_file(out) as file:
        file.write(page)
    return out


def report_content(gallery: Gallery) -> dict[str, Any]:
    """The server's answers by the path of the request."""
    content: dict[str, Any] = {"/api/runs": runs_view(gallery), "/api/results": results_view(gallery)}
    for number, found in enumerate(gallery.runs):
        content[f"/api/runs/{number}"] = {"name": found.name, **run_view(found.path)}
    for number, found in enumerate(gallery.results):
        view = content[f"/api/results/{number}"] = {"name": found.name, **result_view(found.path)}
        for place, group in enumerate(view["groups"]):
            if group.get("has_wrong"):
                content[f"/api/results/{number}/wrong/{place}"] = {"rows": wrong_rows(found.path, place)}
    return content


def report_page(name: str, content: dict[str, Any]) -> str:
    script, style = bundled(), page_text("style.css")
    policy = f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; img-src data:"
    page = page_text("index.html")
    head = page[page.index("<meta charset") : page.index("<link")].replace(
        "<title>electra", f"<title>{html.escape(name)} · electra"
    )
    body = page[page.index("<body>") :].replace('href="#try"', 'href="#watch"')
    data = json_text(content).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n{head}'
        f"<style>{style}</style>\n</head>\n"
        + body.replace(
            "</body>",
            f'<script type="application/json" id="embedded">{data}</script>\n<script type="module">{script}</script>\n</body>',
        )
    )


def bundled() -> str:
    """The modules concatenated, without imports and exports; a test makes sure that their top-level names are all different."""
    texts = (EXPORT.sub("", IMPORT.sub("", page_text(f"{name}.js"))) for name in MODULES)
    return "\n".join(texts)


def page_text(name: str) -> str:
    return (resources.files("electra.inspector") / "page" / name).read_text("utf-8")


def digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
