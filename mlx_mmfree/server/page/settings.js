/** The settings: a field for each, what it sends to the server, and how the page looks. */

import { element, byId } from "./elements.js";
import { keepSettings, keptSettings } from "./store.js";

const number = (name, label, hint, limits) => ({ name, label, hint, type: "number", step: "any", ...limits });
const whole = (name, label, hint, limits) => number(name, label, hint, { step: 1, ...limits });
const choice = (name, label, hint, options) => ({ name, label, hint, options });

/** What the server takes, by its names. `isCommon`: shown at once. `chats`: for models that answer alone. */
const FIELDS = [
  whole("max_tokens", "Max tokens", "The limit of one answer",
    { min: 1, isCommon: true }),
  number("temperature", "Temperature", "0 always takes the most likely token",
    { min: 0, max: 2, step: 0.1, isCommon: true }),
  { ...choice("enable_thinking", "Thinking", "Before the answer, for models that can",
    { true: "On", false: "Off" }), chats: true, isCommon: true, read: (text) => text === "true" },
  number("top_p", "Top p", "Samples from the most likely tokens that have this probability together",
    { min: 0.01, max: 1, step: 0.01 }),
  whole("top_k", "Top k", "Samples from this many of the most likely tokens; 0: from all",
    { min: 0, max: 1_000_000 }),
  number("min_p", "Min p", "Drops tokens below this share of the highest probability",
    { min: 0, max: 1, step: 0.01 }),
  number("repetition_penalty", "Repetition penalty", "Above 1, recent tokens come back less often",
    { min: 0.01, max: 10, step: 0.01 }),
  whole("repetition_context_size", "Repetition window", "How many recent tokens that penalty looks at",
    { min: 1, max: 4096 }),
  number("presence_penalty", "Presence penalty", "Above 0, tokens that are there already come back less often",
    { min: -2, max: 2, step: 0.1 }),
  number("frequency_penalty", "Frequency penalty", "The same, by how often they are there already",
    { min: -2, max: 2, step: 0.1 }),
  number("xtc_probability", "XTC probability", "How often all likely tokens but the least likely of them are dropped",
    { min: 0, max: 1, step: 0.01 }),
  number("xtc_threshold", "XTC threshold", "The probability from which a token counts as likely",
    { min: 0, max: 0.5, step: 0.01 }),
  whole("min_tokens_to_keep", "Min tokens to keep", "The fewest tokens that top p, min p and XTC leave",
    { min: 1, max: 1000 }),
  whole("seed", "Seed", "The same seed gives the same answer", {}),
  { name: "stop", label: "Stop at", hint: "Texts that end an answer, separated by commas; \\n is a line break",
    read: stops },
  { name: "logit_bias", label: "Logit bias", hint: "Added to the logits of token ids, as in 13: -5, 42: 1.5",
    read: biases },
  { ...choice("reasoning_effort", "Thinking effort", "For models that know it",
    { low: "Low", medium: "Medium", high: "High" }), chats: true },
  { ...whole("reasoning_budget", "Thinking budget", "Tokens after which the reasoning is ended", { min: 0 }),
    chats: true },
];

function stops(text) {
  return text.split(",").map((part) => part.trim().replaceAll("\\n", "\n")).filter(Boolean);
}

function biases(text) {
  const pairs = text.split(",").filter((part) => part.trim());
  return Object.fromEntries(pairs.map((pair) => {
    const found = /^\s*(\d+)\s*:\s*([-+]?\d+(?:\.\d+)?)\s*$/.exec(pair);
    if (!found) throw new Error("Write pairs of a token id and a number, as in 13: -5, 42: 1.5.");
    return [found[1], Number(found[2])];
  }));
}

const idOf = (name) => name.replaceAll("_", "-");

function input({ name, options, type = "text", min, max, step }) {
  const properties = { id: idOf(name), value: keptSettings()[name] ?? "" };
  if (!options) {
    const limits = Object.entries({ min, max, step }).filter(([, value]) => value !== undefined);
    const looks = { type, autocomplete: "off", placeholder: "Default" };
    return element("input", { ...looks, ...Object.fromEntries(limits), ...properties });
  }
  const choices = [["", "Default"], ...Object.entries(options)];
  const made = choices.map(([value, text]) => element("option", { value }, text));
  const list = element("select", { id: properties.id }, ...made);
  list.value = properties.value;
  return list;
}

/** Makes the fields, with what was kept in them. */
export function buildSettings() {
  const rows = FIELDS.map((field) => {
    const control = input(field);
    control.onchange = () => keepSettings({ [field.name]: control.value });
    control.setAttribute("aria-describedby", `${control.id}-hint`);
    const hint = element("span", { className: "hint", id: `${control.id}-hint` }, field.hint);
    const label = element("label", { htmlFor: control.id }, field.label);
    const row = element("div", { className: "field" }, label, control, hint);
    if (field.chats) row.dataset.chats = "";
    return row;
  });
  const isCommon = (row) => FIELDS[rows.indexOf(row)].isCommon;
  byId("common").replaceChildren(...rows.filter(isCommon));
  byId("more").replaceChildren(...rows.filter((row) => !isCommon(row)));
  const theme = byId("theme");
  theme.value = keptSettings().theme ?? "";
  theme.onchange = () => {
    keepSettings({ theme: theme.value });
    document.documentElement.dataset.theme = theme.value;
  };
  document.documentElement.dataset.theme = theme.value;
}

/** Shows in the empty fields the numbers that the server uses for a model. */
export function showDefaults(defaults = {}) {
  for (const { name, type } of FIELDS) {
    if (type === "number") byId(idOf(name)).placeholder = String(defaults[name] ?? "Default");
  }
}

/** Empties every field, so that the server's numbers count. */
export function resetSettings() {
  keepSettings(Object.fromEntries(FIELDS.map(({ name }) => [name, ""])));
  buildSettings();
}

/** What the fields ask of the server. Throws where one cannot be used. */
export function chosenSettings(chats) {
  const values = {};
  for (const { name, label, type, read = (text) => text, chats: isOfChats } of FIELDS) {
    const control = byId(idOf(name));
    const fault = (reason) => new Error(`Check the setting “${label}”: ${reason}`);
    if (!control.validity.valid) throw fault(control.validationMessage);
    if (!control.value.trim() || (isOfChats && !chats)) continue;
    try {
      values[name] = type === "number" ? control.valueAsNumber : read(control.value);
    } catch (error) {
      throw fault(error.message);
    }
  }
  return values;
}
