// Requests to the server that the page came from.
import { $ } from "./dom.js";

// What the server refused, or that it cannot be reached (status 0). `loading`: asking again later may help.
export class ApiError extends Error {
  constructor(message, status = 0, loading = false) { super(message); this.status = status; this.loading = loading; }
}

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: "Bearer " + key }) };
}

export async function call(path, options = {}) {
  let reply;
  try {
    reply = await fetch(path, { ...options, headers: headers() });
  } catch (e) {
    if (e.name === "AbortError") throw e;
    throw new ApiError("The server cannot be reached. Is it still running?");
  }
  if (!reply.ok) throw await refusal(reply);
  return reply;
}

export function sentence(text) { return /[.!?]$/.test(text) ? text : text + "."; }

async function refusal(reply) {
  const text = await reply.text();
  let error = {};
  try { error = JSON.parse(text).error || {}; } catch { /* not JSON: the status has to do */ }
  if (reply.status === 401) return new ApiError("The server wants an API key. Enter it at the top of the page.", 401);
  const wait = reply.headers.get("Retry-After"), loading = reply.status === 503 && wait !== null;
  const what = error.message || `The server answered ${reply.status} ${reply.statusText}`;
  const named = sentence(what + (error.param ? ` (${error.param})` : ""));
  return new ApiError(named + (wait && !loading ? ` Try again in ${wait} s.` : ""), reply.status, loading);
}

// Milliseconds before the next try: half a second, doubled up to three.
export function pause(tries) { return Math.min(3000, 500 * 2 ** tries); }

export function sleep(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const stop = () => { clearTimeout(timer); reject(new DOMException("stopped", "AbortError")); };
    const timer = setTimeout(() => { signal?.removeEventListener("abort", stop); resolve(); }, milliseconds);
    if (signal?.aborted) stop();
    signal?.addEventListener("abort", stop, { once: true });
  });
}

// As `call`, but a server whose model still loads is asked again until it answers or the signal aborts.
// `waiting(reason)` hears why before each pause, and "" before each new try.
export async function callWhenReady(path, options, waiting) {
  for (let tries = 0; ; tries++) {
    try {
      return await call(path, options);
    } catch (e) {
      if (!e.loading) throw e;
      waiting(e.message);
    }
    await sleep(pause(tries), options.signal);
    waiting("");
  }
}

let rounds = 0;

// Ask for the models until the server knows them. `show(models, error)` hears every outcome; one of the two is null.
// A later call ends an earlier one. Only time helps against a loading or missing server, so other refusals end it too.
export async function learnModels(show) {
  const mine = ++rounds;
  for (let tries = 0; mine === rounds; tries++) {
    let models = null, error = null;
    try { models = (await (await call("v1/models")).json()).data; } catch (e) { error = e; }
    if (mine !== rounds) return;
    show(models, error);
    if (!error || (error.status && !error.loading)) return;
    await sleep(pause(tries));
  }
}

// The data of each server-sent event, as it comes.
export async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    const lines = (rest += value || "").split(/\r?\n/);
    rest = done ? "" : lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    if (done) return;
  }
}
