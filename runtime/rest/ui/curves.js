// Curves of the last minutes, drawn by uPlot from the samples that the coordinator keeps.

import { get } from "./api.js";
import { clock, duration, NOTHING } from "./format.js";
import { html, useEffect, useMemo, useRef, useState } from "./lib.js";

const EVERY_MS = 2000;
const GAP_MS = 3500;
const HEIGHT = 160;
const COLOURS = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6"];
const DASHES = [[], [6, 3], [2, 3]];
const MOST = COLOURS.length * DASHES.length;

// Return { atMs, vertices } with the figures of each vertex as arrays, kept current; null: none yet.
export function useCurves() {
  const [curves, setCurves] = useState(null);
  useEffect(() => {
    const stop = new AbortController();
    let kept = null;
    const ask = async () => {
      if (document.hidden && kept) return;
      const since = kept && kept.at_ms.length ? kept.at_ms[kept.at_ms.length - 1] : 0;
      try {
        const more = await get(`v1/job/curves?since_ms=${since}`, stop.signal);
        kept = joined(kept, more);
        setCurves(kept);
      } catch {
        // The status says why the job cannot be asked; the curves stay as they are.
      }
    };
    ask();
    const timer = setInterval(ask, EVERY_MS);
    return () => {
      stop.abort();
      clearInterval(timer);
    };
  }, []);
  return curves;
}

// Name the time that the curves show. The first points are those of the present coordinator.
export function spanOf(curves) {
  const whole = curves.at_ms[curves.at_ms.length - 1] - curves.at_ms[0] > curves.span_ms - GAP_MS;
  return whole ? `The last ${duration(curves.span_ms)}` : "Since the coordinator began";
}

// Add later points, and forget those that the coordinator has forgotten, too.
export function joined(kept, more) {
  const same = kept && kept.vertices.map((each) => each.vertex).join() === more.vertices.map((each) => each.vertex).join();
  if (!same) return more;
  const atMs = [...kept.at_ms, ...more.at_ms];
  const first = atMs.findIndex((at) => at > atMs[atMs.length - 1] - more.span_ms);
  const cut = (before, after) => [...before, ...after].slice(Math.max(0, first));
  return {
    ...more,
    at_ms: cut(kept.at_ms, more.at_ms),
    vertices: more.vertices.map((vertex, index) => {
      const before = kept.vertices[index];
      const found = { ...vertex };
      for (const key of Object.keys(vertex)) {
        if (Array.isArray(vertex[key])) found[key] = cut(before[key], vertex[key]);
      }
      return found;
    }),
  };
}

// A chart with a line for each series: { name, values, dash }. `show` writes a value with its unit.
export function Chart({ title, atMs, series, show }) {
  const shown = series.slice(0, MOST);
  const place = useRef(null);
  const plot = useRef(null);
  const theme = useTheme();
  const data = useMemo(() => withGaps(atMs, shown.map((each) => each.values)), [atMs, series]);
  const names = shown.map((each) => each.name).join("\n");
  useEffect(() => {
    const { width } = place.current.getBoundingClientRect();
    plot.current = new globalThis.uPlot(options(place.current, width, shown, show), data, place.current);
    const watch = new ResizeObserver(([entry]) => {
      plot.current.setSize({ width: Math.floor(entry.contentRect.width), height: HEIGHT });
    });
    watch.observe(place.current);
    return () => {
      watch.disconnect();
      plot.current.destroy();
    };
  }, [names, theme]);
  useEffect(() => {
    plot.current.setData(data);
  }, [data]);
  const newest = (values) => {
    const last = values[values.length - 1];
    return last === null || last === undefined ? NOTHING : show(last);
  };
  const said = shown.map((each) => `${each.name} ${newest(each.values)}`).join(", ");
  return html`<figure class="chart">
    <figcaption>${title}</figcaption>
    <div class="plot" ref=${place} role="img" aria-label=${`${title}, now: ${said}`}></div>
    <ul class="lines">
      ${shown.map((each, index) => html`<li key=${each.name}>
        <svg class="line" data-line=${(index % COLOURS.length) + 1} data-dash=${dashOf(each, index)}
          viewBox="0 0 24 6" aria-hidden="true"><path d="M0 3h24" /></svg>
        ${each.name} <span class="now">${newest(each.values)}</span>
      </li>`)}
      ${series.length > MOST && html`<li>and ${series.length - MOST} more</li>`}
    </ul>
  </figure>`;
}

function options(place, width, shown, show) {
  const axis = { stroke: colour(place, "--quiet"), grid: { stroke: colour(place, "--line"), width: 1 }, ticks: { show: false } };
  return {
    width: Math.floor(width),
    height: HEIGHT,
    legend: { show: false },
    cursor: { drag: { x: false, y: false } },
    scales: { x: { time: true }, y: { range: (_, least, most) => [0, most > 0 ? most * 1.05 : 1] } },
    axes: [
      { ...axis, space: 90, size: 26, values: (_, times) => times.map((seconds) => clock(seconds * 1000)) },
      { ...axis, space: 36, size: 78, values: (_, values) => values.map((value) => show(value)) },
    ],
    series: [
      {},
      ...shown.map((each, index) => ({
        label: each.name,
        stroke: colour(place, COLOURS[index % COLOURS.length]),
        dash: DASHES[dashOf(each, index)],
        width: 1.5,
        points: { show: false },
      })),
    ],
  };
}

// Lines that often lie on each other, and those for which no colour is left, are told apart by dashes.
function dashOf(series, index) {
  return series.dash || Math.floor(index / COLOURS.length);
}

// While the job does not run there are no points, and there is no line.
function withGaps(atMs, values) {
  const times = [];
  const lines = values.map(() => []);
  atMs.forEach((at, index) => {
    if (index && at - atMs[index - 1] > GAP_MS) {
      times.push((atMs[index - 1] + 1) / 1000);
      lines.forEach((line) => line.push(null));
    }
    times.push(at / 1000);
    lines.forEach((line, which) => line.push(values[which][index]));
  });
  return [times, ...lines];
}

// A canvas does not know the variables of the style sheet.
function colour(place, name) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  place.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

function useTheme() {
  const [turns, setTurns] = useState(0);
  useEffect(() => {
    const changed = () => setTurns((before) => before + 1);
    const system = matchMedia("(prefers-color-scheme: dark)");
    system.addEventListener("change", changed);
    const watch = new MutationObserver(changed);
    watch.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    return () => {
      system.removeEventListener("change", changed);
      watch.disconnect();
    };
  }, []);
  return turns;
}
