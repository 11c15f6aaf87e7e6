"""A real browser clicks through every view and sees what a person would see: no error in its console, no request to another host.

`make test-browser` runs these alone. Without a browser on the machine they are skipped."""

import csv
import json
import shutil
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import pytest

from electra.finetuning.run import finetune
from electra.inspector.report import write_html
from electra.train.log import METRICS
from helpers import command, electra, environment
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
KINDS = {"tags": {"kind": "tagging"}, "questions": {"kind": "span", "max_query_length": 8, "doc_stride": 12}}
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
FOCUS = """
const e = document.activeElement;
if (!e || e === document.body) return null;
return [e.id || e.className.split(" ")[0] || e.textContent, getComputedStyle(e).outlineStyle];
"""
UNNAMED = """
return [...document.querySelectorAll("button, input, select, textarea, [role=button], a")].filter((e) => e.getClientRects().length
  && !(e.textContent.trim() || e.getAttribute("aria-label") || e.labels?.length)).map((e) => e.outerHTML.slice(0, 80));
"""


@pytest.fixture(scope="module")
def folder(finished_run, toy_model, prepared, recipe, tmp_path_factory):
    """A run with an alarm, another with other settings, one of Electric, and fine-tuned models of three kinds; names and labels that a
    page must not obey."""
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
    words = ["the", "barak", "walks", "the", "lonute"]
    tags = ["B-THING", "I-THING", "B-VERB", "B-THING", "I-THING"]
    answer = {"text": "barak", "answer_start": 4}
    questions = [
        {"id": str(n), "question": "who walks", "context": f"The barak walks {n}.", "answers": [answer]}
        for n in range(40)
    ]
    tables = {"tags": [{"tokens": words, "tags": tags}] * 40, "questions": questions}
    for name, rows in tables.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        finetune(toy_model, [str(folder / f"{name}.jsonl")], overrides | KINDS[name], folder / name, seeds=1)
    done = electra("pretrain", f"{recipe}+electric", f"data={prepared}", f"run={folder / 'electric'}", "train.steps=8")
    assert done.returncode == 0, done.stderr
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


def choose_model(browser, part, side="a"):
    value = browser.run(
        "return [...document.querySelectorAll(arguments[1])].find((o) => o.textContent.includes(arguments[0])).value",
        part,
        f"#model-{side} option",
    )
    browser.set(f"#model-{side}", value)


def number_of(server, part):
    return next(it["number"] for it in server.get("/api/models")["models"] if part in it["name"])


def test_a_text_is_looked_at_corrupted_and_mended_by_hand(browser, server):
    browser.open(f"{server.url}#try", ".token")
    choose_model(browser, "first")
    browser.set("#input-text", TEXT)
    until(lambda: "".join(browser.texts(".answer .text .token")[:2]) == "Thebarak")
    first = number_of(server, "first")
    (expected,) = server.ask("/api/detect", model=first, texts=[TEXT])
    shown = browser.texts(".answer .text .token", "title")
    assert len(shown) == len(expected)
    assert all(f"{100 * it['probability']:.1f} %" in title for it, title in zip(expected, shown, strict=True))
    # the generator has its turn; a seed is a text
    browser.set("#share", "40")
    browser.click("#corrupt")
    until(lambda: browser.all(".text .was"))
    before = browser.text(".answer .text")
    (played,) = server.ask("/api/corrupt", model=first, texts=[TEXT], share=0.4, seed=0)
    replaced = [it for it in played if it["token"] != it["original"]]
    assert len(browser.all(".text .was")) == len(replaced)
    browser.set("#threshold", "0.01")
    assert int(browser.text("#hits")) == sum(it["probability"] >= 0.01 for it in replaced)
    browser.set("#threshold", "0.99")
    assert int(browser.text("#misses")) == sum(it["probability"] < 0.99 for it in replaced)
    browser.click("#another")
    until(lambda: browser.text(".answer .text") != before)
    browser.click("#restore")
    until(lambda: not browser.all(".text .was"))
    # a proposal is chosen by keyboard
    browser.run("document.querySelector(\".answer .text .token[tabindex='0']\").focus()")
    keys = webdriver.common.keys.Keys
    browser.driver.switch_to.active_element.send_keys(keys.ARROW_RIGHT)
    browser.driver.switch_to.active_element.send_keys(keys.ENTER)
    until(lambda: len(browser.all("#proposals li")) == 10)
    ((proposals,),) = server.ask("/api/fill", model=first, items=[{"text": TEXT, "places": [1]}])
    assert [it["token"] for it in proposals] == browser.texts("#proposals .bar span:first-child")
    other = next(n for n, it in enumerate(proposals) if it["token"] != "barak")
    browser.run("document.querySelectorAll('#proposals .bar')[arguments[0]].click()", other)
    until(lambda: len(browser.all(".text .was")) == 1)


