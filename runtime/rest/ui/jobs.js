// The list of all jobs, for `headgate ui`: those that run, and the runs that have ended.

import { count, duration, NOTHING } from "./format.js";
import { ThemeSwitch, useToken } from "./frame.js";
import { Fragment, html, render, useEffect } from "./lib.js";
import { useAnswer } from "./live.js";
import { Sentence, Status, Table, Time } from "./parts.js";

const EVERY_MS = 3000;

function Jobs() {
  const { token, form, refuse } = useToken("Token of this page");
  return token ? html`<${List} token=${token} refuse=${refuse} />` : form;
}

function List({ token, refuse }) {
  const { answer, problem, refused } = useAnswer("v1/jobs", EVERY_MS);
  useEffect(() => {
    if (refused) refuse(problem);
  }, [refused]);
  const jobs = answer ? answer.jobs : [];
  return html`
    <header><h1>Jobs</h1><${ThemeSwitch} /></header>
    <main>
      ${problem && html`<p class="problem" role="alert">The list is not current: ${problem}</p>`}
      ${answer && answer.problems.map((text) => html`<p class="problem" role="alert" key=${text}><${Sentence} text=${text} /></p>`)}
      ${answer ? html`<${JobTable} jobs=${jobs} token=${token} storage=${answer.storage} />` : html`<p class="quiet">Loading …</p>`}
      ${jobs.filter((job) => job.runs.length).map((job) => html`<${Runs} key=${`${job.place} ${job.name}`} job=${job} />`)}
    </main>`;
}

function JobTable({ jobs, token, storage }) {
  const columns = [
    { title: "Job", cell: (j) => name(j, token), sort: (j) => j.name },
    { title: "Status", cell: (j) => html`<${Status} name=${j.status} />`, sort: (j) => j.status },
    { title: "Began", cell: (j) => html`<${Time} at=${j.began_ms} />`, sort: (j) => j.began_ms || 0 },
    { title: "Ended", cell: (j) => html`<${Time} at=${j.ended_ms} />`, sort: (j) => j.ended_ms || 0 },
    { title: "Parallelism", number: true, cell: (j) => count(j.parallelism), sort: (j) => j.parallelism || 0 },
    { title: "Restarts", number: true, cell: (j) => count(j.restarts), sort: (j) => j.restarts || 0 },
    { title: "Last checkpoint", cell: (j) => checkpoint(j) },
    { title: "What holds it up, or why it failed", wide: true, cell: (j) => j.findings.map((text) => html`<div key=${text}><${Sentence} text=${text} /></div>`) },
    { title: "Found in", cell: (j) => j.place, sort: (j) => j.place },
  ];
  const where = storage ? `this machine, and none has checkpoints in ${storage}` : "this machine";
  return html`<${Table} label="Jobs" columns=${columns} rows=${jobs} rowKey=${(j) => `${j.place} ${j.name}`}
    empty=${`No job runs on ${where}.`} />`;
}

// A job that answers has a page of its own. The link hands it the token, as the page has another address.
function name(job, token) {
  if (!job.path) return job.name;
  return html`<a href=${`../${job.path}ui/#token=${encodeURIComponent(token)}`}>${job.name}</a>`;
}

function checkpoint(job) {
  if (!job.last_checkpoint) return NOTHING;
  return html`<${Fragment}>${job.last_checkpoint}${job.last_checkpoint_at_ms ? html`, <${Time} at=${job.last_checkpoint_at_ms} />` : ""}<//>`;
}

function Runs({ job }) {
  const columns = [
    { title: "Run", cell: (r) => html`<code>${r.run || NOTHING}</code>` },
    { title: "Status", cell: (r) => html`<${Status} name=${r.status || (r.run === job.run ? job.status : "NOT ENDED")} />` },
    { title: "Began", cell: (r) => html`<${Time} at=${r.began_ms} />` },
    { title: "Ended", cell: (r) => html`<${Time} at=${r.ended_ms} />` },
    { title: "Lasted", number: true, cell: (r) => (r.began_ms && r.ended_ms ? duration(r.ended_ms - r.began_ms) : NOTHING) },
    { title: "Restarts", number: true, cell: (r) => count(r.restarts) },
    { title: "Checkpoint", number: true, cell: (r) => r.checkpoint || NOTHING },
    { title: "Reason", wide: true, cell: (r) => reason(r) },
  ];
  return html`<h2>Runs of ${job.name}</h2>
    <${Table} label=${`Runs of ${job.name}`} columns=${columns} rows=${[...job.runs].reverse()} rowKey=${(r) => r.run} empty="" />`;
}

function reason(run) {
  if (!run.failure) return run.reason;
  const { where, text, fix, detail } = run.failure;
  return html`<${Fragment}>
    <div>${where}: <${Sentence} text=${text} /></div>
    ${fix && html`<div class="quiet"><${Sentence} text=${fix} /></div>`}
    ${detail && html`<details><summary>Traceback</summary><pre tabindex="0">${detail}</pre></details>`}
  <//>`;
}

render(html`<${Jobs} />`, document.getElementById("app"));
