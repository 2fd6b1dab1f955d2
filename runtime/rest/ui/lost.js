// Records that steps have dropped, and how to keep them.

import { count } from "./format.js";
import { html } from "./lib.js";
import { Sentence, Table } from "./parts.js";

export function Lost({ status }) {
  const columns = [
    { title: "Step", cell: (d) => d.step, sort: (d) => d.step },
    { title: "Records", number: true, cell: (d) => count(d.count), sort: (d) => d.count },
    { title: "Why", wide: true, cell: (d) => d.text, sort: (d) => d.kind },
    { title: "To keep them", wide: true, cell: (d) => html`<${Sentence} text=${d.fix} />` },
  ];
  return html`
    <h2>Lost records</h2>
    <p>Late records, dead letters that nobody reads, and everything else that a step has dropped in this run.</p>
    <${Table} label="Dropped records" columns=${columns} rows=${status.dropped || []}
      rowKey=${(d) => `${d.step} ${d.kind}`} empty="No step has dropped a record." />`;
}
