// Try it: type, and see what the networks make of it.
import { ask, get } from "./api.js";
import { field, fill, h, number, options, percent, placed, say, visible } from "./dom.js";
import { colour } from "./plot.js";
import { countsList, outcomeCounts, outcomeLegend, outcomeWords, plain, playedText, tokenText } from "./tokens.js";

const EXAMPLE = "Return the sum of the elements over the given axis. If the axis is None, all of the values in the array are added together.";
const LEADS = {
  discriminator: "Type a text. Every token is coloured by how probably it was replaced; choose one to see what the generator would put there.",
  electric: "Type a text. Every token is coloured by how badly it fits the others.",
  tagging: "Type words with spaces between them. Every span that the model finds is marked with its type.",
  span: "Type a question and a passage. The answer is marked where it stands.",
  other: "Type what the model reads, and see its answer.",
};
const LONGEST = 100_000; // characters
const LOOKS = 350; // milliseconds after the last key

export async function tryView(view) {
  const { models } = await get("/api/models");
  if (!models.length) {
    fill(view, h("h1", {}, "Try it"), h("p", { class: "empty panel" }, "There is no model here yet. A run has one after its first checkpoint."));
    return () => {};
  }
  const first = models.find((it) => !it.is_finetuned) || models[0];
  const state = { text: EXAMPLE, threshold: 0.5, replacements: {}, place: null, asked: 0, rows: {} };
  const chooseA = h("select", { id: "model-a" }), chooseB = h("select", { id: "model-b" });
  options(chooseA, models.map((it) => [it.number, it.name]), first.number);
  options(chooseB, [["", "none"], ...models.map((it) => [it.number, it.name])], "");
  const inputs = h("div", { class: "stack" }), facts = h("p", { class: "tiny", id: "facts" });
  const answers = h("div", { class: "columns" }), side = h("div", { class: "stack" }), controls = h("div", { class: "stack" });
  const lead = h("p", { class: "lead" });
  let layout;
  const sides = {}; // number -> what the model is, as a promise

  fill(view,
    h("h1", {}, "Try it"),
    lead,
    layout = h("div", { class: "columns side" },
      h("div", { class: "stack" },
        h("section", { class: "panel stack", "aria-label": "Question" },
          h("div", { class: "columns two" }, field("Model", chooseA), field("Beside it", chooseB)), inputs, facts),
        answers),
      h("div", { class: "stack" }, controls, side)));

  const describe = async (value) => {
    if (value === "") return null;
    // asked once, so that whoever asked first also goes on first
    sides[value] ??= get(`/api/models/${value}`).then((it) => it.answers[0]).catch((error) => { delete sides[value]; throw error; });
    return sides[value];
  };

  // what is asked

  const buildInputs = (a) => {
    const columns = a.columns.length ? a.columns : ["text"];
    const texts = columns.map((column) => {
      const area = h("textarea", { id: `input-${column}`, dir: "auto", spellcheck: "false", rows: columns.length > 1 ? 2 : 4 });
      area.value = state.rows[column] ?? (column === columns.at(-1) ? state.text : "");
      state.rows[column] = area.value;
      area.addEventListener("input", () => { state.rows[column] = area.value; state.text = area.value; state.replacements = {}; state.place = null; state.asked += 1; look(); });
      return field(a.columns.length ? visible(column) : "Text", area);
    });
    fill(inputs, texts);
    state.text = state.rows[columns.at(-1)];
  };

  const buildControls = (a) => {
    fill(controls);
    layout.className = a.kind === "discriminator" ? "columns side" : "columns";
    if (a.kind !== "discriminator") return;
    const seed = h("input", { type: "number", id: "seed", min: 0, max: 999999, value: 0 });
    const share = h("input", { type: "number", id: "share", min: 1, max: 90, value: 15 });
    const slider = h("input", { type: "range", id: "threshold", min: 0.01, max: 0.99, step: 0.01, value: state.threshold });
    const shown = h("span", {}, percent(state.threshold, 0));
    slider.addEventListener("input", () => { state.threshold = Number(slider.value); shown.textContent = percent(state.threshold, 0); show(); });
    fill(controls, h("section", { class: "panel stack", "aria-label": "The game" },
      h("h2", {}, "The game"),
      h("label", {}, h("span", {}, "Flagged as replaced from ", shown), slider),
      h("div", { id: "counts" }),
      a.has_generator
        ? h("div", { class: "stack" }, h("div", { class: "row" }, field("Share in %", share), field("Seed", seed)),
          h("div", { class: "row" },
            h("button", { class: "main", id: "corrupt", onclick: () => corrupt(Number(share.value) / 100, Number(seed.value)) }, "Let the generator corrupt it"),
            h("button", { id: "another", onclick: () => { seed.value = Number(seed.value) + 1; corrupt(Number(share.value) / 100, Number(seed.value)); } }, "Another seed"),
            h("button", { id: "restore", onclick: () => { state.replacements = {}; ask_now(); } }, "Restore")))
        : h("p", { class: "small" }, "There is no generator beside this model: give the run, or the whole folder of an export.")));
  };

  // asking and showing

  const question = (model) => {
    if (!model.columns.length) return state.text;
    return Object.fromEntries(model.columns.map((column) => {
      const text = state.rows[column] ?? state.text;
      return [column, model.kind === "tagging" ? text.split(/\s+/).filter(Boolean) : text];
    }));
  };

  const asked = async (value, model, other, row) => {
    const number_ = Number(value);
    if (model.columns.length) return (await ask("/api/predict", { model: number_, rows: [row] }))[0];
    if (!["discriminator", "electric"].includes(model.kind)) return null;
    const isReplaced = model.kind === "discriminator" && Object.keys(state.replacements).length > 0;
    if (isReplaced && other && other.tokenizer !== model.tokenizer) return null;
    return (await ask("/api/replace", { model: number_, items: [{ text: row, replacements: isReplaced ? state.replacements : {} }] }))[0];
  };

  let results = [], typed;
  const look = () => { clearTimeout(typed); typed = setTimeout(ask_now, LOOKS); };
  const takeTurn = () => { clearTimeout(typed); return ++state.asked; }; // what was typed is asked with it, not once more after it
  const ask_now = async () => {
    const turn = takeTurn();
    const slow = setTimeout(() => answers.setAttribute("aria-busy", "true"), 400);
    try {
      if (state.text.length > LONGEST) throw new Error(`${number(state.text.length)} characters; at most ${number(LONGEST)} are read at once.`);
      const values = [chooseA.value, chooseB.value].filter((it) => it !== "");
      const known = await Promise.all(values.map(describe));
      const rows = known.map(question); // as they are now: somebody goes on typing
      const found = await Promise.all(values.map((value, place) => asked(value, known[place], place ? known[0] : null, rows[place])));
      if (turn !== state.asked) return; // a newer question is on its way
      results = values.map((value, place) => ({ value, model: known[place], answer: found[place], row: rows[place] }));
      show();
    } catch (error) { if (turn === state.asked) fill(answers, h("p", { class: "alarm", role: "alert" }, visible(error.message))); }
    finally { clearTimeout(slow); if (turn === state.asked) answers.removeAttribute("aria-busy"); }
  };

  const corrupt = async (share, seed) => {
    const turn = takeTurn();
    try {
      const [tokens] = await ask("/api/corrupt", { model: Number(chooseA.value), texts: [state.text], share, seed });
      if (turn !== state.asked) return;
      state.replacements = {};
      tokens.forEach((token, place) => { if (token.is_chosen) state.replacements[place] = token.token; });
      state.place = null;
      fill(side);
      await ask_now();
      const counts = outcomeCounts(tokens, state.threshold);
      say(`seed ${seed} · ${outcomeWords(counts)}`);
    } catch (error) { say(error.message); }
  };

  const propose = async (place) => {
    state.place = place;
    const { model, value, answer } = results[0];
    if (!model.has_generator) return;
    const token = answer[place];
    try {
      const [[proposals]] = await ask("/api/fill", { model: Number(value), items: [{ text: state.text, places: [place], replacements: state.replacements }], top: 10 });
      const best = proposals[0]?.probability || 1;
      fill(side, h("section", { class: "panel", "aria-label": "Proposals", id: "proposals" },
        h("h2", {}, "What the generator would put there"),
        h("p", { class: "small" }, "In the place of ", h("strong", { dir: "auto" }, visible(plain(token.original))), ", which it does not see. Choose one to put it there."),
        h("ol", { class: "bars" }, proposals.map((it) => h("li", {}, h("button", { class: "bar", style: { "--p": it.probability / best }, onclick: () => { state.replacements[place] = it.token; ask_now(); } },
          h("span", {}, visible(it.token)), h("span", {}, percent(it.probability, 2))))))));
    } catch (error) { say(error.message); }
  };

  const show = () => {
    const old = answers.querySelector(".token[aria-pressed]")?.dataset.number, active = document.activeElement;
    const panel = [...answers.children].findIndex((it) => it.contains(active));
    fill(answers, results.map((result, place) => h("section", { class: "panel stack answer", "aria-label": `Answer ${place + 1}` },
      h("div", { class: "row spread" }, h("h2", {}, headline(result.model)), h("span", { class: "tiny" }, visible(name(models, result.value)))),
      body(result, place === 0))));
    answers.className = `columns${results.length > 1 ? " two" : ""}`;
    if (old !== undefined) answers.querySelector(`.token[data-number="${old}"]`)?.setAttribute("aria-pressed", "true");
    if (panel >= 0) answers.children[panel]?.querySelector(`.token[data-number="${active.dataset.number}"]`)?.focus();
    const box = controls.querySelector("#counts"), played = results[0]?.answer;
    if (!box || !Array.isArray(played)) return;
    const counts = outcomeCounts(played, state.threshold);
    fill(box, countsList([["hits", counts.hit, "hits"], ["misses", counts.miss, "misses"], ["false alarms", counts.false, "false-alarms"], ["tokens", played.length, "tokens"]]));
  };

  const body = (result, isFirst) => {
    const { model, answer, row } = result;
    if (model.columns.length) return prediction(model, answer, row);
    if (model.kind === "electric") return energies(row, placed(row, answer));
    if (model.kind === "discriminator" && answer) {
      return [playedText(row, placed(row, answer), state.threshold, { pick: isFirst ? propose : null, first: isFirst ? state.place ?? 0 : 0, label: "Tokens; arrow keys move, Enter shows proposals" }),
        results.length > 1 ? h("p", { class: "small outcome" }, outcomeWords(outcomeCounts(answer, state.threshold))) : null, outcomeLegend()];
    }
    if (model.kind === "discriminator") return h("p", { class: "small" }, "Its tokens are others than those of the first model, so the same replacements cannot be put there.");
    return h("p", { class: "small" }, `A network of kind ${model.kind} neither detects, scores nor predicts. It embeds: POST /api/embed.`);
  };

  const start = async () => {
    try {
      const value = chooseA.value, a = await describe(value);
      if (value !== chooseA.value) return; // another was chosen meanwhile
      state.replacements = {};
      fill(side);
      buildInputs(a);
      buildControls(a);
      fill(lead, LEADS[a.kind] || LEADS.other);
      fill(facts, `${a.encoder} · ${number(a.parameters)} parameters · ${number(a.vocabulary)} tokens in the vocabulary · reads ${number(a.positions)} at once`);
      await ask_now();
    } catch (error) { fill(answers, h("p", { class: "alarm", role: "alert" }, visible(error.message))); }
  };
  chooseA.addEventListener("change", start);
  chooseB.addEventListener("change", ask_now);
  await start();
  return () => {};
}

