// Compare: results of finetune, compare and speedrun.
import { get } from "./api.js";
import { download, field, fill, h, number, options, percent, say, visible } from "./dom.js";
import { dots } from "./plot.js";

const SHOWN = 50;

export async function compareView(view) {
  const { results } = await get("/api/results");
  if (!results.length) {
    fill(view, h("h1", {}, "Compare"), h("p", { class: "empty panel" }, "There are no results here: electra finetune, compare and speedrun write some."));
    return () => {};
  }
  const choose = options(h("select", { id: "result" }), results.map((it) => [it.number, it.name]), results[0].number), body = h("div", { class: "stack" });
  fill(view, h("h1", {}, "Compare"), h("p", { class: "lead" }, "Every seed is a dot, the bar is their median; dashed lines are what a score is held against."),
    h("div", { class: "stack" }, results.length > 1 ? h("section", { class: "panel" }, field("Results", choose)) : null, body));
  const show = async () => {
    try {
      const result = await get(`/api/results/${choose.value}`);
      fill(body, result.groups.length ? [summary(result), ...result.groups.map((group, place) => groupPanel(result, group, place, choose.value))] : h("p", { class: "empty panel" }, "It has no finished runs yet."));
    } catch (error) { fill(body, h("p", { class: "alarm", role: "alert" }, visible(error.message))); }
  };
  choose.addEventListener("change", show);
  await show();
  return () => {};
}

function summary(result) {
  const rows = result.groups.flatMap((group) => group.rows.map((row) => [result.kind === "compare" ? row.name : group.name, result.kind === "compare" ? group.name : group.metric, row]));
  const spread = (seeds) => { const real = seeds.filter(Number.isFinite); return real.length > 1 ? `${number(Math.min(...real))} – ${number(Math.max(...real))}` : "–"; };
  return h("section", { class: "panel", "aria-label": "Summary", id: "summary" }, h("div", { class: "row spread" }, h("h2", {}, { finetune: "Fine-tuning", compare: "Comparison", speedrun: "Speed-run" }[result.kind]),
    result.title ? h("span", { class: "tiny" }, visible(result.title)) : null),
    (result.alarms || []).map((text) => h("div", { class: "alarm" }, visible(text))),
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["name", "metric", "median", "spread", "seeds"].map((it, place) => h("th", { scope: "col", class: place > 1 ? "number" : "" }, it)))),
      h("tbody", {}, rows.map(([name, metric, row]) => h("tr", {}, h("td", {}, visible(name)), h("td", {}, visible(metric)), h("td", { class: "number" }, number(row.median)), h("td", { class: "number" }, spread(row.seeds)), h("td", { class: "number" }, row.seeds.length)))))));
}

function groupPanel(result, group, place, value) {
  return h("section", { class: "panel stack group", "aria-label": visible(group.name) },
    h("div", { class: "row spread" }, h("h2", {}, visible(group.name)), h("span", { class: "tiny" }, `${group.metric === group.name ? "" : `${visible(group.metric)}, `}${group.is_loss ? "lower" : "higher"} is better`)),
    (group.alarms || []).map((text) => h("div", { class: "alarm" }, visible(text))),
    dots(group.name, group.rows, group.levels || {}),
    group.confusion?.length ? h("div", {}, h("h3", {}, "Confusion matrix: rows are the true classes, columns the answers"), matrix(group.labels, group.confusion)) : null,
    group.per_class?.length ? h("details", {}, h("summary", {}, "Each class"), perClass(group.per_class)) : null,
    group.has_wrong ? wrongRows(value, place, group) : null);
}

function matrix(labels, confusion) {
  const most = Math.max(1, ...confusion.flatMap((row, a) => row.filter((_, b) => a !== b))), right = Math.max(1, ...confusion.map((row, a) => row[a]));
  return h("div", { class: "scroll" }, h("table", { class: "matrix" }, h("thead", {}, h("tr", {}, h("td"), labels.map((it) => h("th", { scope: "col", class: "number" }, visible(it))))),
    h("tbody", {}, confusion.map((row, a) => h("tr", {}, h("th", { scope: "row" }, visible(labels[a])),
      row.map((count, b) => h("td", { class: a === b ? "right" : "", style: { "--p": (count / (a === b ? right : most)).toFixed(3) }, title: visible(`${labels[a]} answered as ${labels[b]}: ${count}`) }, number(count))))))));
}

