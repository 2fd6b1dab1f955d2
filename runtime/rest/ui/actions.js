// Operations on the job. Each is confirmed first, goes on by itself, and its result is shown here.

import { begin, operation } from "./api.js";
import { html, useEffect, useRef, useState } from "./lib.js";
import { useAnswer } from "./live.js";
import { duration } from "./format.js";
import { Sentence, Status, Table, Time } from "./parts.js";

const DIRECTORY = { name: "savepoint", label: "Directory (an absolute path or an address)", type: "text" };
const NATIVE = { name: "native", label: "Keep the files of the state backend (faster)", type: "checkbox" };
const ACTIONS = [
  { verb: "checkpoint", title: "Take a checkpoint", text: "The job takes a checkpoint now, beside the regular ones.", fields: [] },
  {
    verb: "savepoint",
    title: "Take a savepoint",
    text: "The job writes a savepoint into a new directory below the given one. Without one, the option execution.checkpointing.savepoint-dir is used.",
    fields: [DIRECTORY, NATIVE],
  },
  {
    verb: "rescale",
    title: "Rescale",
    text: "The job stops with a checkpoint, and goes on at another parallelism.",
    fields: [{ name: "parallelism", label: "Parallelism", type: "number", required: true }],
  },
  {
    verb: "stop",
    title: "Stop",
    text: "The job ends with a final checkpoint. It can be started from there.",
    fields: [{ name: "drain", label: "Drain: sources end as if their data had, so that all windows fire", type: "checkbox" }],
    danger: true,
  },
  { verb: "cancel", title: "Cancel", text: "The job ends at once, without a checkpoint.", fields: [], danger: true },
];

export function Actions({ status }) {
  const [asked, setAsked] = useState(null);
  const [begun, setBegun] = useState([]);
  const { answer } = useAnswer("v1/operations", 2000);
  const known = new Map((answer ? answer.operations : []).map((each) => [each.triggerId, each]));
  for (const each of begun) {
    const before = known.get(each.triggerId);
    if (!before || before.status === "IN_PROGRESS") known.set(each.triggerId, each);
  }
  const follow = async (first) => {
    let now = first;
    const note = () => setBegun((all) => [...all.filter((each) => each.triggerId !== now.triggerId), now]);
    note();
    while (now.status === "IN_PROGRESS") {
      try {
        now = await operation(now.triggerId);
      } catch (error) {
        // The API is closed soon after the job has ended.
        now = { ...now, status: "UNKNOWN", problem: { detail: `its end was not seen: ${error.message}` } };
      }
      note();
    }
  };
  const operations = [...known.values()].sort((a, b) => b.began_ms - a.began_ms);
  return html`
    <h2>Actions</h2>
    <ul class="actions">
      ${ACTIONS.map((action) => html`<li key=${action.verb}>
        <button class=${action.danger ? "danger" : ""} onClick=${() => setAsked(action)}>${action.title} …</button>
        <span>${action.text}</span>
      </li>`)}
    </ul>
    ${asked && html`<${Confirm} action=${asked} status=${status} close=${() => setAsked(null)} follow=${follow} />`}
    <h3>Operations</h3>
    <div aria-live="polite"><${Operations} operations=${operations} /></div>`;
}

function Confirm({ action, status, close, follow }) {
  const dialog = useRef(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    dialog.current.showModal();
  }, []);
  const submit = async (event) => {
    event.preventDefault();
    try {
      const first = await begin(action.verb, bodyOf(action, new FormData(event.target)));
      close();
      follow(first);
    } catch (error) {
      setProblem(error.message);
    }
  };
  return html`<dialog ref=${dialog} onClose=${close} aria-labelledby="asked">
    <form onSubmit=${submit}>
      <h3 id="asked">${action.title} ${action.verb.endsWith("point") ? "of " : ""}${status.name}?</h3>
      <p>${action.text}</p>
      ${action.fields.map((field) => html`<p key=${field.name}><label>
        ${field.type === "checkbox"
          ? html`<input type="checkbox" name=${field.name} /> ${field.label}`
          : html`${field.label}${" "}<input type=${field.type} name=${field.name} required=${field.required} min="1"
              placeholder=${field.type === "number" ? String(status.parallelism) : ""} />`}
      </label></p>`)}
      ${problem && html`<p class="problem" role="alert">${problem}</p>`}
      <p class="controls">
        <button type="button" onClick=${() => dialog.current.close()}>Do nothing</button>
        <button type="submit" class=${action.danger ? "danger" : ""}>${action.title}</button>
      </p>
    </form>
  </dialog>`;
}

function bodyOf(action, entered) {
  const body = {};
  for (const field of action.fields) {
    const value = entered.get(field.name);
    if (field.type === "checkbox") body[field.name] = value !== null;
    else if (field.type === "number") body[field.name] = Number(value);
    else if (value.trim()) body[field.name] = value.trim();
  }
  return body;
}

function Operations({ operations }) {
  const columns = [
    { title: "Operation", cell: (o) => o.verb },
    { title: "Status", cell: (o) => html`<${Status} name=${o.status} />` },
    { title: "Began", cell: (o) => html`<${Time} at=${o.began_ms} />` },
    { title: "Took", number: true, cell: (o) => duration(o.ended_ms ? o.ended_ms - o.began_ms : null) },
    { title: "Result", wide: true, cell: (o) => result(o) },
    { title: "Id", cell: (o) => o.triggerId },
  ];
  return html`<${Table} label="Operations" columns=${columns} rows=${operations} rowKey=${(o) => o.triggerId}
    empty="No client has asked this coordinator for anything yet." />`;
}

function result(done) {
  if (done.problem) return html`<${Sentence} text=${done.problem.detail} />`;
  if (!done.result) return "";
  return Object.entries(done.result).map(([key, value]) => html`<div key=${key}>${key}: <code>${String(value)}</code></div>`);
}
