// Records that steps have dropped, how to keep them, and samples of them.

import { count, duration } from "./format.js";
import { html } from "./lib.js";
import { useAnswer } from "./live.js";
import { Sentence, Table, Time, Waiting, Watermark } from "./parts.js";

export function Lost({ status }) {
  const columns = [
    { title: "Step", cell: (d) => d.step, sort: (d) => d.step },
    { title: "Records", number: true, cell: (d) => count(d.count), sort: (d) => d.count },
    { title: "Why", wide: true, cell: (d) => d.text, sort: (d) => d.kind },
    { title: "To keep them", wide: true, cell: (d) => html`<${Sentence} text=${d.fix} />` },
  ];
  const dropped = status.dropped || [];
  return html`
    <h2>Lost records</h2>
    <p>Late records, dead letters that nobody reads, and everything else that a step has dropped in this run.</p>
    <${Table} label="Dropped records" columns=${columns} rows=${dropped}
      rowKey=${(d) => `${d.step} ${d.kind}`} empty="No step has dropped a record." />
    ${dropped.length > 0 && html`<${Samples} />`}`;
}

function Samples() {
  const { answer, problem } = useAnswer("v1/job/lost", 3000);
  if (!answer) return html`<${Waiting} problem=${problem} />`;
  if (!answer.kept) return html`<p class="quiet">No samples are kept (headgate.rest.lost-records).</p>`;
  const rows = answer.records.map((record, index) => ({ ...record, index }));
  const columns = [
    { title: "Step", cell: (r) => r.step, sort: (r) => r.step },
    { title: "Why", cell: (r) => r.kind, sort: (r) => r.kind },
    { title: "Dropped", cell: (r) => html`<${Time} at=${r.at_ms} />`, sort: (r) => r.at_ms },
    { title: "Subtask", number: true, cell: (r) => r.subtask, sort: (r) => r.subtask },
    { title: "Event time", cell: (r) => html`<${Watermark} at=${r.event_time} />`, sort: (r) => r.event_time || 0 },
    { title: "Behind the watermark", number: true, cell: (r) => duration(behind(r)), sort: (r) => behind(r) || 0 },
    ...(rows.some((r) => r.position) ? [{ title: "Read from", wide: true, cell: (r) => r.position }] : []),
    ...(rows.some((r) => r.error) ? [{ title: "Error", wide: true, cell: (r) => r.error }] : []),
    ...(answer.values ? [{ title: "Record", wide: true, cell: (r) => html`<code>${r.value}</code>` }] : []),
  ];
  return html`<h3>Samples</h3>
    <p class="quiet">
      The last ${answer.kept} of each step and reason.
      ${answer.values ? "" : " The records themselves and the texts of errors are shown with headgate.rest.lost-values."}
    </p>
    <${Table} label="Samples of dropped records" columns=${columns} rows=${rows} rowKey=${(r) => r.index}
      empty="No record was looked at." />`;
}

function behind(record) {
  if (record.event_time === null || record.watermark === null) return null;
  return Math.max(0, record.watermark - record.event_time);
}
