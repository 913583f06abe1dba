// Small helpers around the page's elements. Text reaches the page as text nodes; only render.js makes HTML of it.

export const $ = id => document.getElementById(id);

export function element(tag, className = "", text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text) node.textContent = text;
  return node;
}

// A small button below a message or beside a name.
export function act(label, what) {
  const button = element("button", "plain", label);
  button.type = "button";
  button.onclick = what;
  return button;
}

export async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // no clipboard outside of localhost and https
    const box = document.body.appendChild(element("textarea"));
    box.value = text;
    box.select();
    document.execCommand("copy");
    box.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = label; }, 1500);
}

// Change the conversation on the page, and stay at its end if it was shown.
export function following(change) {
  const log = $("log"), end = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (end) log.scrollTop = log.scrollHeight;
}

export function add(node) {
  $("hello").hidden = true;
  $("log").append(node);
  $("log").scrollTop = $("log").scrollHeight;
}

export function clearErrors() { document.querySelectorAll("#log > .error").forEach(node => node.remove()); }

// One error at a time: a new one replaces the last.
export function showError(message) {
  clearErrors();
  const node = element("div", "error", message);
  node.setAttribute("role", "alert");
  add(node);
}
