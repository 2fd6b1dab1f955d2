// Requests to the REST API of the job, with its token.
//
// All addresses are relative to the page, so they are right behind a proxy that adds a prefix. The token is
// kept for this tab only, and travels in a header: addresses get into histories and logs.

export const BASE = new URL("../", document.baseURI);
const KEPT = `headgate-token ${BASE.pathname}`;
const WAIT_S = 20;

export class Refused extends Error {
  constructor(status, problem) {
    super(problem.detail || `the server answers ${status}`);
    this.status = status;
    this.problem = problem;
  }
}

// Return the token: that of a link (#token=...), which leaves the address bar, or the one kept for this tab.
export function takeToken() {
  const found = /^#token=([^&]+)/.exec(location.hash);
  if (found) {
    sessionStorage.setItem(KEPT, decodeURIComponent(found[1]));
    history.replaceState(null, "", location.pathname + location.search);
  }
  return sessionStorage.getItem(KEPT);
}

export function keepToken(token) {
  sessionStorage.setItem(KEPT, token);
}

export function forgetToken() {
  sessionStorage.removeItem(KEPT);
}

async function request(path, options = {}) {
  const headers = { Authorization: `Bearer ${sessionStorage.getItem(KEPT) || ""}`, ...options.headers };
  const response = await fetch(new URL(path, BASE), { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({}));
  throw new Refused(response.status, problem);
}

export async function get(path, signal) {
  return (await request(path, { signal })).json();
}

export async function begin(verb, body) {
  const triggerId = `ui-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
  const response = await request(`v1/job/${verb}`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ triggerId, ...body }),
  });
  return response.json();
}

// Return the operation once it has ended, or as it is after a while.
export function operation(triggerId) {
  return get(`v1/operations/${triggerId}?wait_s=${WAIT_S}`);
}

// Yield the server-sent events of a path: EventSource cannot send a header.
export async function* events(path, signal) {
  const response = await request(path, { signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const event = parse(block);
      if (event) yield event;
    }
  }
}

function parse(block) {
  let kind = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) kind = line.slice(7);
    if (line.startsWith("data: ")) data.push(line.slice(6));
  }
  return data.length ? { kind, ...JSON.parse(data.join("\n")) } : null;
}