const name = (models, value) => models.find((it) => String(it.number) === String(value))?.name || "";
const headline = (model) => ({ discriminator: "What the discriminator says", electric: "How well each token fits", classification: "Label", multilabel: "Labels",
  regression: "Value", tagging: "Tags", span: "Answer" })[model.kind] || visible(model.kind);

function energies(text, tokens) {
  const total = tokens.reduce((sum, it) => sum + it.score, 0);
  return [countsList([["pseudo-log-likelihood", total.toFixed(2), "likelihood"], ["per token", (total / Math.max(1, tokens.length)).toFixed(3)], ["tokens", tokens.length]]),
    tokenText(text, tokens.map((it) => ({ start: it.start, end: it.end, heat: Math.min(1, Math.max(0, -it.score / 12)), label: `${plain(it.token)} · log-likelihood ${it.score.toFixed(3)}` }))),
    h("p", { class: "tiny" }, "The stronger the colour, the less a token fits the others.")];
}

/** Labels with probabilities, tags in place, or the answer in the passage: whatever the answer has. */
function prediction(model, answer, row) {
  if (answer.n_best || answer.span !== undefined) return spanAnswer(answer, row);
  if (Array.isArray(answer.probabilities)) return taggedWords(model, answer, Object.values(row)[0]);
  const shares = Object.entries(answer).filter(([key]) => key.startsWith("probability_")).map(([key, value]) => [key.slice(12), value]).sort((a, b) => b[1] - a[1]);
  if (!shares.length) return h("p", { class: "text", id: "prediction" }, visible(typeof answer.prediction === "number" ? number(answer.prediction) : answer.prediction));
  const chosen = [answer.prediction].flat();
  return [h("p", { class: "hidden", id: "prediction" }, visible(chosen.join(", "))),
    h("ul", { class: "bars" }, shares.map(([label, share]) => h("li", {}, h("div", { class: `bar${chosen.includes(label) ? " best" : ""}`, style: { "--p": share } }, h("span", {}, visible(label)), h("span", {}, percent(share))))))];
}

