"""A real browser clicks through every view and sees what a person would see: no error in its console, no request to another host.

`make test-browser` runs these alone. Without a browser on the machine they are skipped."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from electra.finetuning.run import finetune
from electra.inspector.report import write_html
from electra.train.log import METRICS
from helpers import command, environment
from serving import SCRIPT, serving, until

BROWSER, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
webdriver = pytest.importorskip("selenium.webdriver")
pytestmark = [
    pytest.mark.skipif(not BROWSER or not DRIVER, reason="no browser here: apt-get install chromium chromium-driver"),
    pytest.mark.slow,
]
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage"
)
TEXT = "The barak walks the lonute, and the lonute walks back."
WIDTHS = (360, 768, 1280)
# relative luminance as WCAG defines it, for every element that shows text of its own
CONTRAST = """
const lum = (c) => { const [r, g, b] = c.map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
const rgba = (c) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = c; canvas.fillRect(0, 0, 1, 1); const d = canvas.getImageData(0, 0, 1, 1).data; return [d[0], d[1], d[2], d[3] / 255]; };
const over = (top, below) => top.slice(0, 3).map((v, i) => v * top[3] + below[i] * (1 - top[3]));
const ground = (e) => { const all = []; for (let x = e; x; x = x.parentElement) all.push(rgba(getComputedStyle(x).backgroundColor)); return all.reverse().reduce((b, t) => over(t, b), [255, 255, 255]); };
const bad = [];
for (const e of document.querySelectorAll("body *")) {
  if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) || e.closest("svg, script, style, noscript, .hidden, option, :disabled") || !e.getClientRects().length) continue;
  const b = ground(e), f = over(rgba(getComputedStyle(e).color), b), [x, y] = [lum(f), lum(b)].sort((p, q) => q - p), ratio = (x + 0.05) / (y + 0.05);
  if (ratio < 4.5) bad.push(`${ratio.toFixed(2)} ${e.tagName}.${e.className} ${e.textContent.slice(0, 30)}`);
}
return bad;
"""
UNNAMED = """
return [...document.querySelectorAll("button, input, select, textarea, [role=button], a")].filter((e) => e.getClientRects().length
  && !(e.textContent.trim() || e.getAttribute("aria-label") || e.labels?.length)).map((e) => e.outerHTML.slice(0, 80));
