// Vercel's AI SDK: tools, structured output and pictures, whole and streamed, over Responses, its default, and over chats.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, name, red, blue, numTokens] = process.argv.slice(2);
const openai = createOpenAI({ baseURL, apiKey: "any" });
const compatible = createOpenAICompatible({ name: "local", baseURL, supportsStructuredOutputs: true });
const stateless = { openai: { store: false } };

function asking(model, providerOptions) {
  const asked = [];
  const execute = async ({ city }) => (asked.push(city), "rain");
  const weather = tool({ description: "The weather", inputSchema: z.object({ city: z.string() }), execute });
  const prompt = "Will it rain in Oslo?";
  return { asked, model, prompt, tools: { weather }, stopWhen: stepCountIs(3), maxRetries: 0, providerOptions };
}

async function tools() {
  for (const [model, options] of [[openai(name)], [openai(name), stateless], [openai.chat(name)], [compatible(name)]]) {
    const { asked, ...whole } = asking(model, options);
    assert.equal((await generateText(whole)).text, "It rains.");
    const { asked: streamed, ...stream } = asking(model, options);
    const result = streamText(stream);
    assert.equal(await result.text, "It rains.");
    assert.deepEqual([asked, streamed], [["Oslo"], ["Oslo"]]);
  }
}

async function stored() {
  // Without `store: false` a second turn names the text of the first one instead of sending it.
  const messages = [{ role: "user", content: "Will it rain?" }];
  const first = await generateText({ model: openai(name), messages });
  messages.push(...first.response.messages, { role: "user", content: "Really?" });
  const second = { model: openai(name), messages, maxRetries: 0 };
  await assert.rejects(generateText(second), /item_reference.*nothing is stored/);
  assert.equal((await generateText({ ...second, providerOptions: stateless })).text, "It rains.");
}

async function structured() {
  const schema = z.object({ city: z.enum(["Oslo", "Bergen"]), degrees: z.int() });
  const report = { city: "Oslo", degrees: 7 };
  for (const model of [openai(name), openai.chat(name), compatible(name)]) {
    const asked = { model, prompt: "How warm is it in Oslo?", maxRetries: 0 };
    assert.deepEqual((await generateObject({ ...asked, schema })).object, report);
    const stream = streamObject({ ...asked, schema });
    let last;
    for await (const part of stream.partialObjectStream) last = part;
    assert.deepEqual([last, await stream.object], [report, report]);
    assert.deepEqual((await generateText({ ...asked, output: Output.object({ schema }) })).output, report);
    const city = await generateObject({ ...asked, output: "enum", enum: ["Oslo", "Bergen"] });
    assert.ok(["Oslo", "Bergen"].includes(city.object), city.object);
    const loose = await generateObject({ ...asked, output: "no-schema" });
    assert.deepEqual(loose.object, { city: "Oslo in Norway", degrees: "7 C" });
  }
}

async function pictures() {
  for (const model of [openai(name), openai.chat(name), compatible(name)]) {
    for (const [image, color] of [[red, "red"], [blue, "blue"]]) {
      const content = [{ type: "text", text: "What color?" }, { type: "image", image }];
      const asked = { model, messages: [{ role: "user", content }], maxRetries: 0 };
      const { text, usage } = await generateText(asked);
      assert.deepEqual([text, usage.inputTokens], [color, Number(numTokens)]);
      assert.equal(await streamText(asked).text, color);
    }
  }
  // A tool that returns a picture.
  const value = [{ type: "image-data", data: blue.split(",")[1], mediaType: "image/png" }];
  const shows = { inputSchema: z.object({ city: z.string() }), execute: async () => "", toModelOutput: () => ({ type: "content", value }) };
  const asked = { prompt: "What color?", tools: { weather: tool(shows) }, stopWhen: stepCountIs(3), maxRetries: 0 };
  assert.equal((await generateText({ ...asked, model: openai(name), providerOptions: stateless })).text, "blue");
}

for (const part of [tools, stored, structured, pictures]) await part();
