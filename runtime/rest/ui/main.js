// The page of one job: its token, its header and its views.

import { Actions } from "./actions.js";
import { Checkpoints } from "./checkpoints.js";
import { Failures } from "./failures.js";
import { seconds } from "./format.js";
import { ThemeSwitch, useToken } from "./frame.js";
import { html, render, useEffect, useRef, useState } from "./lib.js";
import { useAnswer, useJob } from "./live.js";
import { Logs } from "./logs.js";
import { Lost } from "./lost.js";
import { Overview } from "./overview.js";
import { Status } from "./parts.js";
import { Queries } from "./queries.js";
import { Settings } from "./settings.js";
import { Vertex } from "./vertex.js";

const VIEWS = [
  ["", "Overview", Overview],
  ["checkpoints", "Checkpoints", Checkpoints],
  ["failures", "Failures", Failures],
  ["lost", "Lost records", Lost],
  ["logs", "Logs", Logs],
  ["state", "State", Queries],
  ["settings", "Settings", Settings],
  ["actions", "Actions", Actions],
];

function App() {
  const { token, form, refuse } = useToken("Token of the job");
  const route = useRoute();
  const job = useJob(token, refuse);
  if (!token) return form;
  if (!job.status) {
    return html`<main class="narrow">
      <h1>headgate</h1>
      <p role="status">${job.problem ? `The job cannot be reached: ${job.problem}` : "Connecting …"}</p>
    </main>`;
  }
  return html`<${Page} job=${job} route=${route} />`;
}

function Page({ job, route }) {
  const { status, problem } = job;
  const main = useRef(null);
  const first = useRef(true);
  useEffect(() => {
    // Whoever follows a link by keyboard or screen reader goes on at the new view.
    if (!first.current) {
      main.current.focus({ preventScroll: true });
      scrollTo(0, 0);
    }
    first.current = false;
  }, [route.join("/")]);
  useEffect(() => {
    document.title = `${status.name} ${status.status} – headgate`;
  }, [status.name, status.status]);
  const [name, argument] = route;
  const View = name === "vertex" ? Vertex : (VIEWS.find((view) => view[0] === name) || VIEWS[0])[2];
  return html`
    <a class="skip" href="#content" onClick=${(event) => {
      event.preventDefault();
      main.current.focus();
    }}>Skip to the content</a>
    <header>
      <h1>${status.name}</h1>
      <${Status} name=${status.status} />
      ${status.status === "RUNNING" && html`<span>for ${seconds(status.uptime_ms)}</span>`}
      <${Dashboard} job=${status.name} />
      <${ThemeSwitch} />
    </header>
    <nav aria-label="Views">
      ${VIEWS.map(
        ([path, title]) => html`<a key=${path} href=${`#/${path}`} aria-current=${path === name ? "page" : undefined}>
          ${title}${mark(path, status)}
        </a>`,
      )}
    </nav>
    ${problem && html`<p class="problem" role="alert">The job cannot be followed now, and the page tries again: ${problem}</p>`}
    <main id="content" ref=${main} tabindex="-1">
      <${View} key=${route.join("/")} job=${job} status=${status} argument=${argument} />
    </main>`;
}

// A link to the dashboard of the job, if the user has named one.
function Dashboard({ job }) {
  const { answer } = useAnswer("v1/job/config");
  const option = answer && answer.options["headgate.rest.grafana-url"];
  const address = option ? option.value.replaceAll("{job}", encodeURIComponent(job)) : "";
  if (!/^https?:/.test(address)) return null;
  return html`<a href=${address} target="_blank" rel="noopener noreferrer">Grafana</a>`;
}

// A number beside the name of a view that has something to look at.
function mark(path, status) {
  const found = {
    failures: (status.exceptions || []).length,
    lost: (status.dropped || []).length,
    checkpoints: status.checkpoints_failed_in_a_row || 0,
  }[path];
  return found ? html` <span class="mark">${found}</span>` : null;
}

// The view is in the fragment of the address, so that links to it work and no request is made for it.
function useRoute() {
  const read = () => location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  const [route, setRoute] = useState(read());
  useEffect(() => {
    const changed = () => setRoute(read());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}

render(html`<${App} />`, document.getElementById("app"));
