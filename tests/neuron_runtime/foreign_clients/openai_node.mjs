// OpenAI's client for Node: its loop that runs tools, Responses, structured output and pictures, whole and streamed.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [baseURL, model, red, blue, numTokens] = process.argv.slice(2);
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

async function structured() {
  const Report = z.object({ city: z.enum(["Oslo", "Bergen"]), degrees: z.int() });
  const report = { city: "Oslo", degrees: 7 };
  const warm = [{ role: "user", content: "How warm is it in Oslo?" }];
  const chat = { model, messages: warm, response_format: zodResponseFormat(Report, "report") };
  assert.deepEqual((await client.chat.completions.parse(chat)).choices[0].message.parsed, report);
  const whole = await client.chat.completions.stream(chat).finalChatCompletion();
  assert.deepEqual(whole.choices[0].message.parsed, report);
  const response = { model, input: warm, text: { format: zodTextFormat(Report, "report") } };
  assert.deepEqual((await client.responses.parse(response)).output_parsed, report);
  assert.deepEqual((await client.responses.stream(response).finalResponse()).output_parsed, report);
  const tool = zodFunction({ name: "report", parameters: Report });
  const calling = await client.chat.completions.parse({ model, messages: warm, tools: [tool], tool_choice: "required" });
  for (const call of calling.choices[0].message.tool_calls) assert.deepEqual(call.function.parsed_arguments, report);
}

async function pictures() {
  for (const [url, color] of [[red, "red"], [blue, "blue"]]) {
    const parts = [{ type: "text", text: "What color?" }, { type: "image_url", image_url: { url } }];
    const chat = await client.chat.completions.create({ model, messages: [{ role: "user", content: parts }] });
    assert.deepEqual([chat.choices[0].message.content, chat.usage.prompt_tokens], [color, Number(numTokens)]);
    const items = [{ type: "input_text", text: "What color?" }, { type: "input_image", image_url: url, detail: "auto" }];
    const stream = client.responses.stream({ model, input: [{ role: "user", content: items }] });
    const response = await stream.finalResponse();
    assert.deepEqual([response.output_text, response.usage.input_tokens], [color, Number(numTokens)]);
  }
}

for (const part of [tools, responses, structured, pictures]) await part();
