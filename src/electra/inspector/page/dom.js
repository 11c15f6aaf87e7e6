// Elements and words. Text from models, runs and files only ever becomes text: nothing here parses HTML.

/** h("button", {class: "main", onclick: f, style: {"--p": 0.5}}, "Look"): an element. */
export function h(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "circle", "text", "g", "rect", "title"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, it] of Object.entries(value)) element.style.setProperty(key, it);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  add(element, children);
  return element;
}

export function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren();
  return add(element, children);
}

/** Controls, escape codes and marks that turn the writing direction are shown and not obeyed. */
export function visible(text) {
  return String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f]/g, (it) => String.fromCharCode(it === "\u007f" ? 0x2421 : 0x2400 + it.charCodeAt(0)))
    .replace(/[\u0080-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g, (it) => `⟨U+${it.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

export const percent = (value, digits = 1) => `${(100 * value).toFixed(digits)} %`;

export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e12) return value.toExponential(2);
  if (size >= 1e9) return `${(value / 1e9).toPrecision(3)} G`;
  if (size >= 1e6) return `${(value / 1e6).toPrecision(3)} M`;
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (size === 0 || Number.isInteger(value)) return String(value);
  return size < 0.001 ? value.toExponential(1) : value.toFixed(size < 10 ? 3 : 1);
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor((whole % 3600) / 60);
  if (hours >= 48) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

/** The server counts characters, JavaScript counts 🙂 twice: tokens with places in `text` as it counts them here. */
export function placed(text, tokens) {
  if (!/[\ud800-\udbff]/.test(text)) return tokens;
  const places = [0];
  for (const character of text) places.push(places.at(-1) + character.length);
  return tokens.map((it) => ({ ...it, start: places[it.start], end: places[it.end] }));
}

let timer;
/** A line at the bottom that goes away, and that screen readers hear. */
export function say(text) {
  const status = document.getElementById("status");
  status.textContent = visible(text);
  clearTimeout(timer);
  timer = setTimeout(() => { status.textContent = ""; }, 8000);
}

export function field(label, control) {
  return h("label", {}, label, control);
}

export function options(select, entries, chosen) {
  fill(select, entries.map(([value, name]) => h("option", { value, selected: String(value) === String(chosen) }, visible(name))));
  return select;
}

export function download(name, type, content) {
  const link = h("a", { href: URL.createObjectURL(new Blob([content], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
