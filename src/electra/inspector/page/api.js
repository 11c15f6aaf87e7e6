// Where answers come from: the server, or what a report carries in itself.

const embedded = document.getElementById("embedded");
const carried = embedded ? JSON.parse(embedded.textContent) : null;
export const isReport = carried !== null;

async function answer(response) {
  const content = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(content.error || `the server answered ${response.status}`);
  return content;
}

export async function get(path) {
  if (!carried) return answer(await fetch(path, { headers: { accept: "application/json" } }));
  if (path in carried) return carried[path];
  throw new Error("this is not in the report");
}

export async function ask(path, question) {
  if (carried) throw new Error("a report answers no questions: start electra serve");
  const response = await fetch(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(question) });
  return (await answer(response)).answers;
}

/** Events of a run as they happen; returns what stops it. */
export function listen(path, handlers) {
  if (carried) return () => {};
  const source = new EventSource(path);
  for (const [name, handler] of Object.entries(handlers)) source.addEventListener(name, (event) => handler(event.data ? JSON.parse(event.data) : null));
  return () => source.close();
}
