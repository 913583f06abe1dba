// Text of a model as elements of the page. This is the one place where HTML is made, and all of it is cleaned: the
// server's content policy lets only the sanitiser turn text into HTML.
import DOMPurify from "./vendor/dompurify-3.5.0.js";
import { act, copy, element, following } from "./dom.js";
import { blocks, html, settled } from "./markdown.js";

const TEXT = "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr kbd li mark ol p pre strong sub sup table tbody td th thead tr ul";
const MATHS = "math menclose mfrac mi mmultiscripts mn mo mover mpadded mphantom mprescripts mroot mrow ms mspace msqrt "
  + "mstyle msub msubsup msup mtable mtd mtext mtr munder munderover";
const MATHS_ATTRIBUTES = "accent accentunder columnalign columnlines columnspacing depth display displaystyle fence form height "
  + "linethickness lspace mathbackground mathcolor mathsize mathvariant maxsize minsize movablelimits notation rowlines "
  + "rowspacing rspace scriptlevel separator stretchy symmetric voffset width";
const RULES = {
  ALLOWED_TAGS: `${TEXT} ${MATHS} #text`.split(" "),
  ALLOWED_ATTR: `align data-lang href start ${MATHS_ATTRIBUTES}`.split(" "),
  ADD_URI_SAFE_ATTR: `align data-lang start ${MATHS_ATTRIBUTES}`.split(" "),  // all but href, which the next line holds
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  ADD_FORBID_CONTENTS: ["annotation"],  // the source of a formula, beside the formula
  RETURN_DOM_FRAGMENT: true,
};

// HTML as clean elements, with what a reader needs around them.
export function clean(text) {
  const fragment = DOMPurify.sanitize(text, RULES);
  for (const link of fragment.querySelectorAll("a[href]")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
    link.title = link.getAttribute("href");
  }
  for (const table of fragment.querySelectorAll("table")) {
    const box = element("div", "table");
    table.replaceWith(box);
    box.append(table);
  }
  for (const code of fragment.querySelectorAll("pre")) frame(code);
  return fragment;
}

// A block of code below its language and a button.
function frame(code) {
  const box = element("div", "code"), head = box.appendChild(element("div", "code-head"));
  head.append(element("span", "", code.querySelector("[data-lang]")?.dataset.lang || "text"));
  head.append(act("Copy code", e => copy(code.textContent, e.target)));
  code.replaceWith(box);
  box.append(code);
}

// A text that grows, drawn once a frame at most. Blocks that are done stay; only the end is made again. Drawing takes
// a fifth of the time at most, so a long answer keeps the page quick.
export class Growing {
  constructor(node) {
    this.node = node;
    this.text = "";
    this.rest = "";       // what is not settled yet
    this.fixed = 0;       // elements of what is
    this.timer = this.frame = this.cost = 0;
  }

  append(text) {
    this.text += text;
    this.rest += text;
    if (this.timer || this.frame) return;
    this.timer = setTimeout(() => {
      this.timer = 0;
      this.frame = requestAnimationFrame(() => { this.frame = 0; this.draw(); });
    }, Math.min(1000, 4 * this.cost));
  }

  draw() {
    const start = performance.now();
    this.rest = this.rest.replace(/\r\n|\r(?!$)/g, "\n");
    const tokens = blocks(this.rest);
    let done = settled(tokens);
    const raw = tokens.slice(0, done).map(token => token.raw).join("");
    if (!this.rest.startsWith(raw)) done = 0;  // the parser changes blanks behind the mark of an empty item
    following(() => {
      while (this.node.childNodes.length > this.fixed) this.node.lastChild.remove();
      if (done) {
        this.put(tokens.slice(0, done));
        this.fixed = this.node.childNodes.length;
        this.rest = this.rest.slice(raw.length);
      }
      this.put(tokens.slice(done));
    });
    this.cost = performance.now() - start;
  }

  put(tokens) { this.node.append(clean(html(tokens).trim())); }

  // The whole text once more, in which a later part may say where an earlier link leads.
  finish() {
    clearTimeout(this.timer);
    cancelAnimationFrame(this.frame);
    this.timer = this.frame = 0;
    following(() => { this.node.replaceChildren(); this.put(blocks(this.text)); });
  }
}
