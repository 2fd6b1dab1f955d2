// The status of the job, kept current by its events.

import { events, get, Refused } from "./api.js";
import { useEffect, useRef, useState } from "./lib.js";

const AGAIN_MS = 1500;
const EVENTS_KEPT = 200;

// Return { status, log, problem }: the newest status (null: none yet), the last events, and why the job cannot
// be followed now (null: it is).
export function useJob(token, onRefused) {
  const [job, setJob] = useState({ status: null, log: [], problem: null });
  useEffect(() => {
    if (!token) return undefined;
    const stop = new AbortController();
    follow(stop.signal, setJob, onRefused);
    return () => stop.abort();
  }, [token]);
  return job;
}

async function follow(signal, setJob, onRefused) {
  while (!signal.aborted) {
    try {
      const status = await get("v1/job/status", signal);
      setJob((job) => ({ ...job, status, log: [], problem: null }));
      for await (const event of events("v1/job/events", signal)) {
        if (event.kind === "progress") {
          setJob((job) => ({ ...job, status: { ...job.status, ...event.body } }));
        } else {
          const entry = { ...event, seenMs: Date.now() };
          setJob((job) => ({ ...job, log: [...job.log, entry].slice(-EVENTS_KEPT) }));
          // Progress comes only while the job works: other events change the status, too.
          get("v1/job/status", signal).then(
            (now) => setJob((job) => ({ ...job, status: now })),
            () => undefined,
          );
        }
      }
      throw new Error("the connection was closed");
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refused && error.status === 401) {
        onRefused(error.message);
        return;
      }
      setJob((job) => ({ ...job, problem: error.message }));
    }
    await new Promise((done) => setTimeout(done, AGAIN_MS));
  }
}

// Return { answer, problem, refused } of a path, asked every so often; null stands for "not yet", and
// `refused` for a wrong token. Without a path nothing is asked.
export function useAnswer(path, everyMs = 0) {
  const [found, setFound] = useState({ path, answer: null, problem: null });
  const newest = useRef(null);
  useEffect(() => {
    if (!path) return undefined;
    const stop = new AbortController();
    const ask = async () => {
      if (document.hidden && newest.current === path) return;
      try {
        const answer = await get(path, stop.signal);
        newest.current = path;
        setFound({ path, answer, problem: null });
      } catch (error) {
        if (stop.signal.aborted) return;
        const refused = error instanceof Refused && error.status === 401;
        setFound((before) => ({ ...before, path, problem: error.message, refused }));
      }
    };
    ask();
    const timer = everyMs ? setInterval(ask, everyMs) : null;
    return () => {
      stop.abort();
      clearInterval(timer);
    };
  }, [path, everyMs]);
  return found.path === path ? found : { answer: null, problem: null };
}

// Return the time, which moves on every second.
export function useNow() {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now()), 1000);
    return () => clearInterval(timer);
  }, []);
  return now;
}
