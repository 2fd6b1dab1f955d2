// Small parts that several views use.

import { ago, clock, duration, exact, isTime, NOTHING, share } from "./format.js";
import { html, useState } from "./lib.js";
import { useNow } from "./live.js";

const PAGE_ROWS = 100;
const DAY_MS = 86_400_000;

// A text of the engine: names are between backticks.
export function Sentence({ text }) {
  return text.split("`").map((part, index) => (index % 2 ? html`<code>${part}</code>` : part));
}

export function Time({ at }) {
  const now = useNow();
  if (!at) return NOTHING;
  return html`<time datetime=${new Date(at).toISOString()} title=${exact(at)}>${ago(at, now)}</time>`;
}

// The time of day, for lists in which each entry has its time.
export function Clock({ at }) {
  return html`<time class="clock" datetime=${new Date(at).toISOString()} title=${exact(at)}>${clock(at)}</time>`;
}

export function Watermark({ at }) {
  const now = useNow();
  if (!isTime(at)) return NOTHING;
  const date = Math.abs(now - at) < DAY_MS ? "" : `${exact(at).slice(0, 19)}, `;
  return html`<time datetime=${new Date(at).toISOString()} title=${exact(at)}>${date}${ago(at, now)}</time>`;
}

export function Status({ name }) {
  return html`<span class="status" data-status=${name}>${name.replaceAll("_", " ")}</span>`;
}

// Names and values side by side. Values that are null are left out.
export function Figures({ of }) {
  return html`<dl class="figures">
    ${of.filter(([, value]) => value !== null && value !== undefined).map(
      ([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`,
    )}
  </dl>`;
}

// How a second is spent, as a bar and in words. Shares are in ms per second.
export function TimeUse({ busy, backpressured, idle }) {
  const parts = [["busy", busy], ["backpressured", backpressured], ["idle", idle]];
  const known = busy !== null;
  const said = parts.map(([name, value]) => `${name} ${share(value)}`).join(", ");
  let start = 0;
  return html`<svg class="use" viewBox="0 0 1000 10" preserveAspectRatio="none" role="img" aria-label=${said}>
    <title>${said}</title>
    <rect class="idle" width="1000" height="10" />
    ${known && parts.slice(0, 2).map(([name, value]) => {
      const found = html`<rect class=${name} x=${start} width=${value} height="10" />`;
      start += value;
      return found;
    })}
  </svg>`;
}

export function Legend() {
  return html`<p class="legend">
    ${["busy", "backpressured", "idle"].map((name) => html`<span key=${name}><span class=${`key ${name}`}></span> ${name}</span>`)}
  </p>`;
}

// Phases of something that took time, as a bar: [[name, ms], ...]. Phases without time are left out.
export function Phases({ of, total }) {
  const shown = of.filter(([, ms]) => ms > 0);
  const all = total || shown.reduce((sum, [, ms]) => sum + ms, 0) || 1;
  const said = shown.map(([name, ms]) => `${name} ${duration(ms)}`).join(", ") || "no time";
  let start = 0;
  return html`<svg class="phases" viewBox="0 0 1000 10" preserveAspectRatio="none" role="img" aria-label=${said}>
    <title>${said}</title>
    <rect class="idle" width="1000" height="10" />
    ${shown.map(([name, ms]) => {
      const width = (1000 * ms) / all;
      const found = html`<rect class="phase" data-phase=${name} x=${start} width=${width} height="10" />`;
      start += width;
      return found;
    })}
  </svg>`;
}

export function PhaseLegend({ names }) {
  return html`<p class="legend">
    ${names.map((name) => html`<span key=${name}><span class="key phase" data-phase=${name}></span> ${name}</span>`)}
  </p>`;
}

// A table. Columns are { title, cell(row), number: true for figures, sort(row): by what it sorts, wide }.
export function Table({ label, columns, rows, rowKey, empty }) {
  const [order, setOrder] = useState({ column: null, down: true });
  const [page, setPage] = useState(0);
  if (!rows.length) return html`<p class="quiet">${empty}</p>`;
  const by = order.column === null ? null : columns[order.column].sort;
  const sorted = by ? [...rows].sort((a, b) => compare(by(a), by(b)) * (order.down ? -1 : 1)) : rows;
  const pages = Math.ceil(sorted.length / PAGE_ROWS);
  const at = Math.min(page, pages - 1);
  const shown = sorted.slice(at * PAGE_ROWS, (at + 1) * PAGE_ROWS);
  const choose = (column) =>
    setOrder((before) => ({ column, down: before.column === column ? !before.down : true }));
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}>
      <table>
        <caption class="unseen">${label}</caption>
        <thead>
          <tr>
            ${columns.map((column, index) => {
              const sortable = column.sort
                ? html`<button class="plain" onClick=${() => choose(index)}>${column.title}</button>`
                : column.title;
              const state = order.column !== index ? "none" : order.down ? "descending" : "ascending";
              return html`<th key=${column.title} scope="col" class=${column.number ? "number" : ""}
                aria-sort=${column.sort ? state : undefined}>${sortable}</th>`;
            })}
          </tr>
        </thead>
        <tbody>
          ${shown.map(
            (row) => html`<tr key=${rowKey(row)} data-row=${rowKey(row)}>
              ${columns.map(
                (column) => html`<td key=${column.title} class=${column.number ? "number" : column.wide ? "wide" : ""}>
                  ${column.cell(row)}
                </td>`,
              )}
            </tr>`,
          )}
        </tbody>
      </table>
    </div>
    ${pages > 1 &&
    html`<p class="pages">
      <button disabled=${at === 0} onClick=${() => setPage(at - 1)}>Previous</button>
      rows ${at * PAGE_ROWS + 1} to ${at * PAGE_ROWS + shown.length} of ${sorted.length}
      <button disabled=${at === pages - 1} onClick=${() => setPage(at + 1)}>Next</button>
    </p>`}`;
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b));
}

// What an answer that is still to come, or did not come, looks like.
export function Waiting({ problem }) {
  return problem
    ? html`<p class="problem" role="alert">${problem}</p>`
    : html`<p class="quiet">Loading …</p>`;
}
