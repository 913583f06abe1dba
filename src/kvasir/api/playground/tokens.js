// Tokens of answers, coloured by probability or by drafter.
import { $, element } from "./dom.js";

const HUES = [205, 130, 285, 45, 330, 165];
const names = [];          // drafters in the order in which they were first seen, each with its hue

// The colour behind a token: the less likely the redder, or the hue of its drafter.
function shade(token) {
  if ($("tokens-view").value === "probability") return `hsl(8 80% 50% / ${Math.min(.75, -token.logprob / 6).toFixed(2)})`;
  if (token.drafter === null || token.drafter === undefined) return "transparent";
  if (!names.includes(token.drafter)) names.push(token.drafter);
  return `hsl(${HUES[names.indexOf(token.drafter) % HUES.length]} 70% 50% / .35)`;
}

function percent(logprob) { const p = 100 * Math.exp(logprob); return (p < 1 ? p.toPrecision(1) : p.toFixed(0)) + " %"; }

function describeToken({ token, logprob, top_logprobs: top = [], drafter, forced }) {
  const others = top.map(t => `${JSON.stringify(t.token)} ${percent(t.logprob)}`).join("\n");
  return `${JSON.stringify(token)} ${percent(logprob)}` + (forced ? ", forced" : drafter ? `, drafted by ${drafter}` : ", drawn") + (others && "\n\n" + others);
}

// The tokens of an answer as spans, and a legend. A character of several tokens stands in the last of them.
export class Tokens {
  constructor(node, before) {
    this.node = node;
    this.list = [];
    this.decoder = new TextDecoder();
    this.view = node.insertBefore(element("div", "tokens"), before);
    this.legend = node.insertBefore(element("div", "legend"), before);
  }
  // ``forced``: places in the answer of the tokens that nobody drew.
  push(entries, forced = []) {
    for (const entry of entries) {
      if (forced.includes(this.list.length)) entry.forced = true;
      const text = entry.bytes ? this.decoder.decode(new Uint8Array(entry.bytes), { stream: true }) : entry.token;
      const span = this.view.appendChild(element("span", entry.forced ? "forced" : "", text));
      span.title = describeToken(entry);
      this.list.push({ span, entry });
    }
    this.node.classList.toggle("counted", this.list.length > 0);
    this.paint(this.list.slice(-entries.length));
  }
  paint(tokens = this.list) {
    for (const { span, entry } of tokens) span.style.setProperty("--shade", shade(entry));
    this.legend.replaceChildren();
    const label = (text, colour) => {
      const item = this.legend.appendChild(element("span")), mark = item.appendChild(element("i"));
      mark.style.setProperty("--shade", colour);
      item.append(text);
    };
    const forced = this.list.filter(({ entry }) => entry.forced).length;
    if (forced) this.legend.appendChild(element("span", "forced", `forced: ${forced}`));
    if ($("tokens-view").value === "probability") {
      for (const p of [.9, .3, .05]) label(percent(Math.log(p)), shade({ logprob: Math.log(p) }));
      return;
    }
    const counts = new Map(), drawn = this.list.filter(({ entry }) => !entry.forced);
    for (const { entry } of drawn) counts.set(entry.drafter ?? null, (counts.get(entry.drafter ?? null) || 0) + 1);
    for (const [drafter, count] of counts) label(`${drafter ?? "drawn by the model"}: ${count}`, shade({ drafter }));
  }
}
