// The flame graph of a subtask, on demand: what it ran, and what it waited for.

import { get } from "./api.js";
import { count } from "./format.js";
import { html, useState } from "./lib.js";
import { Figures } from "./parts.js";

const SECONDS = 5;
const ROW = 20;
const WIDTH = 1000;
const NARROWEST = 2;

export function Profile({ vertex, subtasks }) {
  const [subtask, setSubtask] = useState(0);
  const [found, setFound] = useState(null);
  const [problem, setProblem] = useState(null);
  const [waits, setWaits] = useState(false);
  const take = async (event) => {
    event.preventDefault();
    setFound("taking");
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
      <label for="profiled">Subtask (0 to ${subtasks - 1})</label>
      <input id="profiled" type="number" min="0" max=${subtasks - 1} value=${subtask}
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
  const height = (Math.max(...boxes.map((box) => box.depth)) + 1) * ROW;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Flame graph">
    <svg class="flames" viewBox=${`0 0 ${WIDTH} ${height}`} width="100%" height=${height} preserveAspectRatio="none" role="img"
      aria-label=${`${count(root.samples)} samples of ${kind}`}>
      ${boxes.map((box) => html`<g key=${box.key}>
        <title>${box.name}: ${count(box.samples)} of ${count(root.samples)} samples</title>
        <rect class=${`flame ${kind}`} x=${box.x} y=${box.depth * ROW} width=${box.width} height=${ROW - 1} />
      </g>`)}
    </svg>
    <ol class="flame-list">
      ${boxes.filter((box) => box.width >= WIDTH / 20).map((box) => html`<li key=${box.key} style=${{ marginLeft: `${box.depth * 0.8}rem` }}>
        ${Math.round((100 * box.samples) / root.samples)} % <code>${box.name}</code>
      </li>`)}
    </ol>
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

function placed(root) {
  const boxes = [];
  const place = (node, x, depth, path) => {
    let start = x;
    const inner = [...node.children].sort((a, b) => b[1].samples - a[1].samples);
    for (const [frame, child] of inner) {
      const width = (WIDTH * child.samples) / root.samples;
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