function perClass(entries) {
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["class", "precision", "recall", "F1", "rows"].map((it, place) => h("th", { scope: "col", class: place ? "number" : "" }, it)))),
    h("tbody", {}, entries.map((it) => h("tr", {}, h("td", {}, visible(it.label)), ["precision", "recall", "f1", "rows"].map((key) => h("td", { class: "number" }, number(it[key]))))))));
}

const words = (value, row) => (isTagged(value, row) ? value.map((tag, place) => (tag === "O" ? "" : `${tagged(row)[place]} ${tag}`)).filter(Boolean).join(", ") || "–" : Array.isArray(value) ? value.join(" ") : typeof value === "number" ? number(value) : String(value ?? ""));

/** The words of a row that has a tag for each. */
const tagged = (row) => Object.values(row.input).find(Array.isArray);
const isTagged = (value, row) => Array.isArray(value) && row && tagged(row)?.length === value.length;

function wrongRows(value, place, group) {
  const holder = h("div", { class: "stack" });
  const open = h("details", { class: "wrong", ontoggle: async () => {
    if (holder.firstChild) return;
    try {
      const { rows } = await get(`/api/results/${value}/wrong/${place}`);
      table(holder, rows, group.name);
    } catch (error) { say(error.message); }
  } }, h("summary", {}, "The rows that were wrong, the surest first"), holder);
  return open;
}

function table(holder, rows, name) {
  const search = h("input", { type: "search", id: `search-${name}` }), truth = h("select"), said = h("select"), body = h("tbody"), count = h("span", { class: "small" }), more = h("button", {}, "More");
  const kinds = (key) => [...new Set(rows.map((it) => words(it[key], it)))].filter((it) => it.length < 40).slice(0, 100).sort();
  options(truth, [["", "any"], ...kinds("true").map((it) => [it, it])], "");
  options(said, [["", "any"], ...kinds("answer").map((it) => [it, it])], "");
  let limit = SHOWN;
  const found = () => {
    const wanted = search.value.toLowerCase();
    return rows.filter((it) => (!truth.value || words(it.true, it) === truth.value) && (!said.value || words(it.answer, it) === said.value)
      && (!wanted || Object.values(it.input).some((text) => words(text).toLowerCase().includes(wanted))));
  };
  const show = () => {
    const all = found();
    count.textContent = `${number(all.length)} of ${number(rows.length)} rows`;
    fill(body, all.slice(0, limit).map((it) => h("tr", {}, h("td", { class: "number" }, percent(it.confidence)), h("td", {}, visible(words(it.true, it))), h("td", {}, visible(words(it.answer, it))),
      h("td", { dir: "auto" }, Object.values(it.input).map((text) => h("div", {}, visible(words(text))))))));
    more.hidden = all.length <= limit;
  };
  for (const control of [search, truth, said]) control.addEventListener("input", () => { limit = SHOWN; show(); });
  more.addEventListener("click", () => { limit += 4 * SHOWN; show(); });
  const cell = (text) => `"${(/^[=+\-@\t\r]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;
  const csv = () => {
    const columns = Object.keys(rows[0]?.input || {});
    return [["row", "confidence", "true", "answer", ...columns].map(cell).join(","), ...found().map((it) => [it.row, it.confidence, words(it.true), words(it.answer), ...columns.map((key) => words(it.input[key]))].map((one) => cell(String(one))).join(","))].join("\n");
  };
  fill(holder, h("div", { class: "row" }, field("Search", search), field("True", truth), field("Answer", said),
    h("button", { onclick: () => download(`${name}-wrong.csv`, "text/csv", csv()) }, "CSV"), h("button", { onclick: () => download(`${name}-wrong.json`, "application/json", JSON.stringify(found(), null, 1)) }, "JSON"), count),
    h("div", { class: "scroll" }, h("table", { class: "wrong-rows" }, h("thead", {}, h("tr", {}, ["confidence", "true", "answer", "text"].map((it, n) => h("th", { scope: "col", class: n ? "" : "number" }, it)))), body)), more);
  show();
}