/** A span that goes over several words is one box; the words of a plain tagger have one each. */
function taggedWords(model, answer, words) {
  const spans = answer.spans || answer.prediction.map((tag, place) => ({ type: tag, start: place, end: place + 1 })).filter((it) => it.type !== "O");
  const types = [...new Set(model.labels.map((it) => (answer.spans ? it.replace(/^[A-Z]-/, "") : it)))];
  const word = (place) => { const tag = answer.prediction[place], share = answer.probabilities[place]?.[tag]; return h("span", { title: visible(share === undefined ? tag : `${tag} · ${percent(share)}`) }, visible(words[place])); };
  const run = (from, to) => Array.from({ length: to - from }, (_, n) => [n ? " " : "", word(from + n)]);
  const made = [];
  let at = 0;
  for (const span of spans) {
    if (span.start > at) made.push(run(at, span.start), " ");
    made.push(h("span", { class: "tag", style: { "--c": colour(types.indexOf(span.type)) } }, run(span.start, span.end), h("small", {}, visible(span.type))), " ");
    at = span.end;
  }
  return [h("p", { class: "text", dir: "auto", id: "prediction" }, made, run(at, words.length)),
    spans.length ? null : h("p", { class: "small" }, "No word has a tag.")];
}

function spanAnswer(answer, row) {
  const passage = row.context ?? Object.values(row).at(-1), list = (answer.n_best || []).slice(0, 5), [best] = answer.prediction ? placed(passage, list.slice(0, 1)) : [];
  return [h("p", { id: "prediction" }, h("strong", { dir: "auto" }, answer.prediction ? visible(answer.prediction) : "no answer")),
    h("p", { class: "text compact", dir: "auto" }, best ? [visible(passage.slice(0, best.start)), h("mark", {}, visible(passage.slice(best.start, best.end))), visible(passage.slice(best.end))] : visible(passage)),
    list.length ? h("ul", { class: "bars", "aria-label": "The likeliest answers" }, list.map((it) => h("li", {}, h("div", { class: "bar", style: { "--p": it.probability ?? 0 } }, h("span", {}, visible(it.text || "no answer")), h("span", {}, percent(it.probability ?? 0)))))) : null];
}