def test_what_is_typed_and_corrupted_at_once_is_asked_once(browser, server):
    browser.open(f"{server.url}#try", ".token")
    choose_model(browser, "first")
    until(lambda: browser.all("#corrupt"))
    browser.run(
        "window.asked = []; const plain = window.fetch; window.fetch = (...values) => { asked.push(values[0]); return plain(...values); };"
        "const box = document.querySelector('#input-text'); box.value = arguments[0]; box.dispatchEvent(new Event('input', {bubbles: true}));"
        "document.querySelector('#share').value = 40; document.querySelector('#corrupt').click();",
        TEXT,
    )
    until(lambda: browser.all(".answer .text .was"))
    browser.run("document.querySelector('.answer .token').focus()")
    time.sleep(0.6)  # past the pause after the last key
    assert browser.run("return asked.map((it) => new URL(it, location).pathname)") == ["/api/corrupt", "/api/replace"]
    assert browser.run("return document.activeElement.matches('.answer .token')")
    # an answer that is drawn again leaves the keyboard where it is
    browser.run("document.querySelector('#threshold').dispatchEvent(new Event('input'))")
    assert browser.run("return document.activeElement.matches('.answer .token')")


def test_two_models_stand_side_by_side_and_labels_are_text(browser, server):
    browser.open(f"{server.url}#try", ".token")
    choose_model(browser, "tasks/")
    until(lambda: len(browser.all(".answer .bar")) == 2)
    labels = browser.texts(".answer .bar span:first-child")
    assert sorted(labels) == sorted([SCRIPT, "␛[31mred"])
    browser.set("#model-b", browser.run("return document.querySelector('#model-a').value"))
    until(lambda: len(browser.all(".answer")) == 2)
    # the same replacements in both, each with what it caught
    choose_model(browser, "first")
    choose_model(browser, "other", "b")
    until(lambda: len(browser.all(".answer .text")) == 2)
    browser.click("#corrupt")
    until(lambda: browser.all(".answer:last-child .text .was"))
    first, second = (browser.texts(f".answer:{place}-child .text .was") for place in ("first", "last"))
    assert first == second and len(browser.texts(".answer .outcome")) == 2
    assert browser.text(".answer .outcome").startswith(f"hits {browser.text('#hits')} ")


def test_electric_says_how_well_each_token_fits(browser, server):
    browser.open(f"{server.url}#try", ".token")
    choose_model(browser, "electric")
    browser.set("#input-text", TEXT)
    (expected,) = server.ask("/api/score", model=number_of(server, "electric"), texts=[TEXT])
    until(lambda: browser.texts("#likelihood") == [f"{expected['score']:.2f}"])
    shown = browser.texts(".answer .token", "title")
    pairs = zip(shown, expected["token_scores"], strict=True)
    assert all(title.endswith(f"log-likelihood {score:.3f}") for title, score in pairs)
    # by keyboard, and readable without a pointer
    browser.run("document.querySelector('.answer .token[tabindex=\"0\"]').focus()")
    browser.driver.switch_to.active_element.send_keys(webdriver.common.keys.Keys.END)
    assert browser.run("return document.activeElement.title") == shown[-1] and shown[-1] in browser.text(".answer")


