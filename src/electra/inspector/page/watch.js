// Watch: runs as they go on.
import { get, isReport, listen } from "./api.js";
import { duration, field, fill, h, number, options, percent, say, visible } from "./dom.js";
import { colour, curves } from "./plot.js";
import { countsList, outcomeCounts, outcomeLegend, plain, playedText } from "./tokens.js";

const PANELS = [
  ["Generator: MLM loss", [["mlm_loss", ""]]],
  ["Discriminator: RTD loss", [["rtd_loss", ""]]],
  ["Detection: ROC-AUC", [["auc", ""]]],
  ["Precision and recall", [["precision", "precision"], ["recall", "recall"]]],
  ["Replaced share of tokens", [["replaced_share", ""]]],
  ["Learning rate", [["lr", ""]]],
  ["Tokens per second", [["tokens_per_second", ""]]],
  ["Model FLOPs utilisation", [["mfu", ""]]],
  ["GPU memory in GiB", [["gpu_memory", ""]]],
  ["Loss of the objective", [["recovery_loss", "recovery"], ["span_loss", "span"], ["energy_variance", "variance of energies"]]],
];
const MOST_RUNS = 6, MOST_RECORDS = 4000;
/** What a run is drawn against; held-out records have no clock of their own and take that of the training step beside them. */
const AXES = { step: "steps", tokens: "tokens", training_seconds: "hours of training" };
const STATES = { running: "running", finished: "finished", killed: "killed", failed: "failed", diverged: "diverged", interrupted: "interrupted", preempted: "preempted", unknown: "unknown" };

