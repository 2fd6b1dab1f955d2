// The configuration and the plan of the job, and where its metrics are.

import { html, useState } from "./lib.js";
import { useAnswer } from "./live.js";
import { Figures, Table, Waiting } from "./parts.js";
import { count, duration } from "./format.js";

export function Settings({ status }) {
  const config = useAnswer("v1/job/config");
  const plan = useAnswer(`v1/job/plan?attempt=${status.attempt || 0}`);
  return html`
    <h2>Settings</h2>
    <${Figures} of=${[
      ["Run", status.run],
      ["Coordinator", `process ${status.pid}`],
      ["Parallelism", `${count(status.parallelism)} of at most ${count(status.max_parallelism)}`],
      ["Checkpoints", config.answer && (config.answer.checkpoint_storage || "none")],
      ["Interval", config.answer && config.answer.checkpoint_interval_ms ? duration(config.answer.checkpoint_interval_ms) : null],
    ]} />
    <h3>Options</h3>
    ${config.answer ? html`<${Options} options=${config.answer.options} />` : html`<${Waiting} problem=${config.problem} />`}
    <h3>Plan</h3>
    ${plan.answer ? html`<pre tabindex="0" aria-label="Plan">${plan.answer.text}</pre>` : html`<${Waiting} problem=${plan.problem} />`}
    <h3>Metrics for Prometheus</h3>
    <${Metrics} endpoints=${status.metrics || []} />`;
}

function Options({ options }) {
  const [text, setText] = useState("");
  const [all, setAll] = useState(false);
  const rows = Object.entries(options)
    .map(([key, option]) => ({ key, ...option }))
    .filter((each) => (all || each.explicit) && each.key.includes(text.trim()));
  const columns = [
    { title: "Option", cell: (o) => html`<code>${o.key}</code>` },
    { title: "Value", wide: true, cell: (o) => o.value },
    { title: "Set by", cell: (o) => (o.explicit ? "the user" : "default") },
  ];
  return html`<p class="controls">
      <label>Name contains <input type="search" value=${text} onInput=${(event) => setText(event.target.value)} /></label>
      <label><input type="checkbox" checked=${all} onChange=${(event) => setAll(event.target.checked)} /> with defaults</label>
    </p>
    <${Table} label="Options in effect" columns=${columns} rows=${rows} rowKey=${(o) => o.key}
      empty=${all ? "No option has such a name." : "The user set no such option."} />`;
}

function Metrics({ endpoints }) {
  const columns = [
    { title: "Process", cell: (e) => e.process },
    { title: "Address", wide: true, cell: (e) => html`<code>${e.url}</code>` },
  ];
  return html`<${Table} label="Metrics endpoints" columns=${columns} rows=${endpoints} rowKey=${(e) => e.process}
    empty="No process serves metrics (metrics.prometheus.port)." />`;
}
