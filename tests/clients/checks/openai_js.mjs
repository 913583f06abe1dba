// OpenAI's JavaScript client. Prints, like run.py, what failed.
import assert from "node:assert/strict";
import OpenAI from "openai";

const url = process.argv[2];
const client = new OpenAI({ baseURL: url + "/v1", apiKey: "none", maxRetries: 0 });
const cat = [{ role: "user", content: "Once upon a time there was a cat" }];
const chat = (more) =>
  client.chat.completions.create({ model: "nano", messages: cat, max_tokens: 8, temperature: 0, ...more });
const weather = {
  type: "function",
  function: {
    name: "weather",
    parameters: {
      type: "object",
      properties: { city: { enum: ["Paris", "Rome"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};

const checks = {
  async check_models() {
    for await (const model of client.models.list()) assert.equal(model.id, "nano");
  },
  async check_chat_streams_the_same_text() {
    let text = "";
    for await (const chunk of await chat({ stream: true })) text += chunk.choices[0]?.delta?.content ?? "";
    assert.equal(text, (await chat()).choices[0].message.content);
  },
  async check_the_stream_helper() {
    const stream = client.chat.completions.stream({ model: "nano", messages: cat, max_tokens: 8, temperature: 0 });
    assert.equal(await stream.finalContent(), (await chat()).choices[0].message.content);
  },
  async check_a_forced_tool() {
    const reply = await chat({ tools: [weather], tool_choice: "required", max_tokens: 64 });
    const call = reply.choices[0].message.tool_calls[0].function;
    assert.ok(["Paris", "Rome"].includes(JSON.parse(call.arguments).city));
  },
  async check_responses() {
    const more = { model: "nano", input: "Once", max_output_tokens: 8, temperature: 0 };
    let text = "";
    for await (const event of await client.responses.create({ ...more, stream: true }))
      if (event.type === "response.output_text.delta") text += event.delta;
    assert.equal(text, (await client.responses.create(more)).output_text);
  },
  async check_errors_name_the_parameter() {
    await assert.rejects(chat({ temperature: -1 }), (e) => e.status === 400 && e.param === "temperature");
  },
  async check_reasoning_effort() {
    await chat({ reasoning_effort: "low" });
  },
};

const results = {};
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    results[name] = null;
  } catch (e) {
    results[name] = String(e.stack ?? e);
  }
}
console.log("RESULTS " + JSON.stringify(results));
