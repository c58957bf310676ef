// Holds the conversation of models.py through each provider of the AI SDK. Takes the server's address, the
// models' names and the texts as JSON, and prints what was seen of each conversation as a line of JSON.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, jsonSchema, streamText, tool } from "ai";

const { url, models, texts } = JSON.parse(process.argv[2]);
const settings = { baseURL: `${url}/v1`, apiKey: "none" };
const openai = createOpenAI(settings);
const compatible = createOpenAICompatible({ ...settings, name: "mmfree" });
const providers = {
  responses: openai,
  chat: openai.chat,
  compatible,
  anthropic: createAnthropic(settings),
};

function tools(calls) {
  const look_up = tool({
    description: texts.description,
    inputSchema: jsonSchema(texts.parameters),
    execute: ({ word }) => {
      calls.push(["look_up", { word }]);
      return word;
    },
    toModelOutput: ({ output: word }) => {
      const text = { type: "text", text: texts.words[word] };
      const data = { type: "data", data: texts.picture };
      const picture = { type: "file", mediaType: "image/png", data };
      return { type: "content", value: word === "owl" ? [text, picture] : [text] };
    },
  });
  return { look_up };
}

function begun() {
  const call = { toolCallId: "call_0", toolName: "look_up" };
  const output = { type: "error-text", value: texts.refused };
  return [
    { role: "user", content: texts.first },
    { role: "assistant", content: [{ type: "tool-call", ...call, input: texts.broken }] },
    { role: "tool", content: [{ type: "tool-result", ...call, output }] },
    { role: "assistant", content: texts.again },
    { role: "user", content: texts.later },
  ];
}

async function hold(model, streams) {
  const seen = { texts: [], calls: [], reasoning: "" };
  const messages = begun();
  for (const question of [null, texts.animals]) {
    if (question) messages.push({ role: "user", content: question });
    const options = { model, system: texts.system, messages, tools: tools(seen.calls) };
    Object.assign(options, { stopWhen: isStepCount(5), maxRetries: 0, maxOutputTokens: 500 });
    let failure;
    const found = streams
      ? streamText({ ...options, onError: ({ error }) => { failure = error; } })
      : await generateText(options);
    if (streams) {
      await found.consumeStream();
      if (failure) throw failure;
    }
    const steps = await found.steps;
    seen.reasoning += steps.filter((step) => step.toolCalls.length).map((step) => step.reasoningText ?? "").join("");
    seen.texts.push(await found.text);
    messages.push(...(await found.response).messages);
  }
  return seen;
}

for (const [provider, make] of Object.entries(providers)) {
  for (const name of models) {
    for (const streams of [false, true]) {
      let seen;
      try {
        seen = await hold(make(name), streams);
      } catch (error) {
        seen = { error: `${error.message} ${error.responseBody ?? ""}` };
      }
      console.log(JSON.stringify({ key: [provider, name, streams], seen }));
    }
  }
}
