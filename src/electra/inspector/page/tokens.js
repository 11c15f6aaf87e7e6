// A text as it was written, with a colour for each token. Long texts are built block by block, as they come into view.
import { add, h, percent, visible } from "./dom.js";

const BLOCK = 250;

/** tokens: [{start, end, heat, label, classes, text, was}]. `pick` is told which one was chosen. A text that is not `compact` has a
 * line below it for the value of the token that is pointed at, touched or reached by keyboard. */
export function tokenText(text, tokens, { pick = null, compact = false, label = "tokens", first: current = 0 } = {}) {
  const box = h("div", { class: `text${compact ? " compact" : ""}${pick ? "" : " static"}`, dir: "auto", role: "group", "aria-label": label });
  const blocks = [];
  for (let first = 0; first < Math.max(1, tokens.length); first += BLOCK) blocks.push([first, Math.min(first + BLOCK, tokens.length)]);
  const elements = [];

  const build = ([first, last], holder) => {
    if (holder.firstChild) return;
    holder.style.removeProperty("min-height");
    let shown = first ? tokens[first - 1].end : 0;
    for (let number = first; number < last; number += 1) {
      const token = tokens[number];
      if (token.start > shown) holder.append(visible(text.slice(shown, token.start)));
      const classes = `token ${token.classes || ""}`.trim();
      const element = h("span", { class: classes, style: { "--p": token.heat.toFixed(3) }, title: visible(token.label), "data-number": number,
        "aria-label": compact && token.classes === "quiet" ? undefined : visible(token.label), role: pick ? "button" : compact && token.classes === "quiet" ? undefined : "img",
        tabindex: compact ? undefined : number === current ? 0 : -1 }, visible(token.text ?? text.slice(Math.max(shown, token.start), token.end)));
      elements[number] = element;
      holder.append(element);
      if (token.was) holder.append(h("span", { class: "was", "aria-hidden": "true" }, visible(token.was)));
      shown = Math.max(shown, token.end);
    }
    if (last === tokens.length) holder.append(visible(text.slice(shown)));
  };

  const holders = blocks.map((block, place) => {
    const holder = h("span", { class: blocks.length > 1 ? "block" : "" });
    if (place === 0) build(block, holder);
    else holder.style.minHeight = "12em";
    return holder;
  });
  add(box, holders);
  if (blocks.length > 1) {
    const watcher = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) build(blocks[holders.indexOf(entry.target)], entry.target);
    }, { rootMargin: "600px" });
    holders.forEach((holder) => watcher.observe(holder));
  }

  const move = (number) => {
    if (number < 0 || number >= tokens.length) return;
    const place = Math.floor(number / BLOCK);
    build(blocks[place], holders[place]);
    elements[current]?.setAttribute("tabindex", "-1");
    current = number;
    elements[current].setAttribute("tabindex", "0");
    elements[current].focus();
  };
  if (compact) return box;

  const hint = "Point at a token, or move with the arrow keys, to read its value.", readout = h("p", { class: "tiny", "aria-hidden": "true" }, hint);
  const chosen = (event) => {
    const element = event.target.closest(".token");
    if (!element || !pick) return;
    box.querySelector("[aria-pressed]")?.removeAttribute("aria-pressed");
    element.setAttribute("aria-pressed", "true");
    elements[current]?.setAttribute("tabindex", "-1");
    element.setAttribute("tabindex", "0");
    current = Number(element.dataset.number);
    pick(current);
  };
  for (const name of ["pointerover", "focusin"]) box.addEventListener(name, (event) => { readout.textContent = event.target.closest(".token")?.title || hint; });
  box.addEventListener("click", chosen);
  box.addEventListener("keydown", (event) => {
    const back = getComputedStyle(box).direction === "rtl" ? "ArrowRight" : "ArrowLeft";
    const to = { ArrowLeft: current + (back === "ArrowLeft" ? -1 : 1), ArrowRight: current + (back === "ArrowRight" ? -1 : 1), Home: 0, End: tokens.length - 1 }[event.key];
    if (to !== undefined) { event.preventDefault(); move(to); }
    else if (event.key === "Enter" || event.key === " ") { event.preventDefault(); chosen(event); }
  });
  return [box, readout];
}

/** What a token is called on its own: "##ing" continues a word, "▁the" begins one. */
export const plain = (token) => token.replace(/^##|^▁|^Ġ/, "") || token;

/** Of tokens that were or were not replaced, with probabilities: what the discriminator caught at a threshold. */
export function outcome(token, threshold) {
  const replaced = token.token !== token.original, flagged = token.probability >= threshold;
  return replaced ? (flagged ? "hit" : "miss") : flagged ? "false" : "quiet";
}

export function outcomeCounts(tokens, threshold) {
  const counts = { hit: 0, miss: 0, false: 0, quiet: 0 };
  for (const token of tokens) counts[outcome(token, threshold)] += 1;
  return counts;
}

export const outcomeWords = (counts) => `hits ${counts.hit} · misses ${counts.miss} · false alarms ${counts.false}`;

export const OUTCOMES = { hit: "hit: replaced and caught", miss: "miss: replaced, not caught", false: "false alarm", quiet: "" };

export function playedText(text, tokens, threshold, more = {}) {
  return tokenText(text, tokens.map((token) => {
    const result = outcome(token, threshold), replaced = token.token !== token.original;
    const words = [replaced ? `${plain(token.token)}, was ${plain(token.original)}` : plain(token.original), `replaced: ${percent(token.probability)}`];
    if (token.is_chosen && !replaced) words.push("the generator had this place and put back what stood there");
    if (OUTCOMES[result]) words.push(OUTCOMES[result]);
    return { start: token.start, end: token.end, heat: token.probability, classes: result, label: words.join(" · "),
      text: replaced ? plain(token.token) : undefined, was: replaced ? plain(token.original) : "" };
  }), more);
}

export function outcomeLegend() {
  return h("div", { class: "legend" }, h("span", {}, h("span", { class: "ramp", "aria-hidden": "true" }), " original → replaced"),
    h("span", { class: "token hit" }, "hit"), h("span", { class: "token miss" }, "miss"), h("span", { class: "token false" }, "false alarm"),
    h("span", {}, h("span", { class: "was" }, "word"), "what stood there"));
}

export function countsList(entries, small = false) {
  return h("dl", { class: `counts${small ? " close" : ""}` }, entries.map(([name, value, id]) => h("div", {}, h("dt", {}, name), h("dd", { id }, value))));
}
