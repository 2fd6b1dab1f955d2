// The queryable states of the job, and a form that asks one of them: for a key, or for many in pages.

import { get, Refused } from "./api.js";
import { count } from "./format.js";
import { Fragment, html, useState } from "./lib.js";
import { useAnswer } from "./live.js";
import { Figures, Table, Waiting } from "./parts.js";

const PAGE_ROWS = 50;
const KINDS = {
  key: { title: "one key", fields: [["key", "Key"]] },
  all: { title: "all keys", fields: [] },
  range: { title: "a range", fields: [["from", "From"], ["to", "To"]], ordered: true },
  prefix: { title: "with a prefix", fields: [["prefix", "Prefix"]], ordered: true },
};

export function Queries() {
  const { answer, problem } = useAnswer("v1/job/state", 10_000);
  return html`
    <h2>State</h2>
    <p>The values of keys in a state that has a name for queries (<code>queryable="…"</code>), as they are at this moment, or as of the newest complete checkpoint.</p>
    ${answer ? html`<${Known} states=${answer.states} />` : html`<${Waiting} problem=${problem} />`}`;
}

function Known({ states }) {
  const [chosen, setChosen] = useState(null);
  if (!states.length) return html`<p>The job has no queryable state.</p>`;
  const state = states.find((each) => each.name === chosen) || states[0];
  const columns = [
    { title: "State", cell: (s) => s.name, sort: (s) => s.name },
    { title: "Kind", cell: (s) => s.kind },
    { title: "Step", cell: (s) => s.step, sort: (s) => s.step },
    { title: "Key", wide: true, cell: keyText },
  ];
  return html`
    <${Ask} states=${states} state=${state} choose=${setChosen} />
    <h3>Queryable states</h3>
    <${Table} label="Queryable states" columns=${columns} rows=${states} rowKey=${(s) => s.name} empty="" />`;
}

function keyText(state) {
  if (!state.key) return "a JSON value";
  return Object.entries(state.key).map(([name, type]) => `${name}: ${type}`).join(", ");
}

function keyHint(state, kind) {
  if (kind === "range") return "Keys from the first one on, and before the second one; without a text there is no limit.";
  if (kind === "prefix" && Object.keys(state.key).length > 1) return "A JSON array of the first columns of the key.";
  if (kind === "prefix") return "The beginning of the text of a key.";
  if (!state.key) return 'A JSON value, such as "alice" (with the quotes) or 42.';
  const names = Object.keys(state.key);
  if (names.length === 1) return `Text of the type ${state.key[names[0]]}.`;
  return `A JSON object with ${names.join(", ")}.`;
}

