// The libraries that all views use: Preact with its hooks, and htm, which needs no build step.
import htm from "./vendor/htm.js";
import { createElement } from "./vendor/preact.js";

export { Fragment, render } from "./vendor/preact.js";
export { useCallback, useEffect, useMemo, useRef, useState } from "./vendor/preact-hooks.js";
export const html = htm.bind(createElement);
