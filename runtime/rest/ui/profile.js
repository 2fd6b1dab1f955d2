// The flame graph of a subtask, on demand: what it ran, and what it waited for.

import { get } from "./api.js";
import { count } from "./format.js";
import { html, useState } from "./lib.js";
import { Figures } from "./parts.js";

const SECONDS = 5;
const ROW_REM = 1.25;
const NARROWEST = 0.2;
const LISTED = 5;
const NAMED = 3;

// The graph of one subtask; that which works most is proposed.
export function Profile({ vertex, subtasks }) {
  const [chosen, setSubtask] = useState(null);
  const busiest = subtasks.reduce((most, each) => (each.busy > most.busy ? each : most), subtasks[0]);
  const subtask = chosen === null ? busiest.index : chosen;
  const [found, setFound] = useState(null);
  const [problem, setProblem] = useState(null);
  const [waits, setWaits] = useState(false);
  const take = async (event) => {
    event.preventDefault();
    setFound("taking");
    setSubtask(subtask);
    setProblem(null);
    try {
      setFound(await get(`v1/job/vertices/${vertex}/profile?subtask=${subtask}&seconds=${SECONDS}`));
    } catch (error) {
      setFound(null);
      setProblem(error.message);
    }
  };
  const taking = found === "taking";
  return html`<h3>Flame graph</h3>
    <form class="controls profile" onSubmit=${take}>
      <label for="profiled">Subtask (0 to ${subtasks.length - 1})</label>
      <input id="profiled" type="number" min="0" max=${subtasks.length - 1} value=${subtask}
        onInput=${(event) => setSubtask(Number(event.target.value))} />
      <button type="submit" disabled=${taking}>${taking ? `Looking for ${SECONDS} s …` : `Look for ${SECONDS} s`}</button>
      <label><input type="checkbox" checked=${waits} onChange=${(event) => setWaits(event.target.checked)} /> what it waits for</label>
    </form>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <div aria-live="polite">${found && !taking && html`<${Taken} profile=${found} waits=${waits} />`}</div>`;
}

function Taken({ profile, waits }) {
  const others = Object.entries(profile.others).sort((a, b) => b[1] - a[1]).slice(0, 3);
  const share = (samples) => (profile.samples ? `${Math.round((100 * samples) / profile.samples)} %` : "0 %");
  return html`<${Figures} of=${[
      ["Subtask", profile.task],
      ["Samples", count(profile.samples)],
      ["Ran", share(profile.running)],
      ["Waited", share(profile.samples - profile.running)],
      ["Others on its thread", others.length ? others.map(([name, samples]) => `${name} ${share(samples)}`).join(", ") : null],
    ]} />
    <${Flames} profile=${profile} kind=${waits ? "waiting" : "running"} />`;
}

function Flames({ profile, kind }) {
  const root = tree(profile, kind);
  if (!root.samples) return html`<p>${kind === "running" ? "The subtask did not run in this time." : "The subtask did not wait in this time."}</p>`;
  const boxes = placed(root);
  const rows = Math.max(...boxes.map((box) => box.depth)) + 1;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Flame graph">
    <div class="flames" style=${{ height: `${rows * ROW_REM}rem` }} role="img" aria-label=${`${count(root.samples)} samples of ${kind}`}>
      ${boxes.map((box) => html`<div key=${box.key} class=${`flame ${kind}`}
        style=${{ left: `${box.x}%`, width: `${box.width}%`, top: `${box.depth * ROW_REM}rem` }}
        title=${`${box.name}: ${count(box.samples)} of ${count(root.samples)} samples`}>${box.width >= NAMED && box.name}</div>`)}
    </div>
    <details>
      <summary>The same as a list</summary>
      <ol class="flame-list">
        ${boxes.filter((box) => box.width >= LISTED).map((box) => html`<li key=${box.key} style=${{ marginLeft: `${box.depth * 0.8}rem` }}>
          ${Math.round((100 * box.samples) / root.samples)} % <code>${box.name}</code>
        </li>`)}
      </ol>
    </details>
  </div>`;
}

// Return the calls as a tree, each with the samples of one kind in it and below it.
export function tree(profile, kind) {
  const root = { name: "", samples: 0, children: new Map() };
  for (const stack of profile.stacks) {
    const samples = stack[kind];
    if (!samples) continue;
    let node = root;
    node.samples += samples;
    for (const frame of stack.frames) {
      if (!node.children.has(frame)) {
        node.children.set(frame, { name: profile.functions[frame], samples: 0, children: new Map() });
      }
      node = node.children.get(frame);
      node.samples += samples;
    }
  }
  return root;
}

// Return a box for each call: its place and width are parts of the whole, in percent.
function placed(root) {
  const boxes = [];
  const place = (node, x, depth, path) => {
    let start = x;
    const inner = [...node.children].sort((a, b) => b[1].samples - a[1].samples);
    for (const [frame, child] of inner) {
      const width = (100 * child.samples) / root.samples;
      const key = `${path}/${frame}`;
      if (width >= NARROWEST) {
        boxes.push({ key, name: child.name, samples: child.samples, x: start, width, depth });
        place(child, start, depth + 1, key);
      }
      start += width;
    }
  };
  place(root, 0, 0, "");
  return boxes;
}
