// OpenAI's client for Node: its loop that runs tools, whole and streamed, and Responses.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, model, part] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: "Will it rain in Oslo?" }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };

async function tools() {
  for (const stream of [false, true]) {
    const asked = [];
    const run = (args) => (asked.push(args.city), "rain");
    const weather = { name: "weather", description: "The weather", parameters, parse: JSON.parse, function: run };
    const runner = client.chat.completions.runTools({ model, messages, stream, tools: [{ type: "function", function: weather }] });
    assert.equal(await runner.finalContent(), "It rains.");
    assert.deepEqual(asked, ["Oslo"]);
  }
}

async function responses() {
  const tool = { type: "function", name: "weather", parameters, strict: true };
  const input = [{ role: "user", content: "Will it rain in Oslo?" }];
  const stream = client.responses.stream({ model, input, tools: [tool] });
  const [call] = (await stream.finalResponse()).output;
  assert.deepEqual([call.type, call.name, JSON.parse(call.arguments)], ["function_call", "weather", { city: "Oslo" }]);
  input.push(call, { type: "function_call_output", call_id: call.call_id, output: "rain" });
  assert.equal((await client.responses.create({ model, input, tools: [tool] })).output_text, "It rains.");
}

await { tools, responses }[part]();
