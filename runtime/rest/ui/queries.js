// The queryable states of the job, and a form that asks one of them for a key.

import { get, Refused } from "./api.js";
import { count } from "./format.js";
import { html, useState } from "./lib.js";
import { useAnswer } from "./live.js";
import { Figures, Table, Waiting } from "./parts.js";

export function Queries() {
  const { answer, problem } = useAnswer("v1/job/state", 10_000);
  return html`
    <h2>State</h2>
    <p>The value of a key in a state that has a name for queries (<code>queryable="…"</code>), as it is at this moment, or as of the newest complete checkpoint.</p>
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

function keyHint(state) {
  if (!state.key) return 'A JSON value, such as "alice" (with the quotes) or 42.';
  const names = Object.keys(state.key);
  if (names.length === 1) return `Text of the type ${state.key[names[0]]}.`;
  return `A JSON object with ${names.join(", ")}.`;
}

function Ask({ states, state, choose }) {
  const [key, setKey] = useState("");
  const [wanted, setLevel] = useState("live");
  const level = state.levels.includes(wanted) ? wanted : "live";
  const [found, setFound] = useState(null);
  const ask = async (event) => {
    event.preventDefault();
    const asked = { state: state.name, key };
    try {
      const path = `v1/job/state/${encodeURIComponent(state.name)}`;
      const answer = await get(`${path}?key=${encodeURIComponent(key)}&level=${level}`);
      setFound({ asked, answer });
    } catch (error) {
      const fix = error instanceof Refused && error.problem.fix;
      setFound({ asked, problem: fix ? `${error.message}: ${fix}` : error.message });
    }
  };
  return html`<form class="ask" onSubmit=${ask}>
      <label for="query-state">State</label>
      <select id="query-state" value=${state.name} onChange=${(event) => choose(event.target.value)}>
        ${states.map((each) => html`<option key=${each.name} value=${each.name}>${each.name}</option>`)}
      </select>
      ${state.levels.length > 1 && html`<label for="query-level">Level</label>
        <select id="query-level" value=${level} onChange=${(event) => setLevel(event.target.value)}>
          ${state.levels.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
        </select>`}
      <label for="query-key">Key</label>
      <input id="query-key" type="text" value=${key} autocomplete="off" aria-describedby="key-hint"
        onInput=${(event) => setKey(event.target.value)} />
      <p id="key-hint" class="quiet">${keyHint(state)}</p>
      <button type="submit">Ask</button>
    </form>
    <div aria-live="polite">${found && html`<${Found} of=${found} />`}</div>`;
}

function Found({ of }) {
  const { asked, answer, problem } = of;
  if (problem) return html`<p class="problem" role="alert">${problem}</p>`;
  return html`
    <h3><code>${asked.state}</code> of <code>${asked.key}</code></h3>
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
