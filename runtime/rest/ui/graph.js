// The job graph: each step in a column behind all steps that it reads from.

import { count, rate, share, sizeRate } from "./format.js";
import { html } from "./lib.js";

const WIDTH = 230;
const HEIGHT = 96;
const GAP_X = 150;
const GAP_Y = 28;
const MARGIN = 8;
const NAME_MAX = 26;

export function Graph({ vertices, edges, causes }) {
  if (!vertices.length) return null;
  const places = layout(vertices, edges);
  const width = Math.max(...[...places.values()].map((place) => place.x)) + WIDTH + MARGIN;
  const height = Math.max(...[...places.values()].map((place) => place.y)) + HEIGHT + MARGIN;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Graph of the job">
    <svg class="graph" width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`} role="group"
      aria-label="Steps and exchanges">
      ${edges.map((edge, index) => html`<${Edge} key=${index} edge=${edge} edges=${edges} places=${places} />`)}
      ${vertices.map((vertex) => html`<${Node} key=${vertex.id} vertex=${vertex} place=${places.get(vertex.id)}
        cause=${causes.has(vertex.name)} />`)}
    </svg>
  </div>`;
}

function Node({ vertex, place, cause }) {
  const { name, busy_mean: busy, backpressured_mean: backpressured } = vertex;
  const inside = WIDTH - 20;
  return html`<a class=${`node ${cause ? "cause" : ""}`} href=${`#/vertex/${vertex.id}`}>
    <title>${name}</title>
    <rect class="box" x=${place.x} y=${place.y} width=${WIDTH} height=${HEIGHT} rx="4" />
    <text class="name" x=${place.x + 10} y=${place.y + 20}>${shortened(name)}</text>
    <text x=${place.x + 10} y=${place.y + 39}>× ${count(vertex.parallelism)} · ${rate(vertex.records_in_per_second)} in</text>
    <text x=${place.x + 10} y=${place.y + 57}>busy ${share(busy)}${skew(vertex)}</text>
    <text x=${place.x + 10} y=${place.y + 75}>
      ${cause ? "holds others up" : `backpressured ${share(vertex.backpressured)}`}
    </text>
    <rect class="idle" x=${place.x + 10} y=${place.y + 82} width=${inside} height="7" />
    <rect class="busy" x=${place.x + 10} y=${place.y + 82} width=${(inside * busy) / 1000} height="7" />
    <rect class="backpressured" x=${place.x + 10 + (inside * busy) / 1000} y=${place.y + 82}
      width=${(inside * backpressured) / 1000} height="7" />
  </a>`;
}

// Shown if some subtask works much more than the mean one.
function skew(vertex) {
  return vertex.busy - vertex.busy_mean > 100 ? `, up to ${share(vertex.busy)}` : "";
}

function shortened(name) {
  return name.length > NAME_MAX ? `${name.slice(0, NAME_MAX - 1)}…` : name;
}

function Edge({ edge, edges, places }) {
  const from = places.get(edge.source);
  const to = places.get(edge.target);
  if (!from || !to) return null;
  const back = to.x <= from.x;
  const [x1, y1] = [from.x + WIDTH, from.y + HEIGHT / 2];
  const [x2, y2] = [to.x, to.y + HEIGHT / 2];
  const low = Math.max(from.y, to.y) + HEIGHT + GAP_Y / 2;
  const counted = edge.records_per_second !== null;
  const flow = counted ? `${rate(edge.records_per_second)} · ${sizeRate(edge.bytes_per_second)}` : "";
  const path = back
    ? `M ${x1} ${y1} C ${x1 + 40} ${low} ${x1} ${low} ${x1 - 40} ${low} L ${x2 + 40} ${low} C ${x2} ${low} ${x2 - 40} ${low} ${x2} ${y2}`
    : `M ${x1} ${y1} C ${x1 + GAP_X / 2} ${y1} ${x2 - GAP_X / 2} ${y2} ${x2} ${y2}`;
  const [flowY, howY] = back ? [low - 7, low + 16] : textPlaces(edge, edges, y1, y2);
  return html`<g class="edge">
    <path d=${path} />
    <text x=${(x1 + x2) / 2} y=${flowY}>${flow}</text>
    <text class="how" x=${(x1 + x2) / 2} y=${howY}>${edge.partitioning}</text>
  </g>`;
}

// The texts of an exchange stand at that end which it shares with fewer others, on the side that its line does not pass.
function textPlaces(edge, edges, y1, y2) {
  const forward = edges.filter((each) => !isBack(each));
  const atSource = forward.filter((each) => each.source === edge.source).length;
  const atTarget = forward.filter((each) => each.target === edge.target).length;
  const atEnd = atSource > atTarget;
  const y = atEnd ? y2 : y1;
  if (y1 === y2) return Math.max(atSource, atTarget) > 1 ? [y - 23, y - 7] : [y - 7, y + 16];
  const below = atEnd === y2 > y1;
  return below ? [y + 16, y + 32] : [y - 23, y - 7];
}

// Return the place of each vertex. Columns follow the exchanges; the order in a column is that of the
// vertices before it, which keeps crossings few. Exchanges that lead back do not count.
export function layout(vertices, edges) {
  const sources = new Map(vertices.map((vertex) => [vertex.id, []]));
  for (const edge of edges) {
    if (!isBack(edge) && sources.has(edge.target) && sources.has(edge.source)) sources.get(edge.target).push(edge.source);
  }
  const columns = new Map();
  const column = (id) => {
    if (!columns.has(id)) {
      columns.set(id, 0);
      columns.set(id, Math.max(0, ...sources.get(id).map((source) => column(source) + 1)));
    }
    return columns.get(id);
  };
  vertices.forEach((vertex) => column(vertex.id));
  const places = new Map();
  for (let at = 0; ; at += 1) {
    const here = vertices.filter((vertex) => columns.get(vertex.id) === at);
    if (!here.length) return places;
    const wanted = (vertex) => {
      const before = sources.get(vertex.id).map((id) => places.get(id)).filter(Boolean);
      return before.reduce((sum, place) => sum + place.y, 0) / (before.length || 1);
    };
    here
      .map((vertex) => [wanted(vertex), vertex])
      .sort((a, b) => a[0] - b[0] || a[1].id - b[1].id)
      .forEach(([, vertex], row) => {
        places.set(vertex.id, { x: MARGIN + at * (WIDTH + GAP_X), y: MARGIN + row * (HEIGHT + GAP_Y) });
      });
  }
}

function isBack(edge) {
  return (edge.side || "").startsWith("back to");
}
