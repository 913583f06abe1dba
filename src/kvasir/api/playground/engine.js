// The picture of the engine, from the metrics of the server.
import { $, element } from "./dom.js";
import { call } from "./server.js";


const CELLS = 144, seen = { running: [], waiting: [] };
let timer = 0, lost = false, back = () => {};

// Prometheus text to {name: value}; of a name with labels, the sum.
function gauges(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^(kvasir:[a-z_]+)(?:\{.*\})? ([-+.\deE]+)/.exec(line);
    if (match) found[match[1]] = (found[match[1]] || 0) + Number(match[2]);
  }
  return found;
}

// Lines about the tiers below the device, from Prometheus text.
function tiers(text) {
  const read = name => Object.fromEntries([...text.matchAll(new RegExp(`^kvasir:${name}\\{tier="(\\w+)"\\} (\\S+)`, "gm"))].map(m => [m[1], Number(m[2])]));
  const used = read("tier_used_bytes"), size = read("tier_bytes"), hits = read("tier_hit_tokens_total");
  const gib = bytes => (bytes / 2 ** 30).toFixed(bytes < 10 * 2 ** 30 ? 2 : 0);
  return Object.keys(size).map(name => `${name}: ${gib(used[name])} of ${gib(size[name])} GiB, ${(hits[name] || 0).toLocaleString("en")} tokens came back`);
}

function drawEngine(values) {
  const total = values["kvasir:num_pages"] || 0, free = values["kvasir:pages_free"] || 0;
  const cached = Math.min(values["kvasir:pages_cached"] || 0, free), used = total - free;
  const numbers = { running: values["kvasir:num_requests_running"] || 0, waiting: values["kvasir:num_requests_waiting"] || 0, used, cached, free: free - cached };
  for (const [id, value] of Object.entries(numbers)) $(id).textContent = value.toLocaleString("en");
  $("pool-title").textContent = `KV pages: ${total.toLocaleString("en")}, ${total ? Math.round(100 * used / total) : 0} % in use`;
  const cells = Math.min(CELLS, total), pool = $("pool");
  while (pool.childElementCount < cells) pool.append(element("i"));
  while (pool.childElementCount > cells) pool.lastChild.remove();
  // At least one cell for anything that is there at all.
  const share = n => n ? Math.max(1, Math.round(n / total * cells)) : 0, first = share(used), second = first + share(cached);
  [...pool.children].forEach((cell, i) => { cell.className = i < first ? "used" : i < second ? "cached" : ""; });
  drawGraph(numbers);
}

function drawGraph(numbers) {
  for (const name of ["running", "waiting"]) { seen[name].push(numbers[name]); if (seen[name].length > 120) seen[name].shift(); }
  const top = Math.max(1, ...seen.running, ...seen.waiting);
  for (const name of ["running", "waiting"]) {
    const from = 120 - seen[name].length;
    $("line-" + name).setAttribute("points", seen[name].map((v, i) => `${from + i},${38 - 34 * v / top}`).join(" "));
  }
}

export async function poll() {
  clearTimeout(timer);
  try {
    if (!document.hidden) {
      const text = await (await call("metrics")).text();
      drawEngine(gauges(text));
      $("tiers").replaceChildren(...tiers(text).map(line => element("div", "", line)));
      if (lost) back();
      lost = false;
      $("engine").hidden = !($("engine-note").hidden = true);
    }
  } catch (e) {
    lost ||= !e.status;
    $("engine-note").textContent = e.message;
    $("engine").hidden = !($("engine-note").hidden = false);
  }
  clearTimeout(timer);
  timer = setTimeout(poll, 1000);
}

// `what` is called when the server is back after it could not be reached: it may serve another model.
export function onReturn(what) { back = what; }
