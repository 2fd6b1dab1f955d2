// What the page of a job and the list of jobs have in common.

import { forgetToken, keepToken, takeToken } from "./api.js";
import { html, useRef, useState } from "./lib.js";

const THEMES = ["auto", "light", "dark"];

// Return { token, form, refuse }: the token, or else the form that asks for it.
export function useToken(label) {
  const [token, setToken] = useState(takeToken());
  const [refusal, setRefusal] = useState("");
  const refuse = (text) => {
    forgetToken();
    setToken(null);
    setRefusal(text);
  };
  const enter = (entered) => {
    keepToken(entered);
    setRefusal("");
    setToken(entered);
  };
  return { token, refuse, form: html`<${TokenForm} label=${label} refusal=${refusal} enter=${enter} />` };
}

function TokenForm({ label, refusal, enter }) {
  const field = useRef(null);
  return html`<main class="narrow">
    <h1>headgate</h1>
    <form onSubmit=${(event) => {
      event.preventDefault();
      if (field.current.value.trim()) enter(field.current.value.trim());
    }}>
      <label for="token">${label}</label>
      <input id="token" ref=${field} type="password" autocomplete="off" required
        aria-describedby="where" />
      <p id="where" class="quiet">
        The command <code>headgate ui</code> prints a link that has it. The token is kept for this tab only.
      </p>
      ${refusal && html`<p class="problem" role="alert">${refusal}</p>`}
      <button type="submit">Continue</button>
    </form>
  </main>`;
}

export function ThemeSwitch() {
  const [theme, setTheme] = useState(localStorage.getItem("headgate-theme") || "auto");
  const change = (event) => {
    const chosen = event.target.value;
    localStorage.setItem("headgate-theme", chosen);
    if (chosen === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    setTheme(chosen);
  };
  return html`<label class="theme">Theme
    <select value=${theme} onChange=${change}>
      ${THEMES.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
    </select>
  </label>`;
}