def test_tags_stand_in_place_and_answers_are_marked_where_they_were_found(browser, server):
    browser.open(f"{server.url}#try", ".token")
    choose_model(browser, "tags/")
    words = ["the", "barak", "walks", "the", "lonute"]
    browser.set("#input-tokens", " ".join(words))
    (answer,) = server.ask("/api/predict", model=number_of(server, "tags/"), rows=[{"tokens": words}])
    expected = [" ".join(words[it["start"] : it["end"]]) + it["type"] for it in answer["spans"]]
    assert len(expected) > 1
    until(lambda: browser.texts("#prediction .tag") == expected)
    # a character that JavaScript counts twice, and an answer that stands there several times
    choose_model(browser, "questions/")
    row = {"question": "who walks", "context": "🙂 The barak walks. The barak walks. The barak walks."}
    (answer,) = server.ask("/api/predict", model=number_of(server, "questions/"), rows=[row])
    for name, text in row.items():
        browser.set(f"#input-{name}", text)
    until(lambda: browser.texts("#prediction") == [answer["prediction"]] and browser.texts(".answer mark"))
    before = browser.run("return document.querySelector('.answer mark').previousSibling.textContent")
    best = answer["n_best"][0]
    assert browser.text(".answer mark") == best["text"] and before == row["context"][: best["start"]]


def test_any_text_is_shown_as_text(browser, server):
    browser.open(f"{server.url}#try", ".token")
    choose_model(browser, "first")
    for text, wanted in {
        "今天天气很好。": ["今", "天", "天"],
        "السلام عليكم the barak": None,
        SCRIPT: ["<"],
        "🙂👩‍👩‍👧 the barak": None,
        "\x1b[31m \u202e": None,
        " ": [],
        "a " * 9000: ["a", "a"],
    }.items():
        browser.set("#input-text", text)
        shown = text.replace("\x1b", "␛").replace("\u202e", "⟨U+202E⟩")
        until(lambda shown=shown: browser.text(".answer .text")[:200] == shown[:200])  # all of it, each character once
        if wanted is not None:
            assert browser.texts(".answer .text .token")[: len(wanted)] == wanted
        assert browser.run("return document.querySelectorAll('.answer script').length") == 0
        direction = browser.run("return getComputedStyle(document.querySelector('.answer .text')).direction")
        assert direction == ("rtl" if text.startswith("ا") else "ltr")
        assert len(browser.all(".answer .text .token")) < 3000  # of a long text what is near
    browser.set("#input-text", "x " * 60_000)
    until(lambda: "at most 100,000" in browser.text("[role=alert]"))


PLOTS = "return [...document.querySelectorAll('#charts svg.plot')].map((e) => e.getAttribute('aria-label'))"


def show_runs(browser, *names):
    """These, in their order, and no others."""
    for box in browser.all("#runs input:checked"):
        browser.run("arguments[0].click()", box)
    until(lambda: not browser.all("#runs input:checked"))
    for count, name in enumerate(names, 1):
        browser.run(
            "[...document.querySelectorAll('#runs label')].find((l) => l.textContent.startsWith(arguments[0])).querySelector('input').click()",
            name,
        )
        until(lambda count=count: len(browser.all("#runs .swatch[style*=run]")) == count)


def test_runs_are_drawn_overlaid_and_told_apart(browser, server):
    browser.open(f"{server.url}#watch", "#charts figure")
    show_runs(browser, "first", "other")
    rows = until(lambda: browser.texts("#difference tbody tr"))
    assert len(rows) == 2 and all("lr" in it and it.endswith("0.0020.001") for it in rows)
    titles = browser.texts("#charts figcaption")
    for word in ("MLM", "RTD", "AUC", "Precision", "Replaced", "Learning", "Tokens"):
        assert any(word in title for title in titles), word
    assert all("against steps" in it for it in browser.run(PLOTS))
    browser.set("#axis", "tokens")
    assert all("against tokens" in it for it in browser.run(PLOTS))
    # the slider over the evaluations
    assert browser.text("#sample-step") == "step 40" and len(browser.all(".sentences li")) > 5
    last = browser.text(".sentences")
    browser.set("#steps", "0")
    assert browser.text("#sample-step") == "step 10" and browser.text(".sentences") != last


def test_an_alarm_is_shown_with_its_advice_and_obeyed_by_nobody(browser, server):
    browser.open(f"{server.url}#watch", "#charts figure")
    show_runs(browser, "first")
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


