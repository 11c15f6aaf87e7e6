"""The pages as a site: every link of the built pages leads somewhere, and the check finds those that do not."""

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("site_builder", ROOT / "docs" / "site.py")
assert spec and spec.loader
site_builder = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site_builder)


def test_a_missing_page_and_a_missing_anchor_are_found(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text(
        '<h1 id="top">x</h1><a href="#top"><a href="#no"><a href="sub/other.html#here"><a href="sub/other.html#away">'
        '<a href="sub/none.html"><img src="none.png"><a href="https://example.org/none">'
    )
    (tmp_path / "sub" / "other.html").write_text('<p id="here"><a href="../index.html#top">')
    targets = [line.split(" leads to ")[1] for line in site_builder.broken_links(tmp_path)]
    assert targets == ["#no", "none.png", "sub/none.html", "sub/other.html#away"]


def test_every_page_is_led_to_from_the_readme_and_has_its_place_in_the_menu():
    pages = {file for file in site_builder.linked_files(ROOT / "README.md") if file.suffix == ".md"}
    assert pages >= set((ROOT / "docs").rglob("*.md"))
    menu = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    listed = {
        ROOT / path
        for part in menu
        for entry in part.values()
        for path in ([entry] if isinstance(entry, str) else entry)
    }
    assert listed <= pages and listed >= set((ROOT / "docs").rglob("*.md"))


def test_the_site_is_built_and_every_link_leads_somewhere():
    pytest.importorskip("zensical")
    done = subprocess.run([sys.executable, ROOT / "docs" / "site.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (ROOT / "site" / "html" / "docs" / "glossary.html").read_text("utf-8")
    assert "replaced token detection" in page


def test_a_screen_is_what_was_printed_with_its_colours_and_nothing_from_elsewhere(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("screens", ROOT / "docs" / "screens.py")
    screens = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(screens)
    monkeypatch.setattr(screens, "IMAGES", tmp_path)
    output = "\n".join(["\033[31mred\033[0m", *(f"line{number}" for number in range(100)), "last"])
    svg = screens.draw("x", "electra detect", output).read_text()
    assert all(word in svg for word in ("red", "line5", "last", "…")) and "line50" not in svg
    assert "#f92672" in svg.lower() or "#f4005f" in svg.lower()  # the theme's red
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "").replace("https://www.textualize.io", "")
    page = (ROOT / "docs" / "first-day.md").read_text()
    assert all(f"images/first-day-{name}.svg" in page for name in screens.SCREENS)
