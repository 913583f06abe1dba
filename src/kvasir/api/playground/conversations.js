// Conversations in the browser's local storage, one entry each, so that tabs do not overwrite each other's. An entry is
// a line with title and time, and a line with the turns. API keys are in none of it.

const PREFIX = "kvasir-chat:";
const MOST = 50;               // conversations
const MOST_CHARACTERS = 3e6;   // of all entries; browsers give 5 million

export class Conversations {
  constructor(storage, now = Date.now) { this.storage = storage; this.now = now; }

  // Newest first: {id, title, time, size}.
  list() {
    const found = [];
    for (let i = 0; i < this.storage.length; i++) {
      const key = this.storage.key(i);
      if (!key.startsWith(PREFIX)) continue;
      const value = this.storage.getItem(key);
      try {
        found.push({ ...JSON.parse(value.slice(0, value.indexOf("\n"))), id: key.slice(PREFIX.length), size: value.length });
      } catch { /* not ours, or torn */ }
    }
    return found.sort((a, b) => b.time - a.time);
  }

  turns(id) {
    const value = this.storage.getItem(PREFIX + id);
    try { return JSON.parse(value.slice(value.indexOf("\n") + 1)); } catch { return []; }
  }

  remove(id) { this.storage.removeItem(PREFIX + id); }

  // Keep a conversation in place of its last state. The oldest others make room, then its tokens are left out.
  // Returns whether there was room.
  save(id, turns) {
    const title = (turns[0]?.message.content || "").trim().slice(0, 60);
    const plain = turns.map(({ tokens, ...rest }) => rest);
    for (const kept of [turns, plain]) {
      const value = JSON.stringify({ title, time: this.now() }) + "\n" + JSON.stringify(kept);
      const others = this.list().filter(one => one.id !== id);
      let size = others.reduce((sum, one) => sum + one.size, value.length);
      if (value.length > MOST_CHARACTERS) continue;
      const drop = () => { const last = others.pop(); size -= last.size; this.remove(last.id); };
      while (others.length >= MOST || size > MOST_CHARACTERS) drop();
      for (;;) {
        try { this.storage.setItem(PREFIX + id, value); return true; } catch { if (!others.length) break; }
        drop();
      }
    }
    return false;
  }
}
