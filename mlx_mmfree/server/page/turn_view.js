/** How a turn is shown, edited and pressed. */

import { announce, button, byId, copy, count, element, isTouch } from "./elements.js";
import { MarkdownView } from "./markdown.js";

const ENDS = {
  length: "Stopped at the token limit.",
  stopped: "Stopped.",
  interrupted: "Interrupted: the page was closed or reloaded before the answer was complete.",
};

/** What is said about how an answer has ended; nothing where that goes without saying. */
function endOf({ end, isPlain, text, reasoning, role }) {
  if (role === "user") return "";
  if (end !== "stop") return ENDS[end] ?? "";
  if (isPlain) {
    return text
      ? "The text ends here. Your next message starts a new text."
      : "The model ended the text here without adding to it. Your next message starts a new text.";
  }
  if (text) return "";
  return reasoning ? "The model stopped after its reasoning, without an answer." : "The model gave an empty answer.";
}

function costOf({ usage, rate }) {
  if (!usage) return "";
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const known = cached ? ` (${cached.toLocaleString("en")} cached)` : "";
  const prompt = `Prompt ${count(usage.prompt_tokens, "token")}${known}`;
  const speed = rate ? ` · ${rate.toLocaleString("en", { maximumSignificantDigits: 3 })} tokens/s` : "";
  return `${prompt}, answer ${count(usage.completion_tokens, "token")}${speed}`;
}

function reasoningTitle({ text, isWriting, reasoningSeconds }) {
  if (isWriting && !text) return "Thinking…";
  return reasoningSeconds ? `Thoughts (${reasoningSeconds.toFixed(1)} s)` : "Thoughts";
}

/** The elements of a turn, made once; what changes about it is set each time it is shown. */
export class TurnView {
  /**
   * @param turn The turn.
   * @param actions What its buttons do: `answer(parent)`, `goOn(turn)`, `fork(turn, text)`, `walk(turn, step)`,
   *   `remove(turn)`.
   */
  constructor(turn, actions) {
    Object.assign(this, { turn, actions });
    this.author = element("h2");
    this.words = element("div", { className: "text", dir: "auto" });
    const isAnswer = turn.role === "assistant";
    if (isAnswer) this.words.ariaLive = "polite";
    if (isAnswer && !turn.isPlain) this.markdown = new MarkdownView(this.words);
    else this.words.append("");
    this.words.classList.add(this.markdown ? "markdown" : "plain");
    this.reasoning = element("div", { className: "text plain" }, "");
    this.reasoningTitle = element("summary");
    this.reasoningFrame = element("details", { className: "reasoning" }, this.reasoningTitle, this.reasoning);
    this.end = element("p", { className: "end" });
    this.fault = element("p", { className: "fault" });
    this.cost = element("span", { className: "cost" });
    this.buildBar(isAnswer);
    this.node = element("li", { className: `turn ${turn.role}` }, this.author, ...turn.files.map(fileView));
    this.node.append(this.reasoningFrame, this.words, this.end, this.fault, this.bar);
  }

  buildBar(isAnswer) {
    const { turn, actions } = this;
    this.place = element("span");
    this.versions = element(
      "span",
      { className: "versions", role: "group", ariaLabel: "Versions" },
      button("‹", "Previous version", () => this.walk(-1, 0)),
      this.place,
      button("›", "Next version", () => this.walk(1, 1)),
    );
    this.edits = button("Edit", "Edit this turn", () => this.edit());
    this.continues = button("Continue", "Continue this answer", () => actions.goOn(turn));
    this.continues.className = "continue";
    this.acts = element("span", {}, this.edits);
    if (isAnswer) {
      this.copies = button("Copy", "Copy this answer", () => copy(turn.text));
      this.acts.append(
        this.copies,
        button("Regenerate", "Regenerate this answer", () => actions.answer(turn.parent)),
        this.continues,
      );
    }
    this.acts.append(button("Delete", "Delete this message", () => actions.remove(turn)));
    this.bar = element("div", { className: "bar" }, this.versions, this.acts, this.cost);
  }

  show() {
    const { turn } = this;
    this.author.textContent = turn.role === "user" ? "You" : turn.author;
    if (this.markdown) this.markdown.show(turn.text, !turn.isWriting);
    // the space that joins it to what it continues
    else extend(this.words.firstChild, turn.text.replace(/^ /, ""));
    this.words.hidden = !turn.text && !turn.isWriting;
    // readers of screens wait for the whole answer
    this.words.ariaBusy = String(turn.isWriting);
    extend(this.reasoning.firstChild, turn.reasoning);
    this.reasoningFrame.hidden = !turn.reasoning;
    this.reasoningTitle.textContent = reasoningTitle(turn);
    this.end.textContent = endOf(turn);
    this.fault.textContent = turn.fault;
    this.cost.textContent = costOf(turn);
    this.acts.hidden = turn.isWriting;
    if (this.copies) this.copies.hidden = !turn.text;
    this.continues.hidden = !turn.isCutOff || Boolean(turn.next);
    const versions = turn.parent.children.length;
    this.versions.hidden = versions < 2;
    this.place.textContent = `${turn.place + 1}/${versions}`;
    return this.node;
  }

  /** Shows another version, whose same button has the focus then. */
  walk(step, place) {
    const version = this.actions.walk(this.turn, step);
    version.view.versions.querySelectorAll("button")[place].focus();
    announce(`Version ${version.place + 1} of ${version.parent.children.length}`);
  }

  /** Shows the turn as a text to edit until it is kept or left. */
  edit() {
    const { turn, words, bar } = this;
    const text = element("textarea", { value: turn.text, ariaLabel: "Text of this turn" });
    const form = element(
      "form",
      {},
      text,
      element(
        "div",
        { className: "bar" },
        element("button", { className: "first" }, turn.role === "user" ? "Send" : "Keep"),
        element("button", { type: "button", onclick: () => leave() }, "Cancel"),
      ),
    );
    const leave = () => {
      form.replaceWith(words, this.end, this.fault, bar);
      this.edits.focus();
    };
    form.onsubmit = (event) => {
      event.preventDefault();
      if (!text.value.trim()) return;
      leave();
      this.actions.fork(turn, text.value);
    };
    text.onkeydown = (event) => {
      sendOnEnter(event, form);
      if (event.key !== "Escape") return;
      event.stopPropagation();
      leave();
    };
    for (const each of [this.end, this.fault, bar]) each.remove();
    words.replaceWith(form);
    text.focus();
  }
}

function extend(node, text) {
  if (text.startsWith(node.data)) node.appendData(text.slice(node.length));
  else node.data = text;
}

function fileView({ name, text }) {
  return element(
    "details",
    { className: "file" },
    element("summary", {}, `${name} · ${count(wordCount(text), "word")}`),
    element("pre", { tabIndex: 0 }, text),
  );
}

export const wordCount = (text) => text.match(/\S+/g)?.length ?? 0;

/** Enter sends a form, but where a word is being composed, with Shift, and on a keyboard of glass. */
export function sendOnEnter(event, form) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || isTouch) return;
  event.preventDefault();
  form.requestSubmit();
}

/** Changes what is shown. Who looks at its end stays there, who reads further up is not moved. */
export function keepEnd(change) {
  const main = byId("scroll");
  const isAtEnd = main.scrollHeight - main.scrollTop - main.clientHeight < 60;
  change();
  if (isAtEnd) main.scrollTop = main.scrollHeight;
}
