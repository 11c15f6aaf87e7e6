// The API, from its own description.
import { get } from "./api.js";
import { fill, h, visible } from "./dom.js";

const EXAMPLES = {
  "/api/detect": { model: 0, texts: ["a text", "another"] },
  "/api/score": { model: 0, texts: ["a text"] },
  "/api/embed": { model: 0, texts: ["a text"], pooling: "mean" },
  "/api/predict": { model: 0, rows: ["a text", { text: "or a row with the columns of the task" }] },
  "/api/fill": { model: 0, items: [{ text: "a text of several words", places: [1, 3] }], top: 10 },
  "/api/corrupt": { model: 0, texts: ["a text of several words"], share: 0.15, seed: 0 },
  "/api/replace": { model: 0, items: [{ text: "a text of several words", replacements: { 1: "word" } }] },
};

export async function docsView(view) {
  const description = await get("/openapi.json");
  const routes = Object.entries(description.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, it]) => [method.toUpperCase(), path, it]));
  const command = (method, path) => (method === "POST" ? `curl ${location.origin}${path} \\\n  -H 'content-type: application/json' \\\n  -d '${JSON.stringify(EXAMPLES[path] || {})}'` : `curl ${location.origin}${path}`);
  fill(view, h("h1", {}, "API"),
    h("p", { class: "lead" }, "The same answers as JSON. Requests of many clients are computed together; when too many wait, the answer is 503 with Retry-After. The whole description is ", h("a", { href: "/openapi.json" }, "openapi.json"), ", counters are at ", h("a", { href: "/metrics" }, "/metrics"), "."),
    h("div", { class: "stack" }, routes.map(([method, path, it]) => h("section", { class: "panel", "aria-label": path },
      h("h2", {}, h("code", {}, `${method} ${path}`)), h("p", { class: "small" }, visible(it.description || it.summary || "")), h("pre", { tabindex: 0 }, command(method, path))))));
  return () => {};
}
