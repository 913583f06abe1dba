// The conversation: requests, answers, what is kept, and the controls of the page.
import { Conversations } from "./conversations.js";
import { $, act, add, clearErrors, copy, element, following, showError } from "./dom.js";
import { onReturn, poll } from "./engine.js";
import { GENERAL, PACKAGED } from "./examples.js";
import { Meter } from "./meter.js";
import { Growing } from "./render.js";
import { ApiError, callWhenReady, events, learnModels, sentence } from "./server.js";
import { Tokens } from "./tokens.js";

// A turn: its message as the API takes it, and of an answer its foot, tokens and the request without messages.
let turns = [];            // a new chat is a new list
let id = "";               // of the conversation in the store
let running = null;        // AbortController of the answer being made

// The request for the next answer; the messages are those of the turns, after the system prompt.
function body(extra) {
  const messages = turns.map(turn => turn.message);
  if ($("system").value.trim()) messages.unshift({ role: "system", content: $("system").value });
  const request = { messages, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  if ($("tokens-view").value) Object.assign(request, { logprobs: true, top_logprobs: 4, return_drafters: true });
  if ($("model").value) request.model = $("model").value;
  for (const name of ["temperature", "top_p", "top_k", "max_tokens", "seed"]) {
    if (!$(name).validity.valid) throw new ApiError(`“${$(name).parentNode.firstChild.textContent.trim()}” is out of range: ${$(name).validationMessage}`);
    if ($(name).value !== "") request[name] = Number($(name).value);
  }
  const stops = $("stop").value.split("\n").filter(Boolean).map(s => s.replaceAll("\\n", "\n"));
  if (stops.length) request.stop = stops;
  if ($("thinking").value) request.chat_template_kwargs = { enable_thinking: $("thinking").value === "on" };
  if ($("tools").value.trim()) {
    try { request.tools = JSON.parse($("tools").value); } catch (e) { throw new ApiError("The tools are not valid JSON: " + e.message); }
  }
  return { ...extra, ...request };
}

// ------------------------------------------------------------------------------------------------------ the conversation

// Take the turns from `index` on off the page and out of the conversation.
function cut(index) {
  for (const turn of turns.splice(index)) turn.node.remove();
  clearErrors();
  keep();
}

// The request of an answer as a line for a shell. The key stays out of it.
function curl(turn) {
  const { system, ...rest } = turn.sent, messages = turns.slice(0, turns.indexOf(turn)).map(t => t.message);
  if (system) messages.unshift({ role: "system", content: system });
  const data = JSON.stringify({ ...rest, messages }).replaceAll("'", "'\\''");
  const key = $("key").value.trim() ? ` -H "Authorization: Bearer $KVASIR_API_KEY"` : "";
  return `curl ${location.origin}/v1/chat/completions -H 'Content-Type: application/json'${key} -d '${data}'`;
}

function showUser(turn) {
  const node = turn.node = element("article", "user"), text = element("div", "body", turn.message.content), acts = element("div", "acts");
  acts.append(act("Copy", e => copy(turn.message.content, e.target)), act("Edit", () => edit(turn, text, acts)));
  node.append(text, acts);
  add(node);
}

// A message in a box: sent again, it replaces itself and everything after it.
function edit(turn, text, acts) {
  if (running) return;
  const box = element("textarea"), done = element("div", "acts");
  const back = () => { box.replaceWith(text); done.replaceWith(acts); };
  box.value = turn.message.content;
  box.rows = 3;
  box.setAttribute("aria-label", "Message");
  done.append(act("Cancel", back), act("Send", () => {
    if (running || !box.value.trim()) return;
    cut(turns.indexOf(turn));
    send(box.value);
  }));
  text.replaceWith(box);
  acts.replaceWith(done);
  box.focus();
}

function showTool(turn) {
  turn.node = element("article", "tool", turn.message.content || "(nothing)");
  add(turn.node);
}

function paintAll() {
  $("log").classList.toggle("coloured", Boolean($("tokens-view").value));
  for (const turn of turns) turn.tokens?.paint();
}

// One answer on the page: thinking, content and tool calls, each of which grows.
class Answer {
  constructor() {
    this.node = element("article", "assistant live");
    this.message = { role: "assistant", content: "" };
    this.thought = null;
    this.text = null;
    this.calls = [];
    this.foot = element("div", "foot");
    this.node.append(this.foot);
    this.tokens = new Tokens(this.node, this.foot);
    add(this.node);
  }

  // The turn of a finished answer, with what can be done about it.
  turn(sent, foot) {
    const turn = { message: this.message, foot, sent, node: this.node, tokens: this.tokens }, acts = element("div", "acts");
    this.foot.textContent = foot;
    acts.append(act("Copy", e => copy(this.message.content || "", e.target)), act("Regenerate", () => regenerate(turn)));
    acts.append(act("curl", () => {
      const shown = this.node.querySelector(".curl");
      if (shown) { shown.remove(); return; }
      const line = curl(turn), box = this.node.appendChild(element("div", "curl", line));
      box.append(document.createTextNode(" "), act("Copy", e => copy(line, e.target)));
    }));
    this.node.append(acts);
    return turn;
  }

  take(delta, logprobs, forced) {
    following(() => this.grow(delta, logprobs, forced));
    return Boolean(delta.reasoning_content || delta.content || delta.tool_calls);
  }

  grow(delta, logprobs, forced) {
    if (logprobs?.content) this.tokens.push(logprobs.content, forced);
    if (delta.reasoning_content) this.think(delta.reasoning_content);
    if (delta.content) this.write(delta.content);
    for (const part of delta.tool_calls || []) this.callTool(part);
  }

  think(text) {
    if (!this.thought) {
      const box = element("details", "thought");
      box.open = true;
      box.append(element("summary", "", "Thinking"), element("div", "body"));
      this.thought = new Growing(box.lastChild);
      this.thoughtBox = box;
      this.node.insertBefore(box, this.foot);
    }
    this.thought.append(text);
    this.message.reasoning_content = (this.message.reasoning_content || "") + text;
  }

  write(text) {
    if (!this.text) {
      if (this.thoughtBox) this.thoughtBox.open = false;
      this.text = new Growing(this.node.insertBefore(element("div", "body"), this.foot));
    }
    this.text.append(text);
    this.message.content += text;
  }

  callTool({ index, id, function: part = {} }) {
    let entry = this.calls[index];
    if (!entry) {
      const box = element("div", "call");
      const name = box.appendChild(element("b")), pre = box.appendChild(element("pre"));
      entry = this.calls[index] = { box, name, text: pre.appendChild(new Text()), call: { id, type: "function", function: { name: "", arguments: "" } } };
      this.node.insertBefore(box, this.foot);
    }
    if (part.name) entry.name.textContent = entry.call.function.name += part.name;
    if (part.arguments) { entry.text.appendData(part.arguments); entry.call.function.arguments += part.arguments; }
  }

  // The message as history keeps it; complete calls get a field each for the tool's result.
  finish(reason) {
    this.settle();
    if (reason !== "tool_calls") return this.message;  // half a call is shown, but not sent back
    this.message.tool_calls = this.calls.map(c => c.call);
    if (!this.message.content) this.message.content = null;
    this.askResults();
    return this.message;
  }

  settle() {
    this.node.classList.remove("live");
    this.thought?.finish();
    this.text?.finish();
  }

  askResults() {
    const inputs = this.calls.map(({ box, call }) => {
      const label = element("label", "", "Result"), input = element("input");
      input.setAttribute("aria-label", "Result of " + call.function.name);
      label.append(input);
      box.append(label);
      return input;
    });
    const button = element("button", "", "Send results");
    button.type = "button";
    button.onclick = () => {
      if (running) return;
      button.remove();
      inputs.forEach((input, i) => {
        input.disabled = true;
        turns.push({ message: { role: "tool", tool_call_id: this.calls[i].call.id, content: input.value } });
        showTool(turns.at(-1));
      });
      answer();
    };
    this.node.insertBefore(button, this.foot);
    inputs[0].focus();
  }
}

function busy(controller) {
  running = controller;
  $("send").hidden = Boolean(controller);
  $("stop-button").hidden = !controller;
}

// Returns whether an answer began.
async function answer(extra = {}) {
  const meter = new Meter(), controller = new AbortController(), chat = turns, kept = id;
  let note = "", reply = null, shown = null, reason = null, request = null;
  const clock = setInterval(() => { $("speed").textContent = note || String(meter); }, 200);
  busy(controller);
  $("say").textContent = "The model is answering.";
  try {
    request = body(extra);
    const options = { method: "POST", body: JSON.stringify(request), signal: controller.signal };
    reply = await callWhenReady("v1/chat/completions", options, reason => {
      note = reason && `${reason} Your message is sent when it is ready.`;
      meter.start = performance.now();
    });
    shown = new Answer();
    for await (const data of events(reply)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(sentence(chunk.error.message || "The answer broke off"));
      if (chunk.usage) meter.usage = chunk.usage;
      for (const choice of chunk.choices || []) {
        if (shown.take(choice.delta || {}, choice.logprobs, choice.kvasir?.forced)) meter.tick();
        reason = choice.finish_reason || reason;
      }
    }
    if (!reason) throw new ApiError("The answer broke off.");
    clearErrors();
  } catch (e) {
    if (e.name === "AbortError") reason = "stopped";
    else { reason = "error"; if (e.status === 404) learn(); if (chat === turns) showError(e instanceof ApiError ? e.message : "The answer broke off: " + e.message); }
  } finally {
    clearInterval(clock);
    busy(null);
    if (shown) {
      const { messages: [first], ...sent } = request;
      shown.finish(reason);
      chat.push(shown.turn(first.role === "system" ? { ...sent, system: first.content } : sent, meter.summary(reason)));
      keep(chat, kept);
    }
    $("speed").textContent = "";
    $("say").textContent = reason === "error" ? "" : "The answer is complete.";
    document.body.dataset.state = reason;
    poll();
  }
  return Boolean(shown);
}

async function send(text, extra) {
  if (running || !text.trim()) return;
  const chat = turns, kept = id, turn = { message: { role: "user", content: text } };
  chat.push(turn);
  showUser(turn);
  keep();
  if (await answer(extra)) return;
  // Nothing came of it: the text goes back to where it can be sent again.
  chat.pop();
  turn.node.remove();
  keep(chat, kept);
  if (chat !== turns) return;
  if (!$("prompt").value) { $("prompt").value = text; grow(); }
}

// The same request once more, in place of an answer and everything after it.
function regenerate(turn) {
  if (running) return;
  cut(turns.indexOf(turn));
  answer();
}

// ---------------------------------------------------------------------------------------------------------- what is kept

// Conversations outlive the tab; the open one, the settings and the key end with it.
const FIELDS = ["system", "temperature", "top_p", "top_k", "seed", "max_tokens", "thinking", "stop", "tools", "tokens-view"];
const store = new Conversations(localStorage);
const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
const deleted = new Set();

function keep(chat = turns, kept = id) {
  const plain = chat.map(({ message, foot, sent, tokens }) => ({ message, foot, sent, tokens: tokens?.list.map(({ entry }) => entry) }));
  if (!plain.length || deleted.has(kept)) store.remove(kept);
  else if (!store.save(kept, plain)) $("say").textContent = "There is no room to keep this conversation.";
  sessionStorage.setItem("kvasir-open", id);
  sessionStorage.setItem("kvasir-settings", JSON.stringify(Object.fromEntries(FIELDS.map(name => [name, $(name).value]))));
  listChats();
}

function listChats() {
  $("chats").replaceChildren(...store.list().map(one => {
    const row = element("li", one.id === id ? "open" : ""), open = act(one.title || "(no text)", () => openChat(one.id));
    const remove = act("Delete", () => {
      deleted.add(one.id);
      store.remove(one.id);
      if (one.id === id) newChat(); else listChats();
    });
    remove.setAttribute("aria-label", "Delete " + one.title);
    row.append(open, remove);
    return row;
  }));
}

function newChat() {
  running?.abort();
  turns = [];
  id = newId();
  $("log").replaceChildren($("hello"));
  $("hello").hidden = false;
  keep();
  $("prompt").focus();
}

function openChat(which) {
  running?.abort();
  turns = [];
  id = which;
  $("log").replaceChildren($("hello"));
  const kept = store.turns(id);
  for (const { message, foot, sent, tokens } of kept) {
    const turn = { message };
    if (message.role === "user") showUser(turn);
    else if (message.role === "tool") showTool(turn);
    else Object.assign(turn, restoreAnswer(message, foot, sent, tokens, kept.at(-1).message === message));
    turns.push(turn);
  }
  if (turns.at(-1)?.message.role === "user") {  // its answer was being made
    $("prompt").value = turns.at(-1).message.content;
    cut(turns.length - 1);
    grow();
  }
  $("hello").hidden = turns.length > 0;
  sessionStorage.setItem("kvasir-open", id);
  paintAll();
  listChats();
}

function restore() {
  let settings = {};
  try { settings = JSON.parse(sessionStorage.getItem("kvasir-settings")) || {}; } catch { /* none */ }
  for (const [name, value] of Object.entries(settings)) if (FIELDS.includes(name)) $(name).value = value;
  openChat(sessionStorage.getItem("kvasir-open") || newId());
}

function restoreAnswer(message, foot, sent, tokens, last) {
  const shown = new Answer();
  if (message.reasoning_content) shown.think(message.reasoning_content);
  if (message.content) shown.write(message.content);
  (message.tool_calls || []).forEach((call, index) => shown.callTool({ ...call, index }));
  if (tokens) shown.tokens.push(tokens);
  shown.settle();
  shown.message = message;
  if (message.tool_calls) { shown.calls.forEach((entry, i) => { entry.call = message.tool_calls[i]; }); if (last) shown.askResults(); }
  return shown.turn(sent, foot);
}

// ------------------------------------------------------------------------------------------------------------- the page

let served = null;         // the models, or null before the server has told them

function showModels(models, error) {
  const chosen = $("model").value;
  if (models) $("model").replaceChildren(...models.map(m => new Option(m.id, m.id, false, m.id === chosen)));
  else $("model").replaceChildren(new Option(error.loading ? "loading…" : "–", ""));
  served = models;
  showWelcome();
  const what = models ? "" : error.loading ? error.message + " Messages wait for it." : error.message;
  $("loading").textContent = what;
  $("loading").hidden = !what;
}

// Examples that fit the model, and a word about it if it is the small one of the package.
function showWelcome() {
  const packaged = served?.find(m => m.id === $("model").value)?.packaged;
  $("toy").hidden = !packaged;
  $("examples").replaceChildren(...(served ? packaged ? PACKAGED : GENERAL : []).map(([title, text]) => {
    const button = element("button", "", title);
    button.type = "button";
    button.append(element("small", "", text));
    button.onclick = () => send(text, packaged ? { temperature: 0 } : {});
    return button;
  }));
}

function learn() { return learnModels(showModels); }

function grow() { const box = $("prompt"); box.style.height = "auto"; box.style.height = box.scrollHeight + "px"; }

$("composer").onsubmit = event => {
  event.preventDefault();
  if (running) return;
  const text = $("prompt").value;
  $("prompt").value = "";
  grow();
  send(text);
};
$("prompt").oninput = grow;
$("prompt").onkeydown = event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("composer").requestSubmit(); }
};
$("stop-button").onclick = () => running?.abort();
document.onkeydown = event => { if (event.key === "Escape") { running?.abort(); settings(false); } };
$("clear").onclick = newChat;
function settings(open) {
  document.body.classList.toggle("settings", open);
  $("settings-button").setAttribute("aria-expanded", String(open));
}
$("settings-button").onclick = event => { event.stopPropagation(); settings(!document.body.classList.contains("settings")); };
$("settings-close").onclick = () => { settings(false); $("settings-button").focus(); };
document.querySelector("main").onclick = () => settings(false);
$("key").value = sessionStorage.getItem("kvasir-key") || "";
$("key").onchange = () => { sessionStorage.setItem("kvasir-key", $("key").value.trim()); learn(); poll(); };
$("tokens-view").onchange = paintAll;
for (const name of FIELDS) $(name).addEventListener("change", () => keep());
restore();
$("model").onchange = showWelcome;
onReturn(learn);
window.onstorage = listChats;
globalThis.send = send;  // for tests and the console
document.onvisibilitychange = () => { if (!document.hidden) poll(); };

learn().then(() => {
  const demo = new URLSearchParams(location.search).get("demo");  // ?demo=hello sends one message, for tests and screenshots
  if (demo && !turns.length) send(demo.slice(0, 500));
});
poll();
