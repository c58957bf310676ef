/** The page: the conversation that is shown, and what is pressed. */

import { hasFiles, listenForFiles, takeFiles } from "./attachments.js";
import { agrees, announce, byId, count, element, isTouch, size, tell } from "./elements.js";
import { List } from "./list.js";
import { ask, events, requestFor, useKey, wordsOf } from "./server.js";
import { buildSettings, chosenSettings, resetSettings, showDefaults } from "./settings.js";
import { keepInHaste, keepSettings, keptSettings, onChange, rescue } from "./store.js";
import { keepEnd, sendOnEnter, TurnView } from "./turn_view.js";
import { newConversation, Turn, unpacked } from "./turns.js";

const SHOWN = "mmfree-shown";
const KEEP_EVERY_MS = 400;
/** The shortest time that tells how fast a model writes. */
const SHORTEST_MS = 100;

let models = [];
let conversation = newConversation(keptSettings().system);
/** Conversations in which an answer is being written, by their ids: each with its turn and AbortController. */
const underWay = new Map();

const model = () => models.find(({ id }) => id === byId("model").value) ?? {};
const chats = () => model().chat_template !== false;
const writing = () => underWay.get(conversation.id);

// ---------------------------------------------------------------- models

async function loadModels() {
  const { data } = await (await ask("v1/models")).json();
  models = data.filter(({ kind }) => kind !== "embedding");
  byId("model").replaceChildren(...models.map(({ id }) => element("option", { value: id }, id)));
  choose(conversation.model || keptSettings().model);
  byId("send").disabled = models.length === 0;
  byId("key-form").hidden = true;
  tell(models.length ? "" : "This server has no model that writes texts.");
  showKind();
}

/** Chooses a model, if the server has it. */
function choose(name) {
  if (models.some(({ id }) => id === name)) byId("model").value = name;
}

function showKind() {
  const { context_length: context, loaded = true } = model();
  byId("kind").textContent = chats() ? "Ask the model something" : "This model continues texts";
  const about = chats()
    ? ""
    : "It is a base model, not trained to answer questions: start a text, and it continues it. ";
  const room = context ? `Context: ${count(context, "token")}. ` : "";
  byId("about-model").textContent =
    `${about}${room}${loaded ? "" : "It loads with your first message."}`;
  byId("system-field").hidden = !chats();
  for (const row of document.querySelectorAll("#settings [data-chats]")) row.hidden = !chats();
  showDefaults(model().defaults);
  showRoom();
  showControls();
}

/** Shows how much of the context the conversation fills, as the last answer says. */
function showRoom() {
  const { context_length: context } = model();
  const { usage } = conversation.root.last.past.findLast(({ usage }) => usage) ?? {};
  const taken = usage?.total_tokens;
  byId("room").hidden = !context || !taken;
  if (byId("room").hidden) return;
  const words = `${count(taken, "token")} of ${context.toLocaleString("en")}`;
  Object.assign(byId("room-meter"), { max: context, high: 0.8 * context, value: taken, title: words });
  byId("room-words").textContent = words;
}

/** Shows what the server keeps of texts, which is not worth an error where it cannot be had. */
async function showKept() {
  const health = await ask("health").then((response) => response.json()).catch(() => ({}));
  const { states, bytes } = health.sessions ?? {};
  const kept = health.sessions && `The server caches ${count(states, "state")} of texts (${size(bytes)})`;
  byId("kept").textContent = kept ? `${kept}, and does not read these texts again.` : "";
}

// ---------------------------------------------------------------- answers

/** Writes a new answer below a turn. */
function answer(parent) {
  stop();
  write(new Turn(parent, "assistant", { author: byId("model").value, isPlain: !chats() }), parent.past);
  byId("scroll").scrollTop = byId("scroll").scrollHeight;
}

/** Goes on with an answer that was cut off. */
function goOn(turn) {
  stop();
  if (turn.isPlain !== !chats()) {
    tell(`“${turn.author}” wrote this. Choose a model of the same kind to continue it.`);
    return;
  }
  write(turn, turn.past);
  byId("message").focus();
}

async function write(turn, past) {
  const own = { turn, conversation, controller: new AbortController() };
  underWay.set(own.conversation.id, own);
  own.conversation.model = byId("model").value;
  tell("");
  try {
    const body = { model: byId("model").value, chats: chats(), system: own.conversation.system };
    const [path, request] = requestFor(past, { ...body, settings: chosenSettings(chats()) });
    Object.assign(turn, { end: "writing", fault: "" });
    show();
    await stream(own, path, request);
  } catch (error) {
    const wasStopped = own.controller.signal.aborted;
    Object.assign(turn, { end: wasStopped ? "stopped" : "fault", fault: wasStopped ? "" : error.message });
  } finally {
    if (underWay.get(own.conversation.id) === own) underWay.delete(own.conversation.id);
    show();
    const { usage } = turn;
    announce(
      turn.fault || (usage ? `Answer of ${count(usage.completion_tokens, "token")}` : "The answer has ended"),
    );
    await save(own.conversation);
  }
}

