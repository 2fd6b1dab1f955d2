// Numbers, sizes and times as texts. Each text has its unit.

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const TENTHS = new Intl.NumberFormat("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const SIZES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const PARTS = [["d", 86_400_000], ["h", 3_600_000], ["m", 60_000], ["s", 1_000]];
const NO_TIME = 2 ** 62;

export const NOTHING = "–";

export function count(value) {
  return value === null || value === undefined ? NOTHING : WHOLE.format(value);
}

export function rate(perSecond) {
  if (perSecond === null || perSecond === undefined) return NOTHING;
  return `${perSecond < 10 && perSecond > 0 ? TENTHS.format(perSecond) : WHOLE.format(perSecond)} /s`;
}

export function size(bytes) {
  if (bytes === null || bytes === undefined) return NOTHING;
  let unit = 0;
  let value = bytes;
  while (value >= 1024 && unit < SIZES.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? WHOLE.format(value) : TENTHS.format(value)} ${SIZES[unit]}`;
}

export function sizeRate(perSecond) {
  return perSecond === null || perSecond === undefined ? NOTHING : `${size(Math.round(perSecond))}/s`;
}

// A time use: the API has milliseconds per second.
export function share(msPerSecond) {
  if (msPerSecond === null || msPerSecond === undefined) return NOTHING;
  return `${Math.round(msPerSecond / 10)} %`;
}

// At most two units: an operator reads "3 h 12 m", and nobody reads the seconds of it.
export function duration(ms) {
  if (ms === null || ms === undefined) return NOTHING;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 10_000) return `${TENTHS.format(ms / 1000)} s`;
  let left = Math.round(ms / 1000) * 1000;
  const found = [];
  for (const [name, length] of PARTS) {
    const whole = Math.floor(left / length);
    left -= whole * length;
    if (whole || found.length) found.push(whole ? `${whole} ${name}` : "");
    if (found.length === 2) break;
  }
  return found.filter(Boolean).join(" ");
}

// A duration that grows while one looks at it.
export function seconds(ms) {
  return ms < 1000 ? "0 s" : duration(Math.floor(ms / 1000) * 1000).replace(".0", "");
}

export function ago(atMs, nowMs) {
  const ms = nowMs - atMs;
  if (Math.abs(ms) < 1000) return "now";
  const text = seconds(Math.abs(ms));
  return ms > 0 ? `${text} ago` : `in ${text}`;
}

export function clock(atMs) {
  return new Date(atMs).toTimeString().slice(0, 8);
}

// The coordinator counts attempts in the low bits of a number, behind its own generation.
export function attemptOf(number) {
  return number % 65536;
}

export function exact(atMs) {
  return new Date(atMs).toISOString().replace("T", " ").replace("Z", " UTC");
}

// Before the first event, and after the last one, a watermark is beyond all dates.
export function isTime(watermark) {
  return watermark !== null && watermark !== undefined && Math.abs(watermark) < NO_TIME;
}

export function capital(text) {
  return text ? text[0].toUpperCase() + text.slice(1) : text;
}
