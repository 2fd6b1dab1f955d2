// One step: its subtasks, its event time, its state and its last failure.

import { count, duration, rate, share, size } from "./format.js";
import { Chart, spanOf, useCurves } from "./curves.js";
import { html } from "./lib.js";
import { useAnswer } from "./live.js";
import { Failure } from "./failures.js";
import { Profile } from "./profile.js";
import { Figures, Legend, Sentence, Table, TimeUse, Waiting, Watermark } from "./parts.js";

export function Vertex({ status, argument }) {
  const id = Number(argument);
  const vertex = (status.vertices || []).find((each) => each.id === id);
  const { answer, problem } = useAnswer(`v1/job/vertices/${id}/subtasks`, 2000);
  const plan = useAnswer(`v1/job/plan?attempt=${status.attempt || 0}`).answer;
  const state = useLastCheckpoint(status);
  if (!vertex) return html`<h2>No such step</h2><p><a href="#/">Back to the overview</a></p>`;
  const planned = plan && plan.vertices.find((each) => each.id === id);
  const parts = state ? state.subtasks.filter((part) => part.task === vertex.name) : [];
  const sizes = new Map(parts.map((part) => [part.index, part.state_size]));
  return html`
    <p><a href="#/">Overview</a></p>
    <h2>${vertex.name}</h2>
    ${sentences(status, vertex).map((text) => html`<div class="verdict" key=${text}><p data-level="bad"><${Sentence} text=${text} />.</p></div>`)}
    <${Figures} of=${[
      ["Subtasks", count(vertex.parallelism)],
      ["In", `${rate(vertex.records_in_per_second)} (${count(vertex.records_in)})`],
      ["Out", `${rate(vertex.records_out_per_second)} (${count(vertex.records_out)})`],
      ["Busy", `mean ${share(vertex.busy_mean)}, busiest subtask ${share(vertex.busy)}`],
      ["Backpressured", `up to ${share(vertex.backpressured)} (${vertex.backpressure_level})`],
      ["Calls in flight full", vertex.full ? share(vertex.full) : null],
      ["State, last checkpoint", parts.length ? size(parts.reduce((sum, part) => sum + part.state_size, 0)) : null],
      ["Timers", answer && setsTimers(answer.subtasks) ? timers(answer.subtasks) : null],
      ["Watermark", html`<${Watermark} at=${vertex.watermark} />`],
    ]} />
    <h3>Subtasks</h3>
    ${answer ? html`<${Subtasks} subtasks=${answer.subtasks} sizes=${sizes} /><${Legend} />` : html`<${Waiting} problem=${problem} />`}
    ${answer && html`<${HotKeyGroups} groups=${answer.hot_key_groups} />`}
    <${Charts} id=${id} />
    ${answer && answer.subtasks.length > 0 && html`<${Profile} key=${id} vertex=${id} subtasks=${answer.subtasks} />`}
    ${planned && html`<${EventTime} steps=${stepsBefore(id, plan, status)} />`}
    ${planned && html`<h3>Operators</h3><${Operators} operators=${planned.operators} />`}
    <h3>Last failure</h3>
    <${LastFailure} failures=${status.exceptions || []} name=${vertex.name} />`;
}

function Charts({ id }) {
  const curves = useCurves();
  const found = curves && curves.vertices.find((each) => each.vertex === id);
  if (!found || curves.at_ms.length < 2) return null;
  const flow = [
    { name: "in", values: found.records_in_per_second },
    { name: "out", values: found.records_out_per_second, dash: 1 },
  ];
  const use = ["busy", "backpressured", "idle"].map((name) => ({ name, values: found[name] }));
  return html`<h3>${spanOf(curves)}</h3>
    <div class="charts">
      <${Chart} title="Records per second" atMs=${curves.at_ms} series=${flow} show=${rate} />
      <${Chart} title="Time use, mean of the subtasks" atMs=${curves.at_ms} series=${use} show=${share} />
    </div>`;
}

// The subtasks of the newest completed checkpoint have the sizes of the state.
function useLastCheckpoint(status) {
  const newest = status.last_checkpoint;
  return useAnswer(newest ? `v1/job/checkpoints/${newest}` : null).answer;
}

function sentences(status, vertex) {
  return (status.backpressure || [])
    .filter((each) => (each.cause && each.cause.vertex === vertex.name) || each.vertices.some((one) => one.vertex === vertex.name))
    .map((each) => each.sentence);
}

function setsTimers(subtasks) {
  return subtasks.some((subtask) => Object.keys(subtask.timers).length);
}

// Sum up the timers of subtasks by step.
function timers(subtasks) {
  const sums = new Map();
  for (const subtask of subtasks) {
    for (const [step, waiting] of Object.entries(subtask.timers)) sums.set(step, (sums.get(step) || 0) + waiting);
  }
  if (sums.size === 1) return count([...sums.values()][0]);
  return [...sums].map(([step, waiting]) => `${step} ${count(waiting)}`).join(", ");
}