"""


@pytest.fixture(scope="module")
def folder(finished_run, toy_model, tmp_path_factory):
    """A run with an alarm, another with other settings, and results; names and labels that a page must not obey."""
    folder = tmp_path_factory.mktemp("served")
    shutil.copytree(finished_run, folder / "first")
    shutil.copytree(finished_run, folder / f"other {SCRIPT.replace('/', '')}")
    config = folder / "first" / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.001", "lr = 0.002"))
    alarm = {"kind": "alarm", "step": 40, "alarm": "test", "text": f"{SCRIPT} \x1b[31m\u202eturned"}
    with (folder / "first" / METRICS).open("a") as file:
        file.write(json.dumps(alarm) + "\n")
    labels = SCRIPT, "\x1b[31mred"
    rows = [{"text": f"the barak {'walks' if n % 3 else 'reads'} {n}", "label": labels[n % 2]} for n in range(60)]
    (folder / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = {"epochs": 1, "length": 32, "min_steps": 0}
    finetune(toy_model, [str(folder / "table.jsonl")], overrides, folder / "tasks", seeds=2)
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(DRIVER)
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_page_load_timeout(60)
    try:
        yield Page(driver)
    finally:
        driver.quit()


class Page:
    def __init__(self, driver):
        self.driver = driver

    def open(self, url, shows):
        self.driver.get("about:blank")
        self.driver.get(url)
        self.wait(shows)

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def wait(self, selector, seconds=40):
        return until(lambda: self.all(selector), seconds)[0]

    def texts(self, selector, what="textContent"):
        """In one go: a page that is drawn again has other elements."""
        return self.run(f"return [...document.querySelectorAll(arguments[0])].map((e) => e.{what})", selector)

    def text(self, selector):
        return until(lambda: self.texts(selector))[0]

    def run(self, script, *values):
        return self.driver.execute_script(script, *values)

    def click(self, selector):
        self.wait(selector)
        self.run("document.querySelector(arguments[0]).click()", selector)

    def set(self, selector, value):
        """As a person would: the value, and the event that follows it."""
        self.wait(selector)
        self.run(
            "const it = document.querySelector(arguments[0]); it.value = arguments[1];"
            "for (const e of ['input', 'change']) it.dispatchEvent(new Event(e, {bubbles: true}))",
            selector,
            value,
        )

    def require_quiet(self, *origins):
        """Nothing in the console, no script of others, no request to another host."""
        errors = [it["message"] for it in self.driver.get_log("browser") if it["level"] in ("SEVERE", "WARNING")]
        assert not errors, errors
        assert not self.run("return window.pwned")
        messages = [json.loads(it["message"])["message"] for it in self.driver.get_log("performance")]
        urls = [it["params"]["request"]["url"] for it in messages if it["method"] == "Network.requestWillBeSent"]
        foreign = [url for url in urls if not url.startswith((*origins, "about:", "data:", "blob:"))]
        assert not foreign, foreign


@pytest.fixture(scope="module")
def server(folder):
    with serving([folder]) as server:
        yield server


@pytest.fixture(autouse=True)
def quiet(browser, server):
    browser.driver.get_log("browser"), browser.driver.get_log("performance")
    yield
    browser.require_quiet(server.url, "file:")


def choose_model(browser, part):
    value = browser.run(
        "return [...document.querySelectorAll('#model-a option')].find((o) => o.textContent.includes(arguments[0])).value",
        part,
    )
    browser.set("#model-a", value)


def test_a_text_is_looked_at_corrupted_and_mended_by_hand(browser, server):
    browser.open(f"{server.url}#try", ".token")
    choose_model(browser, "first")
    browser.set("#input-text", TEXT)
    until(lambda: "".join(browser.texts(".answer .text .token")[:2]) == "Thebarak")
    (expected,) = server.ask("/api/detect", model=0, texts=[TEXT])
    shown = browser.texts(".answer .text .token", "title")
    assert len(shown) == len(expected)
    assert all(f"{100 * it['probability']:.1f} %" in title for it, title in zip(expected, shown, strict=True))
    # the generator has its turn; a seed is a text
    browser.set("#share", "40")
    browser.click("#corrupt")
    until(lambda: browser.all(".text .was"))
    first = browser.text(".answer .text")
    (played,) = server.ask("/api/corrupt", model=0, texts=[TEXT], share=0.4, seed=0)
    replaced = [it for it in played if it["token"] != it["original"]]
    assert len(browser.all(".text .was")) == len(replaced)
    browser.set("#threshold", "0.01")
    assert int(browser.text("#hits")) == sum(it["probability"] >= 0.01 for it in replaced)
    browser.set("#threshold", "0.99")
    assert int(browser.text("#misses")) == sum(it["probability"] < 0.99 for it in replaced)
    browser.click("#another")
    until(lambda: browser.text(".answer .text") != first)
    browser.click("#restore")
    until(lambda: not browser.all(".text .was"))
    # a proposal is chosen by keyboard
    token = browser.wait(".answer .text .token[tabindex='0']")
    browser.run("arguments[0].focus()", token)
    keys = webdriver.common.keys.Keys
    token.send_keys(keys.ARROW_RIGHT)
    browser.driver.switch_to.active_element.send_keys(keys.ENTER)
    until(lambda: len(browser.all("#proposals li")) == 10)
    ((proposals,),) = server.ask("/api/fill", model=0, items=[{"text": TEXT, "places": [1]}])
    assert [it["token"] for it in proposals] == browser.texts("#proposals .bar span:first-child")
    other = next(n for n, it in enumerate(proposals) if it["token"] != "barak")
    browser.run("document.querySelectorAll('#proposals .bar')[arguments[0]].click()", other)
    until(lambda: len(browser.all(".text .was")) == 1)


def test_two_models_stand_side_by_side_and_labels_are_text(browser, server):
    browser.open(f"{server.url}#try", ".token")
    choose_model(browser, "seed-0")
    until(lambda: len(browser.all(".answer .bar")) == 2)
    labels = browser.texts(".answer .bar span:first-child")
    assert sorted(labels) == sorted([SCRIPT, "␛[31mred"])
    browser.set("#model-b", browser.run("return document.querySelector('#model-a').value"))
    until(lambda: len(browser.all(".answer")) == 2)
    choose_model(browser, "first")
    until(lambda: len(browser.all(".answer .text .token")) > 5 and len(browser.all(".answer")) == 2)


@pytest.mark.parametrize(
    "text", ["今天天气很好。", "السلام عليكم the barak", SCRIPT, "\x1b[31m \u202e", " ", "a " * 9000]
)
def test_any_text_is_shown_as_text(browser, server, text):
    browser.open(f"{server.url}#try", ".token")
    choose_model(browser, "first")
    browser.set("#input-text", text)
    wanted = "␛" if text.startswith("\x1b") else text.split()[0][:1] if text.split() else ""
    until(
        lambda: (
            wanted in browser.text(".answer .text")
            and not browser.run("return document.querySelector('#status').textContent")
        )
    )
    assert browser.run("return document.querySelectorAll('.answer script').length") == 0
    direction = browser.run("return getComputedStyle(document.querySelector('.answer .text')).direction")
    assert direction == ("rtl" if text.startswith("ا") else "ltr")
    assert len(browser.all(".answer .text .token")) < 3000  # of a long text what is near


def test_runs_are_drawn_overlaid_and_told_apart(browser, server):
    browser.open(f"{server.url}#watch", "#charts figure")
    browser.click("#runs input:not(:checked)")
    rows = until(lambda: browser.all("#difference tbody tr"))
    assert len(rows) == 2 and all(it.text.endswith("0.001 0.002") for it in rows)
    titles = browser.texts("#charts figcaption")
    for word in ("MLM", "RTD", "AUC", "Precision", "Replaced", "Learning", "Tokens"):
        assert any(word in title for title in titles), word
    assert all(it.get_attribute("aria-label") for it in browser.all("#charts svg.plot"))
    # the slider over the evaluations
    assert browser.text("#sample-step") == "step 40" and len(browser.all(".sentences li")) > 5
    last = browser.text(".sentences")
    browser.set("#steps", "0")
    assert browser.text("#sample-step") == "step 10" and browser.text(".sentences") != last


def test_an_alarm_is_shown_with_its_advice_and_obeyed_by_nobody(browser, server):
    browser.open(f"{server.url}#watch", "#charts figure")
    for box in browser.all("#runs input:checked"):
        browser.run("arguments[0].click()", box)
    until(lambda: not browser.all("#runs input:checked"))
    name = "return [...document.querySelectorAll('#runs label')].find((l) => l.textContent.startsWith('first')).querySelector('input')"
    browser.run("arguments[0].click()", browser.run(name))
    assert browser.text(".alarm") == f"step 40: test{SCRIPT} ␛[31m⟨U+202E⟩turned"


def test_a_run_is_seen_to_go_on_and_to_be_killed(browser, prepared, recipe, tmp_path):
    run = tmp_path / "live"
    words = f"data={prepared}", f"run={run}", "train.steps=100000", "train.log_every=2", "schedule.warmup=4"
    process = subprocess.Popen(command("pretrain", recipe, *words), env=environment(), stderr=subprocess.DEVNULL)
    try:
        until(lambda: (run / METRICS).is_file() and (run / METRICS).stat().st_size > 200, 120)
        with serving([run]) as live:
            browser.open(f"{live.url}#watch", "#pill")
            assert browser.text("#pill") == "running"
            before = browser.text("#state dd")
            until(lambda: browser.text("#state dd") != before)
            until(lambda: browser.all("#sentences"), 90)
            process.send_signal(signal.SIGKILL)
            process.wait(30)
            until(lambda: browser.text("#pill") == "killed")
            browser.require_quiet(live.url)
            browser.driver.get("about:blank")
    finally:
        process.kill()
        process.wait(30)


def test_results_are_compared_filtered_and_downloadable(browser, server):
    browser.open(f"{server.url}#compare", "#summary tbody tr")
    assert len(browser.all(".group svg.dots circle")) == 2
    assert browser.all(".group table.matrix tbody tr")
    browser.run("document.querySelector('details.wrong').open = true")
    rows = until(lambda: browser.all(".wrong-rows tbody tr"))
    sure = [float(it.text.split()[0]) for it in rows]
    assert sure == sorted(sure, reverse=True)
    browser.set("input[type=search]", "reads 3 ")
    assert len(browser.all(".wrong-rows tbody tr")) < len(rows) or len(rows) == 0
    browser.set("input[type=search]", "nothing has this")
    assert not browser.all(".wrong-rows tbody tr")


def test_the_api_describes_itself(browser, server):
    browser.open(f"{server.url}#api", "pre")
    text = browser.text("main")
    for path in ("/api/detect", "/api/fill", "/api/score", "/api/predict", "/api/embed", "/health"):
        assert path in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "view, shows", [("try", ".token"), ("watch", "#sentences"), ("compare", "#summary tr"), ("api", "pre")]
)
def test_every_view_fits_every_width_can_be_read_and_has_names(browser, server, view, shows, scheme):
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    for width in WIDTHS:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.open(f"{server.url}#{view}", shows)
        time.sleep(0.3)
        assert browser.run("return document.documentElement.scrollWidth") <= width
        assert browser.run(CONTRAST) == []
        assert browser.run(UNNAMED) == []
        assert len(browser.all("h1")) == 1 and browser.all("main") and browser.all("nav [aria-current]")
    browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_report_opens_from_disk(browser, server, folder, tmp_path):
    path = write_html(folder, tmp_path / "report.html")
    browser.open(Path(path).as_uri(), "#charts figure")
    assert browser.text("nav") == "WatchCompare" and browser.all("#sentences")
    browser.open(f"{Path(path).as_uri()}#compare", "#summary tbody tr")
    assert browser.all(".group svg.dots circle")