export async function watchView(view) {
  const { runs } = await get("/api/runs");
  if (!runs.length) {
    fill(view, h("h1", {}, "Watch"), h("p", { class: "empty panel" }, "There is no run here. Start one with electra pretrain, in a folder that is served."));
    return () => {};
  }
  const seen = new Map(); // number of a run -> {name, state, records, settings, samples, stop, place}
  const list = h("ul", { class: "runs", id: "runs" }), facts = h("div", { class: "stack" }), charts = h("div", { class: "charts", id: "charts" });
  const sentences = h("div"), difference = h("div");
  const axis = options(h("select", { id: "axis", onchange: () => showCharts() }), Object.entries(AXES), "step");
  const shown = { step: null, threshold: 0.5, isLast: true };
  fill(view, h("h1", {}, "Watch"),
    h("p", { class: "lead" }, isReport ? "A pre-training run from its first step to its last." : "Pre-training runs as they go on, also those of another process or of a machine that shares this disk."),
    h("div", { class: "stack" },
      h("div", { class: runs.length > 1 ? "columns side" : "stack" }, facts, runs.length > 1 ? h("section", { class: "panel", "aria-label": "Runs" }, h("h2", {}, "Runs"), list) : null),
      h("div", { class: "row spread" }, h("p", { class: "tiny" }, "Thin lines are training, lines with dots held-out documents."), field("Drawn against", axis)), charts, difference, sentences));

  const chosen = () => [...seen.keys()];
  const main = () => seen.get(chosen()[0]);

  const showFacts = () => {
    const run = main();
    if (!run) return fill(facts);
    const { state, records } = run, train = records.filter((it) => it.kind === "train").at(-1) || {}, heldout = records.filter((it) => it.kind === "heldout").at(-1) || {};
    const planned = state.planned_steps, entries = [["step", planned ? `${number(state.step)} of ${number(planned)}` : number(state.step)], ["time left", state.state === "running" ? duration(state.seconds_left) : "–"],
      ["AUC, held-out", number(heldout.auc ?? train.auc)], ["MLM loss, held-out", number(heldout.mlm_loss ?? train.mlm_loss)], ["tokens/s", number(train.tokens_per_second)]];
    if (train.mfu) entries.push(["MFU", percent(train.mfu)]);
    if (train.gpu_memory) entries.push(["GPU memory", `${(train.gpu_memory / 2 ** 30).toFixed(1)} GiB`]);
    if (train.tokens) entries.push(["tokens", number(train.tokens)]);
    const alarms = records.filter((it) => it.kind === "alarm");
    const old = state.state === "running" && state.seconds_since_news > 60;
    fill(facts, h("section", { class: "panel stack", "aria-label": "State of the run", id: "state" },
      h("div", { class: "row spread" }, h("h2", {}, visible(run.name)), h("span", { class: `pill ${STATES[state.state] || "unknown"}`, id: "pill" }, STATES[state.state] || visible(state.state))),
      planned ? h("progress", { value: Math.min(state.step, planned), max: planned, "aria-label": "Steps done" }) : null,
      state.reason ? h("p", { class: "small" }, visible(state.reason)) : null,
      old ? h("p", { class: "small" }, `no news for ${duration(state.seconds_since_news)}`) : null,
      countsList(entries, true),
      alarms.map((it) => h("div", { class: "alarm" }, h("b", {}, `step ${number(it.step)}: ${visible(it.alarm)}`), visible(it.text)))));
  };

  const series = (key, part, dash) => chosen().flatMap((number_) => {
    const run = seen.get(number_), name = [chosen().length > 1 ? run.name : "", part].filter(Boolean).join(", ");
    const at = places(run.records, axis.value);
    const of = (kind) => run.records.filter((it) => it.kind === kind && Number.isFinite(it[key])).map((it) => [at(it), key === "gpu_memory" ? it[key] / 2 ** 30 : it[key]]);
    const place = chosen().length > 1 ? run.place : dash;
    const heldout = of("heldout"), train = of("train"), both = heldout.length && train.length && chosen().length === 1;
    return [{ name: [name, both ? "training" : ""].filter(Boolean).join(", ") || "training", place, dash: chosen().length > 1 ? dash : 0, style: heldout.length ? "thin" : "line", points: train },
      { name: [name, both ? "held-out" : ""].filter(Boolean).join(", ") || "held-out", place, dash: chosen().length > 1 ? dash : 0, style: "dots", points: heldout }];
  });
  const showCharts = () => fill(charts, PANELS.map(([title, keys]) => curves(title, keys.flatMap(([key, part], dash) => series(key, part, dash)), AXES[axis.value])).filter(Boolean));

  const showDifference = () => {
    const all = chosen().map((it) => seen.get(it));
    if (all.length < 2) return fill(difference);
    const keys = [...new Set(all.flatMap((it) => Object.keys(it.settings)))].filter((key) => key !== "run" && new Set(all.map((it) => it.settings[key])).size > 1);
    fill(difference, h("section", { class: "panel", "aria-label": "Differences of the settings", id: "difference" }, h("h2", {}, "Where their settings differ"),
      keys.length ? h("div", { class: "scroll" }, h("table", { class: "wide" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "setting"), all.map((it) => h("th", { scope: "col" }, visible(it.name))))),
        h("tbody", {}, keys.map((key) => h("tr", {}, h("th", { scope: "row" }, visible(key)), all.map((it) => h("td", {}, visible(it.settings[key] ?? "–"))))))))
        : h("p", { class: "small" }, "They are the same.")));
  };

  // the same held-out sentences at every evaluation

  const showSentences = () => {
    const run = chosen().map((it) => seen.get(it)).find((it) => it.samples.steps.length) || main(), steps = run?.samples.steps || [];
    if (!steps.length) {
      return fill(sentences, run ? h("p", { class: "note" }, "Nothing is stored of what the networks did with held-out sentences: the run is older than that, has no discriminator, or is not yet evaluated.") : null);
    }
    if (shown.isLast || shown.step >= steps.length) shown.step = steps.length - 1;
    const list_ = h("ol", { class: "sentences" }), title = h("output", { id: "sample-step" }), counts = h("div", { id: "sample-counts" });
    const slider = h("input", { type: "range", id: "steps", min: 0, max: steps.length - 1, value: shown.step, "aria-label": "Step of the run" });
    const threshold = h("input", { type: "range", id: "sample-threshold", min: 0.01, max: 0.99, step: 0.01, value: shown.threshold, "aria-label": "Flagged as replaced from" });
    const limit = h("span", {}, percent(shown.threshold, 0));
    const draw = () => {
      const step = steps[shown.step], rows = run.samples.rows.map((tokens, row) => sampledRow(tokens, step.written[row], step.said[row]));
      title.textContent = `step ${number(step.step)}`;
      slider.setAttribute("aria-valuetext", title.textContent);
      fill(list_, rows.map((it) => h("li", {}, playedText(it.text, it.tokens, shown.threshold, { compact: true, label: "Held-out sentence" }))));
      const total = outcomeCounts(rows.flatMap((it) => it.tokens.filter((token) => !token.isSpecial)), shown.threshold), replaced = total.hit + total.miss, flagged = total.hit + total.false;
      fill(counts, countsList([["hits", total.hit], ["misses", total.miss], ["false alarms", total.false], ["recall", replaced ? percent(total.hit / replaced, 0) : "–"], ["precision", flagged ? percent(total.hit / flagged, 0) : "–"]], true));
    };
    slider.addEventListener("input", () => { shown.step = Number(slider.value); shown.isLast = shown.step === steps.length - 1; draw(); });
    threshold.addEventListener("input", () => { shown.threshold = Number(threshold.value); limit.textContent = percent(shown.threshold, 0); draw(); });
    draw();
    const focused = document.activeElement?.id;
    fill(sentences, h("section", { class: "panel stack", "aria-label": "Held-out sentences", id: "sentences" },
      h("div", { class: "row spread" }, h("h2", {}, "The same held-out sentences at every evaluation"), title),
      h("p", { class: "small" }, chosen().length > 1 ? `${visible(run.name)}: what` : "What", " the generator wrote and what the discriminator said of it. Move the slider to see detection take off."),
      h("div", { class: "columns two" }, h("label", {}, `Evaluation, of ${steps.length}`, slider), h("label", {}, h("span", {}, "Flagged as replaced from ", limit), threshold)), counts, outcomeLegend(), list_));
    if (["steps", "sample-threshold"].includes(focused)) document.getElementById(focused)?.focus();
  };

  const showAll = () => { showFacts(); showCharts(); showDifference(); showSentences(); };

  // which runs

  let isDirty = false;
  const soon = () => { if (!isDirty) { isDirty = true; requestAnimationFrame(() => { isDirty = false; showFacts(); showCharts(); }); } };
  const join = async (number_) => {
    const run = await get(`/api/runs/${number_}`);
    const place = [0, 1, 2, 3, 4, 5].find((it) => [...seen.values()].every((one) => one.place !== it));
    seen.set(number_, { ...run, place });
  };
  let stop = () => {};
  const follow = () => {
    stop();
    const of = (handler) => (content, number_) => { const own = seen.get(number_); if (own) handler(own, content); };
    stop = listen(chosen(), {
      history: of((own, records) => { own.records = records; soon(); }),
      records: of((own, records) => {
        for (const it of records.filter((one) => one.kind === "alarm")) say(`${own.name}, step ${number(it.step)}: ${it.text}`);
        own.records = thin([...own.records, ...records]);
        soon();
      }),
      state: of((own, state) => { own.state = state; soon(); pills(); }),
      samples: of((own, samples) => { own.samples = samples; showSentences(); }),
      error: () => say("the server does not answer; trying again"),
    });
  };
  const pills = () => { for (const [number_, run] of seen) { const pill = list.querySelector(`[data-pill="${number_}"]`); if (pill) { pill.className = `pill ${STATES[run.state.state] || "unknown"}`; pill.textContent = run.state.state; } } };
  const showList = () => fill(list, runs.map((run) => h("li", {}, h("label", {},
    h("input", { type: "checkbox", checked: seen.has(run.number), value: run.number, onchange: (event) => toggle(run.number, event.target) }),
    h("span", { class: "swatch", style: { "--c": seen.has(run.number) ? colour(seen.get(run.number).place) : "transparent" } }),
    h("span", { class: "name" }, visible(run.name)), h("span", { class: `pill ${STATES[run.state] || "unknown"}`, "data-pill": run.number }, visible(run.state))))));
  const toggle = async (number_, box) => {
    if (box.checked && seen.size >= MOST_RUNS) { box.checked = false; say(`at most ${MOST_RUNS} runs are shown at once`); return; }
    try { if (box.checked) await join(number_); else seen.delete(number_); } catch (error) { say(error.message); }
    follow();
    showList();
    list.querySelector(`input[value="${number_}"]`)?.focus();
    showAll();
  };

  const first = runs.find((it) => it.state === "running") || runs.at(-1);
  await join(first.number);
  showList();
  showAll();
  follow();
  return () => stop();
}