def test_results_are_compared_filtered_and_downloaded(browser, server):
    browser.open(f"{server.url}#compare", "#summary tbody tr")
    value = browser.run("return [...document.querySelectorAll('#result option')].find((o) => o.text == 'tasks').value")
    browser.set("#result", value)
    until(lambda: len(browser.all(".group svg.dots circle")) == 2)
    (group,) = server.get(f"/api/results/{value}")["groups"]
    cells = browser.run(
        "return [...document.querySelectorAll('.matrix tbody tr')].map((r) => [...r.querySelectorAll('td')].map((c) => +c.textContent))"
    )
    assert cells == group["confusion"] and sum(map(sum, cells)) > 1
    browser.run("document.querySelector('details.wrong').open = true")
    rows = server.get(f"/api/results/{value}/wrong/0")["rows"]
    shown = until(lambda: browser.texts(".wrong-rows tbody tr"))
    sure = [float(it.split("%")[0]) for it in shown]
    assert len(shown) == len(rows) > 1 and sure == sorted(sure, reverse=True)
    # by text, by class, and what is left is what is downloaded
    text = next(iter(rows[0]["input"].values()))
    browser.set("input[type=search]", text)
    assert len(browser.all(".wrong-rows tbody tr")) == sum(text in it["input"]["text"] for it in rows)
    browser.run(
        "URL.createObjectURL = (blob) => { blob.text().then((it) => { window.saved = it; }); return ''; };"
        "HTMLAnchorElement.prototype.click = () => {}"
    )
    browser.click(".wrong button:nth-of-type(2)")
    saved = until(lambda: browser.run("return window.saved"))
    assert json.loads(saved) == [it for it in rows if text in it["input"]["text"]]
    browser.run("window.saved = ''")
    browser.click(".wrong button:nth-of-type(1)")
    table = list(csv.DictReader(until(lambda: browser.run("return window.saved")).splitlines()))
    assert [it["text"] for it in table] == [it["input"]["text"] for it in json.loads(saved)]
    browser.set("input[type=search]", "nothing has this")
    assert not browser.all(".wrong-rows tbody tr")


def test_the_api_describes_itself(browser, server):
    browser.open(f"{server.url}#api", "pre")
    text = browser.text("main")
    for path in ("/api/detect", "/api/fill", "/api/score", "/api/predict", "/api/embed", "/health"):
        assert path in text


@pytest.mark.parametrize(
    "view, shows", [("try", ".token"), ("watch", "#sentences"), ("compare", "#summary tr"), ("api", "pre")]
)
def test_every_view_fits_every_width_can_be_read_and_has_names(browser, server, view, shows):
    for width in WIDTHS:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.open(f"{server.url}#{view}", "h1")
        if view == "watch":
            show_runs(browser, "first")
        browser.wait(shows)
        assert browser.run("return document.documentElement.scrollWidth") <= width
        for scheme in ("light", "dark"):
            media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
            assert browser.run(CONTRAST) == [], scheme
        assert browser.run(UNNAMED) == []
        assert len(browser.all("h1")) == 1 and browser.all("main") and browser.all("nav [aria-current]")
    browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_keyboard_reaches_everything_in_the_order_of_the_page_and_shows_where_it_is(browser, server):
    browser.open(f"{server.url}#try", ".token")
    choose_model(browser, "first")
    browser.wait("#threshold")
    browser.run("document.activeElement.blur()")
    keys, places = webdriver.common.keys.Keys, []
    for _ in range(40):
        browser.driver.switch_to.active_element.send_keys(keys.TAB)
        place = browser.run(FOCUS)
        if place is None or place in places:
            break
        places.append(place)
    names = [name for name, _ in places]
    for one, next_one in pairwise(
        ["skip", "Watch", "model-a", "model-b", "input-text", "token", "threshold", "share", "seed", "corrupt"]
    ):
        assert names.index(one) < names.index(next_one), names
    assert all(ring != "none" for _, ring in places), places
    media = {"features": [{"name": "prefers-reduced-motion", "value": "reduce"}]}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    assert browser.run("return document.getAnimations().length") == 0


def test_a_report_opens_from_disk(browser, server, folder, tmp_path):
    path = write_html(folder, tmp_path / "report.html")
    browser.open(Path(path).as_uri(), "#charts figure")
    show_runs(browser, "first")
    assert browser.text("nav") == "WatchCompare" and browser.all("#sentences")
    assert SCRIPT in browser.text(".alarm")
    browser.open(f"{Path(path).as_uri()}#compare", "#summary tbody tr")
    assert browser.all(".group svg.dots circle")
