// Where answers come from: the server, or what a report carries in itself.

const embedded = document.getElementById("embedded");
const carried = embedded ? JSON.parse(embedded.textContent) : null;
export const isReport = carried !== null;
/** Whether a report has runs, or results. */
export const carries = (what) => carried[`/api/${what}`][what].length > 0;

async function answer(request) {
  const response = await request.catch(() => { throw new Error("the server does not answer. Is electra serve still running?"); });
  const content = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(content.error || `the server answered ${response.status}`);
  return content;
}

export async function get(path) {
  if (!carried) return answer(fetch(path, { headers: { accept: "application/json" } }));
  if (path in carried) return carried[path];
  throw new Error("this is not in the report");
}

export async function ask(path, question) {
  if (carried) throw new Error("a report answers no questions: start electra serve");
  const request = fetch(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(question) });
  return (await answer(request)).answers;
}

/** Events of runs as they happen, by one connection (a browser has six in all); handlers get what happened and to which run.
 * Returns what stops it. */
export function listen(numbers, handlers) {
  if (carried || !numbers.length) return () => {};
  const source = new EventSource(`/api/events?${numbers.map((it) => `run=${it}`).join("&")}`);
  for (const [name, handler] of Object.entries(handlers)) source.addEventListener(name, (event) => handler(event.data ? JSON.parse(event.data) : null, Number(event.lastEventId)));
  return () => source.close();
}