function HotKeyGroups({ groups }) {
  if (!groups.length) return null;
  const part = (share) => `${Math.round(100 * share)} %`;
  const columns = [
    { title: "Key group", number: true, cell: (g) => g.key_group },
    { title: "Subtask", number: true, cell: (g) => g.subtask },
    { title: "Of the step's records, at least", number: true, cell: (g) => part(g.records_share) },
    { title: "Of its subtask's records", number: true, cell: (g) => part(g.subtask_share) },
  ];
  return html`<h3>Hot key groups</h3>
    <p class="quiet">More subtasks do not divide a key group. If one key makes it hot, add something to the key that divides it.</p>
    <${Table} label="Hot key groups" columns=${columns} rows=${groups} rowKey=${(g) => g.key_group} empty="" />`;
}

function Subtasks({ subtasks, sizes }) {
  const columns = [
    { title: "Subtask", number: true, cell: (s) => `${s.index} (${s.index + 1}/${subtasks.length})`, sort: (s) => s.index },
    { title: "Worker", cell: (s) => s.worker || "none", sort: (s) => s.worker || "" },
    { title: "Records in", number: true, cell: (s) => count(s.records_in), sort: (s) => s.records_in },
    { title: "Records out", number: true, cell: (s) => count(s.records_out), sort: (s) => s.records_out },
    { title: "Time use", cell: (s) => html`<${TimeUse} busy=${s.busy} backpressured=${s.backpressured} idle=${s.idle} />` },
    { title: "Busy", number: true, cell: (s) => share(s.busy), sort: (s) => s.busy },
    { title: "Backpressured", number: true, cell: (s) => share(s.backpressured), sort: (s) => s.backpressured },
    { title: "Idle", number: true, cell: (s) => share(s.idle), sort: (s) => s.idle },
    { title: "Buffers queued", number: true, cell: (s) => count(s.queued), sort: (s) => s.queued },
    { title: "State", number: true, cell: (s) => size(sizes.get(s.index)), sort: (s) => sizes.get(s.index) || 0 },
    ...(setsTimers(subtasks) ? [{ title: "Timers", number: true, cell: (s) => count(total(s.timers)), sort: (s) => total(s.timers) }] : []),
    { title: "Watermark", cell: (s) => html`<${Watermark} at=${s.watermark} />`, sort: (s) => s.watermark || 0 },
  ];
  return html`<${Table} label="Subtasks" columns=${columns} rows=${subtasks} rowKey=${(s) => s.index} empty="No subtask." />`;
}

function total(waiting) {
  return Object.values(waiting).reduce((sum, each) => sum + each, 0);
}

// The steps that make the event time of a vertex: its own, and those of all vertices before it.
function stepsBefore(id, plan, status) {
  const before = new Set([id]);
  const back = [id];
  while (back.length) {
    const target = back.pop();
    for (const edge of plan.edges) {
      if (edge.target === target && !before.has(edge.source)) {
        before.add(edge.source);
        back.push(edge.source);
      }
    }
  }
  const made = plan.vertices.filter((each) => before.has(each.id)).flatMap((each) => each.operators);
  const names = new Set(made.map((each) => each.name));
  return (status.event_time || []).filter((step) => names.has(step.step));
}

function EventTime({ steps }) {
  if (!steps.length) return null;
  const columns = [
    { title: "Step", cell: (s) => s.step },
    { title: "Watermark", cell: (s) => html`<${Watermark} at=${s.watermark} />` },
    { title: "Behind the clock", number: true, cell: (s) => duration(s.lag_ms) },
    { title: "Held back by", wide: true, cell: (s) => (s.held_by ? heldBy(s.held_by) : "nobody") },
    { title: "Idle subtasks", number: true, cell: (s) => count(s.idle_subtasks.length) },
    { title: "Splits", number: true, cell: (s) => count(s.splits) },
    { title: "Idle splits", number: true, cell: (s) => count(s.idle_splits) },
  ];
  return html`<h3>Event time</h3>
    <p class="quiet">Steps here and before this one that make watermarks. The slowest holds event time back.</p>
    <${Table} label="Event time" columns=${columns} rows=${steps} rowKey=${(s) => s.step} empty="" />`;
}

function heldBy(holder) {
  const split = holder.split ? `, ${holder.split}` : "";
  return `${holder.task}${split}${holder.queued ? " (waits to be read)" : ""} for ${duration(holder.for_ms)}`;
}

function Operators({ operators }) {
  const columns = [
    { title: "Operator", cell: (o) => o.name },
    { title: "Kind", cell: (o) => o.kind },
    { title: "State", cell: (o) => (o.stateful ? "keeps state" : "none") },
    { title: "Detail", wide: true, cell: (o) => o.detail },
  ];
  return html`<${Table} label="Operators" columns=${columns} rows=${operators} rowKey=${(o) => o.name} empty="" />`;
}

function LastFailure({ failures, name }) {
  const own = failures.filter((each) => each.where.startsWith(name) || each.concurrent.some((also) => also.where.startsWith(name)));
  if (!own.length) return html`<p class="quiet">None since the coordinator began.</p>`;
  return html`<${Failure} failure=${own[own.length - 1]} />`;
}