function Ask({ states, state, choose }) {
  const [what, setWhat] = useState("key");
  const [texts, setTexts] = useState({ key: "", from: "", to: "", prefix: "" });
  const [wanted, setLevel] = useState("live");
  const level = state.levels.includes(wanted) ? wanted : "live";
  // Keys of no declared type have no order.
  const kinds = Object.keys(KINDS).filter((kind) => state.key || !KINDS[kind].ordered);
  const kind = kinds.includes(what) ? what : "key";
  const [found, setFound] = useState(null);
  const ask = async (event) => {
    event.preventDefault();
    const given = KINDS[kind].fields.filter(([name]) => kind === "key" || texts[name].trim()).map(([name]) => [name, texts[name]]);
    const path = pathOf(state.name, kind === "key" ? "" : "/scan", [["level", level], ...given]);
    const turn = found ? found.asked.turn + 1 : 0;
    const asked = { state: state.name, kind, texts: given, turn };
    try {
      setFound({ asked, answer: await get(path) });
    } catch (error) {
      setFound({ asked, problem: saidBy(error) });
    }
  };
  const field = ([name, title]) => html`<${Fragment} key=${name}>
    <label for=${`query-${name}`}>${title}</label>
    <input id=${`query-${name}`} type="text" value=${texts[name]} autocomplete="off" aria-describedby="key-hint"
      onInput=${(event) => setTexts({ ...texts, [name]: event.target.value })} />
  <//>`;
  return html`<form class="ask" onSubmit=${ask}>
      <label for="query-state">State</label>
      <select id="query-state" value=${state.name} onChange=${(event) => choose(event.target.value)}>
        ${states.map((each) => html`<option key=${each.name} value=${each.name}>${each.name}</option>`)}
      </select>
      <label for="query-what">Keys</label>
      <select id="query-what" value=${kind} onChange=${(event) => setWhat(event.target.value)}>
        ${kinds.map((each) => html`<option key=${each} value=${each}>${KINDS[each].title}</option>`)}
      </select>
      ${state.levels.length > 1 && html`<label for="query-level">Level</label>
        <select id="query-level" value=${level} onChange=${(event) => setLevel(event.target.value)}>
          ${state.levels.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
        </select>`}
      ${KINDS[kind].fields.map(field)}
      ${KINDS[kind].fields.length > 0 && html`<p id="key-hint" class="quiet">${keyHint(state, kind)}</p>`}
      <button type="submit">Ask</button>
    </form>
    <div aria-live="polite">${found && (found.problem
      ? html`<p class="problem" role="alert">${found.problem}</p>`
      : found.asked.kind === "key"
        ? html`<${Found} asked=${found.asked} answer=${found.answer} />`
        : html`<${Scanned} key=${found.asked.turn} asked=${found.asked} first=${found.answer} />`)}</div>`;
}

function pathOf(state, verb, parameters) {
  const query = parameters.map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&");
  return `v1/job/state/${encodeURIComponent(state)}${verb}?${query}${verb ? `&limit=${PAGE_ROWS}` : ""}`;
}

function saidBy(error) {
  const fix = error instanceof Refused && error.problem.fix;
  return fix && !error.message.includes(fix) ? `${error.message}: ${fix}` : error.message;
}

function Found({ asked, answer }) {
  return html`
    <h3><code>${asked.state}</code> of <code>${keyOf(answer.key)}</code></h3>
    ${answer.found
      ? html`<pre tabindex="0" aria-label="Value">${JSON.stringify(answer.value, null, 2)}</pre>`
      : html`<p>The state has nothing for this key.</p>`}
    <${Figures} of=${[
      ["Level", answer.level],
      ["Checkpoint", answer.checkpoint === null ? null : count(answer.checkpoint)],
      ["Step", answer.step],
      ["Subtask", count(answer.subtask)],
      ["Key group", count(answer.key_group)],
    ]} />`;
}

// The pages of a scan. A token is for one page, so the pages before are kept.
function Scanned({ asked, first }) {
  const [pages, setPages] = useState([first]);
  const [at, setAt] = useState(0);
  const [problem, setProblem] = useState("");
  const page = pages[at];
  const before = pages.slice(0, at).reduce((sum, each) => sum + each.rows.length, 0);
  const next = async () => {
    if (at === pages.length - 1) {
      try {
        const more = await get(pathOf(asked.state, "/scan", [["next", page.next]]));
        setPages([...pages, more]);
      } catch (error) {
        setProblem(saidBy(error));
        return;
      }
    }
    setAt(at + 1);
  };
  const columns = [
    { title: "Key", wide: true, cell: (row) => html`<code>${keyOf(row.key)}</code>` },
    { title: "Value", wide: true, cell: (row) => html`<code>${JSON.stringify(row.value)}</code>` },
  ];
  const limits = asked.texts.map(([name, text]) => html` ${name} <code>${text}</code>`);
  return html`
    <h3><code>${asked.state}</code>: ${KINDS[asked.kind].title}${limits}</h3>
    <${Table} label="Rows of the state" columns=${columns} rows=${page.rows} rowKey=${(row) => JSON.stringify(row.key)}
      empty=${page.next ? "This page has no rows; the next one may have some." : "There are no such keys."} />
    <p class="pages">
      <button disabled=${at === 0} onClick=${() => setAt(at - 1)}>Previous page</button>
      ${page.rows.length > 0 && html`<span>rows ${count(before + 1)} to ${count(before + page.rows.length)}${page.next ? "" : ", the last ones"}</span>`}
      <button disabled=${!page.next} onClick=${next}>Next page</button>
    </p>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <${Figures} of=${[
      ["Level", page.level],
      ["Checkpoint", page.checkpoint === null ? null : count(page.checkpoint)],
      ["Step", page.step],
    ]} />`;
}

function keyOf(key) {
  return typeof key === "string" ? key : JSON.stringify(key);
}
