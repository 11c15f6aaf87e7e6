// Which view is shown is said by the part of the address after #.
import { carries, isReport } from "./api.js";
import { compareView } from "./compare.js";
import { docsView } from "./docs.js";
import { fill, h, visible } from "./dom.js";
import { tryView } from "./try.js";
import { watchView } from "./watch.js";

const ALL = { try: ["Try it", tryView], watch: ["Watch", watchView], compare: ["Compare", compareView], api: ["API", docsView] };
const isShown = { try: () => false, watch: () => carries("runs"), compare: () => carries("results"), api: () => false };
const VIEWS = isReport ? Object.fromEntries(Object.entries(ALL).filter(([name]) => isShown[name]())) : ALL;
let leave = () => {};
let turn = 0;

async function show() {
  const wanted = location.hash.slice(1), name = wanted in VIEWS ? wanted : Object.keys(VIEWS)[0], own = ++turn;
  const view = document.getElementById("view");
  leave();
  leave = () => {};
  fill(document.getElementById("nav"), Object.entries(VIEWS).map(([key, [title]]) => h("a", { href: `#${key}`, "aria-current": key === name ? "page" : undefined }, title)));
  const page = h("div", { class: "view" });
  fill(view, h("p", { class: "note", role: "status" }, "Loading …"));
  try {
    const left = await VIEWS[name][1](page);
    if (own !== turn) { left(); return; }
    leave = left;
    fill(view, page);
  } catch (error) { if (own === turn) fill(view, h("p", { class: "alarm", role: "alert" }, visible(error.message))); }
  if (own === turn) document.title = `${VIEWS[name][0]} · electra`;
}

addEventListener("hashchange", show);
addEventListener("pagehide", () => leave());
show();
