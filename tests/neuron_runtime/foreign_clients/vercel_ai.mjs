// Vercel's AI SDK: generateText and streamText run tools over Responses, its default, and over chats.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, name, part] = process.argv.slice(2);
const openai = createOpenAI({ baseURL, apiKey: "any" });
const compatible = createOpenAICompatible({ name: "local", baseURL });
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

await { tools, stored }[part]();
