/** Conversations: trees of turns, as they are shown and as they are kept. */

/** What was said once. Its siblings are its other versions; each has a conversation of its own below it. */
export class Turn {
  /**
   * @param parent The turn before it; null for the root, which says nothing.
   * @param role "user" or "assistant".
   * @param said What it says: `text`, `files` (name and text of each), `reasoning`, and of an answer its
   *   `author`, whether it `isPlain` (a text that goes on, no Markdown), its `usage`, its rate in tokens a
   *   second, its `reasoningSeconds`, its `end` and its `fault`. The end is "writing", "stop" (its own),
   *   "length", "stopped" (by a person), "interrupted" (the page was left) or "fault".
   */
  constructor(parent, role, said = {}) {
    Object.assign(this, {
      text: "",
      reasoning: "",
      files: [],
      author: "",
      isPlain: false,
      end: "",
      fault: "",
    });
    Object.assign(this, { usage: null, rate: null, reasoningSeconds: null, ...said });
    Object.assign(this, { parent, role, children: [], chosen: 0 });
    if (parent) parent.chosen = parent.children.push(this) - 1;
  }

  get next() {
    return this.children[this.chosen];
  }

  /** The turns from the first to this one. */
  get past() {
    return this.parent ? [...this.parent.past, this] : [];
  }

  /** The last turn of the conversation that is shown below this one. */
  get last() {
    return this.next ? this.next.last : this;
  }

  get place() {
    return this.parent.children.indexOf(this);
  }

  get isWriting() {
    return this.end === "writing";
  }

  /** Whether its end is not its own, and there is something to go on with. */
  get isCutOff() {
    const isCut = ["length", "stopped", "interrupted", "fault"].includes(this.end);
    return isCut && Boolean(this.text || this.reasoning);
  }

  /** What it says with its files, as the model reads it. */
  get whole() {
    if (!this.files.length) return this.text;
    const written = this.files.map(({ name, text }) => `${name}:\n\n${fenced(text)}`);
    return [...written, this.text].filter(Boolean).join("\n\n");
  }

  /** Takes it out. What follows it goes on from what was before it, unless it is one of several versions. */
  remove() {
    const { parent, place } = this;
    const kept = parent.children.length > 1 ? [] : this.children;
    kept.forEach((child) => {
      child.parent = parent;
    });
    parent.children.splice(place, 1, ...kept);
    parent.chosen = kept.length ? this.chosen : Math.min(place, Math.max(0, parent.children.length - 1));
  }

  /** Shows the version `step` further on, around the end. */
  walk(step) {
    const count = this.parent.children.length;
    this.parent.chosen = (this.place + step + count) % count;
    return this.parent.next;
  }
}

/** A text between fences that it does not hold itself. */
export function fenced(text) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}

const SAID = {
  text: "string",
  reasoning: "string",
  files: "object",
  author: "string",
  isPlain: "boolean",
  end: "string",
  fault: "string",
  usage: "object",
  rate: "object",
  reasoningSeconds: "object",
};
const USAGE = ["prompt_tokens", "completion_tokens", "total_tokens"];
const FORMAT = "mmfree-conversation-1";

/** A new conversation, which is kept once something was said in it. */
export function newConversation(system = "") {
  return {
    id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`,
    title: "",
    changed: Date.now(),
    model: "",
    system,
    root: new Turn(null, "root"),
  };
}

/** What to call a conversation without a name. */
export function titleOf({ title, root }) {
  const first = root.next;
  const words = (first?.text || first?.files[0]?.name || "").trim().replace(/\s+/g, " ");
  return title || (words.length > 60 ? `${words.slice(0, 59)}…` : words) || "Untitled";
}

/** A conversation as plain data: each turn knows the number of its parent, which stands before it. */
export function packed({ id, title, changed, model, system, root }) {
  const turns = [];
  const add = (turn, parent) => {
    const { role, chosen } = turn;
    const said = Object.fromEntries(Object.keys(SAID).map((name) => [name, turn[name]]));
    const number = turns.push({ parent, role, chosen, ...said }) - 1;
    turn.children.forEach((child) => add(child, number));
  };
  root.children.forEach((child) => add(child, -1));
  return {
    format: FORMAT,
    id,
    title: titleOf({ title, root }),
    named: Boolean(title),
    changed,
    model,
    system,
    chosen: root.chosen,
    turns,
  };
}

/** The conversation of plain data, which may come from a file. Throws where it is none. */
export function unpacked(data) {
  if (data?.format !== FORMAT || !Array.isArray(data.turns))
    throw new Error("it holds no conversation of this page");
  const { title, named, changed, model, system } = data;
  const conversation = {
    ...newConversation(text(system)),
    model: text(model),
    title: named ? text(title) : "",
  };
  if (!Number.isNaN(new Date(number(changed) ?? NaN).getTime())) conversation.changed = changed;
  if (typeof data.id === "string" && data.id) conversation.id = data.id;
  const { root } = conversation;
  const turns = data.turns
    .map((_, number) => number)
    .reduce((made, number) => {
      const given = data.turns[number];
      const parent = given?.parent === -1 ? root : Number.isInteger(given?.parent) && made[given.parent];
      if (!parent || !["user", "assistant"].includes(given.role))
        throw new Error(`its turn ${number + 1} has no position`);
      return [...made, new Turn(parent, given.role, said(given))];
    }, []);
  turns.forEach((turn, number) => {
    turn.chosen = choice(turn, data.turns[number].chosen);
  });
  root.chosen = choice(root, data.chosen);
  return conversation;
}

const text = (value) => (typeof value === "string" ? value : "");
const choice = ({ children }, chosen) =>
  Number.isInteger(chosen) && children[chosen] ? chosen : Math.max(0, children.length - 1);
const number = (value) => (Number.isFinite(value) ? value : null);

/** What a turn says, as far as each value has its own type. */
function said(given) {
  const found = Object.fromEntries(
    Object.entries(SAID)
      .filter(([name, type]) => typeof given[name] === type)
      .map(([name]) => [name, given[name]]),
  );
  found.files = (Array.isArray(given.files) ? given.files : []).map((file) => ({
    name: text(file?.name),
    text: text(file?.text),
  }));
  found.usage = USAGE.every((name) => Number.isFinite(given.usage?.[name])) ? given.usage : null;
  return {
    ...found,
    rate: number(given.rate),
    reasoningSeconds: number(given.reasoningSeconds),
    end: given.end === "writing" ? "interrupted" : text(given.end),
  };
}

/** The versions that are shown, as Markdown. */
export function asMarkdown(conversation) {
  const parts = [`# ${titleOf(conversation)}`];
  if (conversation.system) parts.push("## System prompt", conversation.system);
  for (const turn of conversation.root.last.past) {
    parts.push(`## ${turn.role === "user" ? "You" : turn.author}`);
    if (turn.reasoning) parts.push(turn.reasoning.replace(/^/gm, "> "));
    parts.push(turn.whole);
  }
  return `${parts.join("\n\n")}\n`;
}
