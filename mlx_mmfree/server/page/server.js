/** The server: how it is asked, and what it streams. */

import { byId } from "./elements.js";

const KEY = "mmfree-api-key";
const REFUSALS = {
  401: "The server asks for an API key.",
  403: "The server does not allow this.",
  404: "The server did not find this.",
  413: "The text is too long for this server.",
  429: "The server is busy. Try again in a moment.",
  503: "The server is not ready. Try again in a moment.",
};

/** Keeps the API key until the tab is closed. */
export const useKey = (key) => sessionStorage.setItem(KEY, key);

/** Asks the server. Throws what is wrong in plain words. */
export async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (options.body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  const message = wordsOf((await response.json().catch(() => null))?.error?.message ?? "");
  if (response.status === 401) {
    byId("key-form").hidden = false;
    byId("key").focus();
  }
  throw new Error(`${REFUSALS[response.status] ?? "The server could not do this."} ${message}`.trim());
}

/** A message of the server as a sentence, without the name of its part. */
export function wordsOf(message) {
  const words = message.replace(/^\[\w+\] /, "");
  return words.charAt(0).toUpperCase() + words.slice(1);
}

/** The objects of a stream of server-sent events, up to its end. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { done: true };
    });
    if (done) throw new Error("The connection ended before the answer did.");
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

/** The path and body of the request for what follows some turns, or goes on with the last of them. */
export function requestFor(turns, { model, chats, system, settings }) {
  const common = {
    model,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    ...settings,
  };
  if (!chats) return ["v1/completions", { ...common, prompt: textSoFar(turns) }];
  const messages = [];
  for (const { role, whole: content, reasoning } of [{ role: "system", whole: system.trim() }, ...turns]) {
    // a version without text, such as an answer that failed, says nothing
    if (!content && !reasoning) continue;
    const last = messages.at(-1);
    if (last?.role === role) last.content += `\n\n${content}`;
    else messages.push({ role, content, ...(reasoning ? { reasoning_content: reasoning } : {}) });
  }
  if (turns.at(-1).role === "assistant") common.continue_final_message = true;
  return ["v1/chat/completions", { ...common, messages }];
}

/** What a model that continues texts reads: all since the last text that came to its end. */
function textSoFar(turns) {
  const end = turns.findLastIndex((turn) => turn.role === "assistant" && turn.end === "stop");
  return turns.slice(end + 1).reduce((before, turn) => {
    // the model brings its own spaces; people need not think of them
    const words = turn.files
      .map(({ text }) => text)
      .concat(turn.text)
      .filter(Boolean)
      .join("\n\n");
    const isJoined = turn.role !== "user" || !before || /\s$/.test(before) || /^\s/.test(words);
    return before + (isJoined ? "" : " ") + words;
  }, "");
}