async function stream({ turn, conversation: own, controller }, path, request) {
  const written = turn.usage?.completion_tokens ?? 0;
  // the server may need long before it answers
  await save(own);
  const response = await ask(path, {
    method: "POST",
    body: JSON.stringify(request),
    signal: controller.signal,
  });
  const begun = performance.now();
  let [first, saved, end] = [null, begun, ""];
  for await (const { choices, usage, error } of events(response)) {
    if (error) throw new Error(wordsOf(error.message));
    const [choice] = choices ?? [];
    const text = choice?.delta?.content ?? choice?.text ?? "";
    const reasoning = choice?.delta?.reasoning_content ?? "";
    const now = performance.now();
    if (text && turn.reasoning && !turn.text) turn.reasoningSeconds = (now - begun) / 1000;
    turn.text += text;
    turn.reasoning += reasoning;
    end = choice?.finish_reason ?? end;
    if (usage) {
      first ??= { now, tokens: usage.completion_tokens };
      const passed = now - first.now;
      if (passed > SHORTEST_MS) turn.rate = (1000 * (usage.completion_tokens - first.tokens)) / passed;
      turn.usage = { ...usage, completion_tokens: written + usage.completion_tokens };
    }
    showSoon(turn);
    if (now - saved > KEEP_EVERY_MS) {
      saved = now;
      save(own);
    }
  }
  turn.end = end === "length" ? "length" : "stop";
}

function stop() {
  writing()?.controller.abort();
}

async function save(changed) {
  if (changed.isGone) return;
  changed.changed = Date.now();
  await list
    .keep(changed)
    .catch(() =>
      tell("The browser could not save this conversation: its storage is full or switched off."),
    );
}

function send() {
  const { value } = byId("message");
  const { last } = conversation.root;
  if (value.trim() || hasFiles()) {
    byId("message").value = "";
    answer(new Turn(last, "user", { text: value, files: takeFiles() }));
  } else if (last.isCutOff) {
    goOn(last);
  } else if (last.isPlain) {
    announce("The text has ended. Write something to start another one.");
  }
}

/** Makes another version of a turn: a person's words get another answer, the model's are taken as its own. */
function fork(turn, text) {
  const { role, files, isPlain } = turn;
  const version = new Turn(turn.parent, role, { text, files, isPlain });
  if (role === "user") {
    answer(version);
  } else {
    version.author = `${turn.author.replace(/, edited$/, "")}, edited`;
    show();
    save(conversation);
  }
}

function walk(turn, step) {
  const version = turn.walk(step);
  show();
  save(conversation);
  return version;
}

/** Deletes a message, if the person agrees. What follows it stays, unless it has other versions. */
async function remove(turn) {
  const isVersion = turn.parent.children.length > 1;
  const question = isVersion ? "Delete this version and what follows it?" : "Delete this message?";
  if (!(await agrees(question, "Delete"))) return;
  if (writing()) {
    stop();
    tell("An answer was being written. Delete the message again.");
    return;
  }
  turn.remove();
  show();
  announce("Message deleted");
  save(conversation);
}

// ---------------------------------------------------------------- conversations

const list = new List({
  current: () => conversation.id,
  open: (id) => open(id),
  fresh: () => enter(newConversation(keptSettings().system)),
  gone: (id) => {
    for (const [other, { controller, conversation: gone }] of underWay) {
      if (id !== null && other !== id) continue;
      gone.isGone = true;
      controller.abort();
    }
    if (id === null || id === conversation.id) enter(newConversation(keptSettings().system));
  },
  renamed: (id, title) => {
    const named =
      id === conversation.id
        ? conversation
        : (underWay.get(id)?.conversation ?? unpacked(list.entries.get(id)));
    named.title = title;
    save(named);
  },
});

function open(id) {
  enter(underWay.get(id)?.conversation ?? unpacked(list.entries.get(id)));
}

function enter(entered) {
  conversation = entered;
  sessionStorage.setItem(SHOWN, entered.id);
  byId("system").value = entered.system;
  choose(entered.model);
  tell("");
  showKind();
  show();
  byId("scroll").scrollTop = byId("scroll").scrollHeight;
  if (!isTouch) byId("message").focus();
}

