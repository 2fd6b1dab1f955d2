// Checkpoints: the sentence about each of them first, then phases and sizes.

import { capital, count, duration, size } from "./format.js";
import { html, useState } from "./lib.js";
import { useAnswer } from "./live.js";
import { Figures, PhaseLegend, Phases, Sentence, Status, Table, Time, Waiting } from "./parts.js";

const PHASES = ["start delay", "alignment", "sync", "async", "publishing"];

export function Checkpoints({ status, argument }) {
  const { answer, problem } = useAnswer("v1/job/checkpoints", 2000);
  if (!answer) return html`<h2>Checkpoints</h2><${Waiting} problem=${problem} />`;
  const history = [...answer.history].reverse();
  const chosen = argument ? Number(argument) : null;
  const newest = history.findIndex((each) => each.status !== "IN_PROGRESS");
  const said = chosen === null ? history.slice(0, newest + 1 || 1) : history.filter((each) => each.id === chosen);
  return html`
    <h2>Checkpoints</h2>
    <div class="verdict">${said.map((each) => html`<p key=${each.id} data-level=${each.status === "FAILED" ? "bad" : "none"}>
      ${each.is_savepoint ? "Savepoint" : "Checkpoint"} ${each.id}${each.status === "COMPLETED" ? "" : ":"}
      ${" "}<${Sentence} text=${each.explanation} />.
    </p>`)}</div>
    <${Figures} of=${[
      ["Completed", count(status.checkpoints_completed)],
      ["Failed", count(status.checkpoints_failed)],
      ["Failed in a row", count(status.checkpoints_failed_in_a_row)],
      ["Median duration", spread(answer, "end_to_end_duration", duration)],
      ["Longest", spread(answer, "end_to_end_duration", duration, "max")],
      ["Median of new bytes", spread(answer, "checkpointed_size", size)],
      ["Restored from", status.restored_from || null],
    ]} />
    <${PhaseLegend} names=${PHASES} />
    <${History} history=${history} />
    ${chosen !== null && html`<${Detail} id=${chosen} />`}`;
}

function spread(answer, name, show, quantile = "p50") {
  const found = answer.summary[name][quantile];
  return found === undefined ? null : show(found);
}

function phasesOf(checkpoint) {
  const slowest = checkpoint.slowest;
  if (!slowest) return [];
  return PHASES.map((name) => [name, slowest[name.replace(" ", "_")]]);
}

function History({ history }) {
  const longest = Math.max(1, ...history.map((each) => each.end_to_end_duration || 0));
  const columns = [
    { title: "Number", number: true, cell: (c) => html`<a href=${`#/checkpoints/${c.id}`}>${c.id}</a>` },
    { title: "Status", cell: (c) => html`<${Status} name=${c.status} />${c.is_savepoint ? " savepoint" : ""}` },
    { title: "Began", cell: (c) => html`<${Time} at=${c.trigger_timestamp} />` },
    { title: "Took", number: true, cell: (c) => duration(c.end_to_end_duration) },
    { title: "Phases of the last subtask", cell: (c) => html`<${Phases} of=${phasesOf(c)} total=${longest} />` },
    { title: "New", number: true, cell: (c) => size(c.checkpointed_size) },
    { title: "All state", number: true, cell: (c) => size(c.state_size) },
    { title: "In flight", number: true, cell: (c) => size(c.persisted_data) },
    { title: "Subtasks", number: true, cell: (c) => `${count(c.num_acknowledged_subtasks)} of ${count(c.num_subtasks)}` },
    { title: "In words", wide: true, cell: (c) => html`<${Sentence} text=${capital(c.explanation)} />` },
  ];
  return html`<${Table} label="The last checkpoints" columns=${columns} rows=${history} rowKey=${(c) => c.id}
    empty="No checkpoint has been taken yet." />`;
}

function Detail({ id }) {
  const { answer, problem } = useAnswer(`v1/job/checkpoints/${id}`, 2000);
  const [shown] = useState(["start delay", "alignment", "sync", "async"]);
  if (!answer) return html`<${Waiting} problem=${problem} />`;
  const longest = Math.max(1, ...answer.subtasks.map((part) => part.end_to_end_duration));
  const times = (part) => [part.start_delay, part.alignment.duration, part.sync_duration, part.async_duration];
  const columns = [
    { title: "Step", wide: true, cell: (p) => p.task, sort: (p) => p.task },
    { title: "Subtask", number: true, cell: (p) => p.index, sort: (p) => p.index },
    { title: "Acknowledged after", number: true, cell: (p) => duration(p.end_to_end_duration), sort: (p) => p.end_to_end_duration },
    { title: "Phases", cell: (p) => html`<${Phases} of=${times(p).map((ms, at) => [shown[at], ms])} total=${longest} />` },
    ...shown.map((title, at) => ({ title: capital(title), number: true, cell: (p) => duration(times(p)[at]), sort: (p) => times(p)[at] })),
    { title: "New", number: true, cell: (p) => size(p.checkpointed_size), sort: (p) => p.checkpointed_size },
    { title: "All state", number: true, cell: (p) => size(p.state_size), sort: (p) => p.state_size },
    { title: "Barriers", cell: (p) => (p.unaligned_checkpoint ? "overtook records" : "waited in line") },
  ];
  return html`<h3>Subtasks of ${answer.is_savepoint ? "savepoint" : "checkpoint"} ${id}</h3>
    ${answer.external_path && html`<p>A run can start from <code>${answer.external_path}</code></p>`}
    <${Table} label="Subtasks of the checkpoint" columns=${columns} rows=${answer.subtasks}
      rowKey=${(p) => `${p.task} ${p.index}`} empty="No subtask has acknowledged it." />`;
}
