// The last lines of the log, of the coordinator and of all workers.

import { get } from "./api.js";
import { attemptOf, count, exact } from "./format.js";
import { html, useEffect, useState } from "./lib.js";
import { Clock, Sentence, Waiting } from "./parts.js";

const EVERY_MS = 2000;
const LEVELS = ["INFO", "WARNING", "ERROR"];
const SHOWN_MAX = 300;

export function Logs() {
  const [level, setLevel] = useState("INFO");
  const [text, setText] = useState("");
  const { logs, problem } = useLogs(level);
  return html`
    <h2>Logs</h2>
    <p class="controls">
      <label>At least <select value=${level} onChange=${(event) => setLevel(event.target.value)}>
        ${LEVELS.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
      </select></label>
      <label>Contains <input type="search" value=${text} onInput=${(event) => setText(event.target.value)} /></label>
    </p>
    ${problem && html`<${Waiting} problem=${problem} />`}
    ${logs ? html`<${Lines} logs=${logs} text=${text.trim().toLowerCase()} />` : !problem && html`<${Waiting} />`}`;
}

// Return { logs, problem }: the newest lines of a level, kept current.
function useLogs(level) {
  const [found, setFound] = useState({ level, logs: null, problem: null });
  useEffect(() => {
    const stop = new AbortController();
    let kept = null;
    const ask = async () => {
      if (document.hidden && kept) return;
      const after = kept && kept.lines.length ? kept.lines[kept.lines.length - 1].number : 0;
      try {
        kept = followed(kept, await get(`v1/job/logs?level=${level}&after=${after}`, stop.signal));
        setFound({ level, logs: kept, problem: null });
      } catch (error) {
        if (!stop.signal.aborted) setFound({ level, logs: kept, problem: error.message });
        kept = null; // the next coordinator numbers its lines from 1
      }
    };
    ask();
    const timer = setInterval(ask, EVERY_MS);
    return () => {
      stop.abort();
      clearInterval(timer);
    };
  }, [level]);
  return found.level === level ? found : { logs: null, problem: null };
}

// Add later lines. Of each level as many are kept as the coordinator keeps.
export function followed(kept, more) {
  if (!kept) return more;
  if (!more.lines.length) return { ...kept, skipped: more.skipped };
  const left = new Map();
  const lines = [...kept.lines, ...more.lines].reverse().filter((line) => {
    left.set(line.level, (left.get(line.level) ?? more.kept) - 1);
    return left.get(line.level) >= 0;
  });
  return { ...more, lines: lines.reverse() };
}

function Lines({ logs, text }) {
  const found = logs.lines.filter((line) => !text || searched(line).includes(text)).reverse();
  if (!logs.kept) return html`<p class="quiet">No lines are kept (headgate.rest.log-lines).</p>`;
  return html`
    ${logs.skipped > 0 && html`<p class="quiet">${count(logs.skipped)} lines are missing, since workers wrote more than they send.</p>`}
    ${found.length === 0 && html`<p class="quiet">No such line.</p>`}
    <ol class="lines-of-log" reversed>
      ${found.slice(0, SHOWN_MAX).map((line) => html`<${Line} key=${line.number} line=${line} />`)}
    </ol>
    ${found.length > SHOWN_MAX && html`<p class="quiet">The newest ${SHOWN_MAX} of ${count(found.length)} lines are shown.</p>`}`;
}

function Line({ line }) {
  const fields = Object.entries(line.fields).filter(([name]) => name !== "job" && name !== "worker");
  return html`<li data-level=${line.level}>
    <${Clock} at=${line.at_ms} />
    <span class="level" data-level=${line.level}>${line.level}</span>
    <div>
      <span class="said">${line.logger.startsWith("headgate") ? html`<${Sentence} text=${line.message} />` : line.message}</span>
      <span class="where quiet">
        ${line.process}${" "}${line.logger}${fields.map(([name, value]) => ` ${name} ${name === "attempt" ? attemptOf(value) : value}`)}
      </span>
    </div>
    ${line.detail && html`<details><summary>Traceback</summary><pre tabindex="0">${line.detail}</pre></details>`}
  </li>`;
}

function searched(line) {
  return [line.message, line.process, line.logger, line.detail, ...Object.values(line.fields), exact(line.at_ms)]
    .join(" ").toLowerCase();
}