// ---------------------------------------------------------------- what is shown

const viewOf = (turn) => (turn.view ??= new TurnView(turn, { answer, goOn, fork, walk, remove })).show();

/** Shows the conversation that the chosen versions make. */
function show() {
  const turns = byId("turns");
  const hadFocus = turns.contains(document.activeElement);
  keepEnd(() => {
    const shown = conversation.root.last.past.map(viewOf);
    byId("intro").hidden = shown.length > 0;
    let same = 0;
    while (same < turns.children.length && turns.children[same] === shown[same]) same += 1;
    while (turns.children.length > same) turns.lastChild.remove();
    turns.append(...shown.slice(same));
  });
  if (hadFocus && !turns.contains(document.activeElement) && !isTouch) byId("message").focus();
  showControls();
  list.show();
}

function showControls() {
  byId("send").textContent = writing() ? "Stop" : "Send";
  byId("message").placeholder = invitation(conversation.root.last);
  showRoom();
}

/** What may be written after a turn. */
function invitation(last) {
  if (last.isCutOff && !writing()) return isTouch ? "Send: continue" : "Enter: continue the answer";
  if (chats()) return "Message";
  if (!last.parent) return "Start a text";
  return last.end === "stop" ? "Start another text" : "Add to the text";
}

/** Shows what a turn has become at the next frame: a fast model writes many pieces in one. */
function showSoon(turn) {
  turn.frame ||= requestAnimationFrame(() => {
    turn.frame = 0;
    keepEnd(() => viewOf(turn));
  });
}

/** Shows the button to the end where the end is out of sight. */
function showToEnd() {
  const { scrollHeight, scrollTop, clientHeight } = byId("scroll");
  byId("to-end").hidden = scrollHeight - scrollTop - clientHeight < clientHeight / 2;
}

// ---------------------------------------------------------------- what is pressed

byId("scroll").onscroll = showToEnd;
new ResizeObserver(showToEnd).observe(byId("turns"));
byId("to-end").onclick = () => {
  byId("scroll").scrollTop = byId("scroll").scrollHeight;
  byId("message").focus();
};

byId("message-form").onsubmit = (event) => {
  event.preventDefault();
  if (writing()) stop();
  else if (!byId("send").disabled) send();
};
byId("message").onkeydown = (event) => {
  // what is typed while an answer is written waits for its end
  if (writing() && event.key === "Enter" && !event.shiftKey) event.preventDefault();
  else sendOnEnter(event, byId("message-form"));
};
document.onkeydown = (event) => {
  if (event.key === "Escape" && document.body.classList.contains("listing")) {
    list.slide(false);
  } else if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    stop();
  } else if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    list.slide(true);
    byId("search").focus();
  }
};
byId("model").onchange = () => {
  keepSettings({ model: byId("model").value });
  showKind();
};
byId("open-settings").onclick = () => {
  byId("settings").showModal();
  showKept();
};
byId("system").onchange = () => {
  const { value } = byId("system");
  conversation.system = value;
  keepSettings({ system: value });
  if (conversation.root.next) save(conversation);
};
byId("reset").onclick = () => {
  resetSettings();
  showKind();
  announce("Settings reset");
};
byId("key-form").onsubmit = (event) => {
  event.preventDefault();
  useKey(byId("key").value);
  byId("key").value = "";
  start();
};
// a database takes too long when the page is left
addEventListener("pagehide", () => underWay.forEach(({ turn }, id) => keepInHaste(id, turn)));
let changes = 0;
onChange(() => {
  clearTimeout(changes);
  changes = setTimeout(followOtherTabs, 300);
});

/** Shows what other tabs have made of the conversations, but of those that are written here. */
async function followOtherTabs() {
  const wasKept = list.entries.has(conversation.id);
  await list.load();
  const data = list.entries.get(conversation.id);
  if (writing() || !wasKept) return;
  if (!data) return enter(newConversation(keptSettings().system));
  if (data.changed === conversation.changed) return;
  conversation = unpacked(data);
  show();
}

const start = () => loadModels().catch(({ message }) => tell(message));
buildSettings();
listenForFiles();
byId("system").value = conversation.system;
await rescue().catch(() => {});
await list
  .load()
  .catch(() => tell("The browser’s storage is switched off: conversations are lost when you close the page."));
if (list.entries.has(sessionStorage.getItem(SHOWN))) open(sessionStorage.getItem(SHOWN));
else sessionStorage.setItem(SHOWN, conversation.id);
start();
if (!isTouch) byId("message").focus();
