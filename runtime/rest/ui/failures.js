// Failures of the job, what followed each of them, and how long each phase of the restart took.

import { attemptOf, capital, count, duration, size } from "./format.js";
import { html } from "./lib.js";
import { PhaseLegend, Phases, Sentence, Time } from "./parts.js";

const PHASES = [
  ["silent before", "silent_ms"],
  ["stopping", "cancelling_ms"],
  ["waiting", "waiting_ms"],
  ["deploying", "deploying_ms"],
];
const USER_FRAME = /^ {2}File "(.+)", line (\d+), in (.+)$/;

export function Failures({ status }) {
  const failures = [...(status.exceptions || [])].reverse();
  const busy = status.busy_steps || [];
  return html`
    <h2>Failures and restarts</h2>
    <p>
      ${count(status.restarts)} ${status.restarts === 1 ? "restart" : "restarts"} in this run.
      ${failures.length ? "" : " Nothing has failed since the coordinator began."}
    </p>
    ${busy.map((each) => html`<p class="verdict" key=${`${each.vertex} ${each.subtask}`}>
      <${Sentence} text=${`Now: \`${each.task}\` on ${each.worker} has been in one call${each.operator ? ` of \`${each.operator}\`` : ""} for ${duration(each.busy_ms)}.`} />
    </p>`)}
    ${failures.length > 0 && html`<${PhaseLegend} names=${PHASES.map(([name]) => name)} />`}
    ${failures.map((failure) => html`<${Failure} key=${failure.time_ms} failure=${failure} />`)}`;
}

export function Failure({ failure }) {
  const phases = PHASES.map(([name, key]) => [name, failure[key] || 0]);
  const line = userLine(failure.detail);
  const restore = failure.restore || {};
  const [text, ...more] = failure.text.split("\n");
  return html`<article class="failure" data-time=${failure.time_ms}>
    <h3><${Sentence} text=${capital(text)} /></h3>
    ${more.length > 0 && html`<pre tabindex="0">${more.join("\n")}</pre>`}
    <p>
      Failed <${Time} at=${failure.time_ms} /> in <code>${failure.where}</code>
      ${failure.worker && failure.worker !== failure.where ? ` on ${failure.worker}` : ""} (${failure.kind.replaceAll("_", " ")}, attempt ${attemptOf(failure.attempt)})
    </p>
    ${line && html`<p class="user-line"><code>${line.file}</code>, line ${line.number}, in <code>${line.name}</code>${line.code && html`: <code>${line.code}</code>`}</p>`}
    ${failure.outcome && html`<p><${Sentence} text=${capital(failure.outcome)} />.</p>`}
    ${failure.down_ms !== null && html`<p>
        Ran again${failure.restored ? ` from ${failure.restored}` : ""} after ${duration(failure.down_ms)}:
        ${" "}${phases.filter(([, ms]) => ms).map(([name, ms]) => `${name} ${duration(ms)}`).join(", ")}
        ${" "}(workers ${duration(restore.workers_ms)}, reading state ${duration(restore.fetching_ms)}, opening state
        ${" "}${duration(restore.opening_ms)}; ${size(restore.local_bytes)} from workers' disks,
        ${" "}${size(restore.storage_bytes)} from storage).
      </p>
      <${Phases} of=${phases} />`}
    ${failure.concurrent.length > 0 && html`<details>
      <summary>${failure.concurrent.length + failure.concurrent_dropped} more failed with it</summary>
      <ul>${failure.concurrent.map((also) => html`<li key=${also.where}><code>${also.where}</code>: ${also.text}</li>`)}</ul>
    </details>`}
    ${failure.detail && html`<details>
      <summary>Traceback</summary>
      <pre tabindex="0">${failure.detail}</pre>
    </details>`}
  </article>`;
}

// The last frame of the traceback, which is the line of the user's function that raised.
export function userLine(detail) {
  const lines = (detail || "").split("\n");
  for (let at = lines.length - 1; at >= 0; at -= 1) {
    const found = USER_FRAME.exec(lines[at]);
    if (found) {
      const next = lines[at + 1] || "";
      return { file: found[1], number: found[2], name: found[3], code: next.startsWith("    ") ? next.trim() : "" };
    }
  }
  return null;
}