/** Every other of the older training records goes where a page has been open for days. */
const thin = (records) => (records.length < MOST_RECORDS ? records : records.filter((it, place) => it.kind !== "train" || place % 2 || place > records.length - 200));

/** Where a record stands on the axis. */
function places(records, key) {
  if (key === "step") return (it) => it.step;
  const train = records.filter((it) => it.kind === "train" && Number.isFinite(it[key])), scale = key === "training_seconds" ? 3600 : 1;
  return (it) => (it[key] ?? train.findLast((one) => one.step <= it.step)?.[key] ?? 0) / scale;
}

/** A stored row as text with tokens: pieces of a word are joined again. */
export function sampledRow(tokens, written, said) {
  let text = "";
  const made = [];
  tokens.forEach((original, place) => {
    const continues = original.startsWith("##"), isSpecial = /^\[(CLS|SEP|PAD)\]$/.test(original);
    if (isSpecial) { if (place && text) text += " "; return; }
    if (text && !continues && !/^[.,;:!?)\]'’"]$/.test(original) && !text.endsWith(" ") && !/[([]$/.test(text)) text += " ";
    const start = text.length;
    text += plain(original);
    made.push({ start, end: text.length, original, token: written[place] ?? original, is_chosen: place in written, probability: said[place] / 100, isSpecial });
  });
  return { text, tokens: made };
}
