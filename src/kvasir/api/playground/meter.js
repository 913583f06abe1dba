// Speed as the client sees it: time to the first token, then tokens a second after it.
export class Meter {
  constructor() { this.start = performance.now(); this.first = this.last = null; this.usage = {}; this.deltas = 0; }
  tick() { this.last = performance.now(); this.first ??= this.last; this.deltas++; }
  toString() {
    const tokens = this.usage.completion_tokens || this.deltas, seconds = (this.last - this.first) / 1000, parts = [];
    if (this.first === null) return `waiting ${((performance.now() - this.start) / 1000).toFixed(1)} s`;
    if (tokens > 1 && seconds > 0) parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    parts.push(`first token ${Math.round(this.first - this.start)} ms`);
    return parts.join(" · ");
  }
  summary(reason) {
    const { prompt_tokens: prompt, completion_tokens: made } = this.usage, parts = [String(this)];
    const cached = this.usage.prompt_tokens_details?.cached_tokens, thought = this.usage.completion_tokens_details?.reasoning_tokens;
    const forced = this.usage.completion_tokens_details?.forced_tokens;
    if (prompt !== undefined) parts.push(`${prompt} prompt tokens` + (cached ? ` (${cached} cached)` : ""));
    if (made !== undefined) parts.push(`${made} made` + (thought ? ` (${thought} thinking)` : "") + (forced ? ` (${forced} forced)` : ""));
    if (reason && reason !== "stop") parts.push({ length: "cut at the limit", tool_calls: "calls tools", stopped: "stopped by you" }[reason] || reason);
    return parts.join(" · ");
  }
}
