// The job graph, and above it, in sentences, what holds the job up.

import { count, duration, rate, share, size } from "./format.js";
import { Chart, spanOf, useCurves } from "./curves.js";
import { Graph } from "./graph.js";
import { html } from "./lib.js";
import { Clock, Figures, Legend, Sentence, Table, Time, TimeUse, Watermark } from "./parts.js";

const HELD_MS = 10_000;
// While the job is down, the last rates and shares of time say nothing.
const NO_FIGURES = Object.fromEntries(
  ["records_in_per_second", "records_out_per_second", "busy", "busy_mean", "backpressured", "backpressured_mean", "idle_mean"]
    .map((name) => [name, null]),
);

export function Overview({ job, status }) {
  const works = ["RUNNING", "FINISHED"].includes(status.status);
  const vertices = (status.vertices || []).map((vertex) => (works ? vertex : { ...vertex, ...NO_FIGURES }));
  const edges = (status.edges || []).map((edge) => (works ? edge : { ...edge, records_per_second: null }));
  return html`
    <h2>Overview</h2>
    <${Verdict} status=${status} />
    <${Figures} of=${figures(status)} />
    <${Graph} vertices=${vertices} edges=${edges} causes=${causes(status)} />
    <${Legend} />
    <${Vertices} vertices=${vertices} />
    <${Charts} />
    <h3>What happened</h3>
    <${Log} log=${job.log} />`;
}

function figures(status) {
  return [
    ["Parallelism", count(status.parallelism)],
    ["Workers", count((status.workers || []).length)],
    ["Restarts", count(status.restarts)],
    ["Last checkpoint", status.last_checkpoint ? html`${status.last_checkpoint}, <${Time} at=${status.last_checkpoint_at_ms} />` : "none"],
    ["Its duration", status.last_checkpoint ? duration(status.last_checkpoint_ms) : null],
    ["Its size", status.last_checkpoint ? size(status.last_checkpoint_bytes) : null],
    ["Began", html`<${Time} at=${status.began_ms} />`],
    ["Restored from", status.restored_from || null],
  ];
}

function Charts() {
  const curves = useCurves();
  if (!curves || curves.at_ms.length < 2) return null;
  const series = (key) => curves.vertices.map((vertex) => ({ name: vertex.name, values: vertex[key] }));
  return html`<h3>${spanOf(curves)}</h3>
    <div class="charts">
      <${Chart} title="Records in, per second" atMs=${curves.at_ms} series=${series("records_in_per_second")} show=${rate} />
      <${Chart} title="Busy, mean of the subtasks" atMs=${curves.at_ms} series=${series("busy")} show=${share} />
    </div>`;
}

// The sentences come from the engine; a link leads to the step that each of them names.
function Verdict({ status }) {
  const found = findings(status);
  return html`<div class="verdict" role="status">
    ${found.length === 0 && html`<p>No step holds up another one.</p>`}
    ${found.map(
      ({ text, link, title, level }) => html`<p key=${text} data-level=${level}>
        <${Sentence} text=${text} />. ${link && html`<a href=${link}>${title}</a>`}
      </p>`,
    )}
  </div>`;
}

function findings(status) {
  const found = [];
  const vertices = status.vertices || [];
  const link = (name) => {
    const vertex = vertices.find((each) => each.name === name);
    return vertex ? { link: `#/vertex/${vertex.id}`, title: "Look at its subtasks" } : {};
  };
  if (!["RUNNING", "FINISHED"].includes(status.status)) {
    const why = status.failure ? `: ${status.failure}` : "";
    found.push({ level: "bad", text: `The job is ${status.status}${why}`, link: status.failure && "#/failures", title: "Look at its failures" });
  }
  for (const each of status.backpressure || []) {
    found.push({ level: "bad", text: each.sentence, ...link((each.cause || each.waiting[0] || {}).vertex) });
  }
  if (status.checkpoints_failed_in_a_row) {
    const failed = status.checkpoints_failed_in_a_row;
    found.push({
      level: "bad",
      text: `${failed === 1 ? "The last checkpoint" : `The last ${failed} checkpoints`} failed: ${status.checkpoint_failure}`,
      link: "#/checkpoints",
      title: "Look at the checkpoints",
    });
  }
  for (const step of status.event_time || []) {
    const holder = step.held_by;
    if (holder && holder.for_ms >= HELD_MS) {
      const split = holder.split ? `, \`${holder.split}\`,` : "";
      found.push({ level: "some", text: `Event time of \`${step.step}\` has been held back by \`${holder.task}\`${split} for ${duration(holder.for_ms)}` });
    }
  }
  for (const each of status.busy_steps || []) {
    found.push({ level: "some", text: `\`${each.task}\` has been in one call for ${duration(each.busy_ms)}`, link: `#/vertex/${each.vertex}`, title: "Look at its subtasks" });
  }
  return found;
}

function causes(status) {
  return new Set((status.backpressure || []).map((each) => each.cause && each.cause.vertex).filter(Boolean));
}

function Vertices({ vertices }) {
  const columns = [
    { title: "Step", cell: (v) => html`<a href=${`#/vertex/${v.id}`}>${v.name}</a>`, sort: (v) => v.name, wide: true },
    { title: "Subtasks", number: true, cell: (v) => count(v.parallelism), sort: (v) => v.parallelism },
    { title: "Records in", number: true, cell: (v) => count(v.records_in), sort: (v) => v.records_in },
    { title: "In", number: true, cell: (v) => rate(v.records_in_per_second), sort: (v) => v.records_in_per_second },
    { title: "Records out", number: true, cell: (v) => count(v.records_out), sort: (v) => v.records_out },
    { title: "Out", number: true, cell: (v) => rate(v.records_out_per_second), sort: (v) => v.records_out_per_second },
    { title: "Time use, mean", cell: (v) => html`<${TimeUse} busy=${v.busy_mean} backpressured=${v.backpressured_mean} idle=${v.idle_mean} />` },
    { title: "Busiest subtask", number: true, cell: (v) => share(v.busy), sort: (v) => v.busy },
    { title: "Backpressure", number: true, cell: (v) => share(v.backpressured), sort: (v) => v.backpressured },
    { title: "Watermark", cell: (v) => html`<${Watermark} at=${v.watermark} />`, sort: (v) => v.watermark || 0 },
  ];
  return html`<${Table} label="Steps of the job" columns=${columns} rows=${vertices} rowKey=${(v) => v.id}
    empty="The job has not started yet." />`;
}

function Log({ log }) {
  if (!log.length) return html`<p class="quiet">Nothing since the coordinator began.</p>`;
  return html`<ol class="log" reversed>
    ${[...log].reverse().slice(0, 20).map((event, index) => html`<li key=${log.length - index}>
      <${Clock} at=${event.at_ms || event.seenMs} />
      <span class="kind">${event.kind}</span>
      <span><${Sentence} text=${event.text} /></span>
    </li>`)}
  </ol>`;
}
