// Markdown with formulas to a string of HTML. The string is not safe yet: render.js cleans it before it is shown.
import { Marked } from "./vendor/marked-18.2.1.js";
import "./vendor/katex-0.19.1.js";

// Longest formula, in characters. It also bounds how far an opening mark looks for its end.
const LONGEST = 4000;
// Tags that may be written out in an answer; all others are shown as text.
const HARMLESS = /^<\/?(?:br|sub|sup|kbd|mark)\s*\/?>$/i;
const BLOCK = new RegExp(String.raw`^[ \t]*(?:\$\$([^]{1,${LONGEST}}?)\$\$|\\\[([^]{1,${LONGEST}}?)\\\])[ \t]*(?:\n+|$)`);
const INLINE = [
  new RegExp(String.raw`^\$\$([^$]{1,${LONGEST}})\$\$`),
  new RegExp(String.raw`^\\\[([^]{1,${LONGEST}}?)\\\]`),
  new RegExp(String.raw`^\\\(([^]{1,${LONGEST}}?)\\\)`),
  // $5 and $6 are prices: no blank inside the marks, no digit behind the second.
  new RegExp(String.raw`^\$(?![\s$])((?:\\[^\n]|[^\\$\n]){1,${LONGEST}}?)(?<!\s)\$(?!\d)`),
];

const CODES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };

export function escape(text) { return text.replace(/[&<>"']/g, c => CODES[c]); }

// A formula as MathML, which browsers draw without fonts or styles of ours; as typed if it is not TeX that KaTeX knows.
function formula({ raw, tex, display }) {
  const options = { displayMode: display, output: "mathml", strict: "ignore", trust: false, maxSize: 20, maxExpand: 500 };
  try {
    return globalThis.katex.renderToString(tex, options);
  } catch {
    return `<code>${escape(raw.trim())}</code>`;
  }
}

const formulas = [
  {
    name: "formula",
    level: "block",
    start(text) { return /\n[ \t]*(?:\$\$|\\\[)/.exec(text)?.index + 1 || undefined; },
    tokenizer(text) {
      const found = BLOCK.exec(text);
      if (found) return { type: "formula", raw: found[0], tex: found[1] ?? found[2], display: true };
    },
    renderer: token => `<p>${formula(token)}</p>`,
  },
  {
    name: "inlineFormula",
    level: "inline",
    start(text) { return /\$|\\[[(]/.exec(text)?.index; },
    tokenizer(text) {
      for (const [i, pattern] of INLINE.entries()) {
        const found = pattern.exec(text);
        if (found) return { type: "inlineFormula", raw: found[0], tex: found[1], display: i < 2 };
      }
    },
    renderer: formula,
  },
];

const asTyped = raw => ({ type: "text", raw, text: raw });

const marked = new Marked({
  gfm: true,
  breaks: true,  // models break lines where they mean it
  extensions: formulas,
  tokenizer: {
    // 3*4 and 5*6 are products, and ~5 is about five.
    emStrong(text, masked, before) { return /^\*(?!\*)/.test(text) && /\w/.test(before) ? asTyped("*") : false; },
    del(text) { return /^~(?!~)/.test(text) ? asTyped("~") : false; },
  },
  renderer: {
    html({ text, block }) {
      if (HARMLESS.test(text.trim())) return text;
      return block ? `<p>${escape(text.trim()).replaceAll("\n", "<br>")}</p>` : escape(text);
    },
    // Nothing is loaded from anywhere: a picture becomes a link to it.
    image({ href, text }) { return `<a href="${escape(href)}">${escape(text || href)}</a>`; },
    code({ text, lang }) { return `<pre><code data-lang="${escape((lang || "").split(/\s/)[0])}">${escape(text)}</code></pre>`; },
    checkbox({ checked }) { return checked ? "☑ " : "☐ "; },
  },
});

// The blocks of a text: paragraphs, lists, tables and so on. Their `raw` parts joined are the text.
export function blocks(text) { return marked.lexer(text); }

export function html(tokens) { return marked.parser(tokens); }

// How many blocks no further text changes: all but the last two that are not blank.
export function settled(tokens) {
  let solid = 0;
  for (let i = tokens.length - 1; i > 0; i--) if (tokens[i].type !== "space" && ++solid === 2) return i;
  return 0;
}
