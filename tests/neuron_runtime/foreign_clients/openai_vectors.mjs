// OpenAI's client for Node: vectors, which it asks for in base64, and as numbers.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, model, question, right, wrong] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "any", maxRetries: 0 });
const dot = (one, other) => one.reduce((sum, number, at) => sum + number * other[at], 0);

const input = [question, right, wrong];
const { data, usage } = await client.embeddings.create({ model, input });
const [asked, good, bad] = data.map(({ embedding }) => embedding);
assert.ok(dot(asked, good) > dot(asked, bad));
assert.ok(usage.prompt_tokens > 3);
const plain = await client.embeddings.create({ model, input: right, encoding_format: "float" });
assert.ok(dot(plain.data[0].embedding, good) > 0.9999);
