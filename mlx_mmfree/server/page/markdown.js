/** Answers in Markdown as elements. marked reads them, DOMPurify lets pass what is listed here. */

import { button, copy, element } from "./elements.js";
import { formulaExtensions, typeset } from "./formulas.js";
import { highlight, languageOf } from "./highlighting.js";
import { Marked } from "./vendor/marked.esm.js";
import DOMPurify from "./vendor/purify.es.mjs";

const escaped = (text) => text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);

// the time that marked takes for a paragraph grows with the square of these
const MOST_CHARACTERS = 5000;
const MOST_MARKS = 200;
let counted = { text: "", marks: 0 };

/** A text as it was written, line by line. */
const plain = (text) => ({
  type: "text",
  raw: text,
  text,
  tokens: text.split("\n").flatMap((line, n) => [
    ...(n ? [{ type: "br", raw: "\n" }] : []),
    { type: "text", raw: line, text: line, escaped: false },
  ]),
});

const marked = new Marked({
  gfm: true,
  breaks: true,
  extensions: formulaExtensions,
  renderer: {
    // markup in an answer is shown as it was written, and a picture is a link to it
    html: ({ text, block }) => (block ? `<p class="markup">${escaped(text.trim())}</p>` : escaped(text)),
    // what follows a <script> or <pre> within a line would be markup; false leaves the rest to marked
    text(token) {
      token.escaped = false;
      return false;
    },
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
  },
  tokenizer: {
    // the first rule that is tried; false leaves it to marked
    escape: (text) => (text.length > MOST_CHARACTERS ? plain(text) : false),
    // of too many runs of * and _, none is emphasis
    emStrong(_, text) {
      if (counted.text !== text) counted = { text, marks: text.match(/[*_]+/g)?.length ?? 0 };
      return counted.marks > MOST_MARKS ? undefined : false;
    },
  },
});

const ALLOWED = {
  ALLOWED_TAGS: [
    "p",
    "br",
    "hr",
    "strong",
    "em",
    "del",
    "code",
    "pre",
    "blockquote",
    "a",
    "ul",
    "ol",
    "li",
    "input",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
  ],
  ALLOWED_ATTR: ["href", "title", "start", "align", "class", "type", "checked", "disabled"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  // the form of an address is asked of addresses alone
  ADD_URI_SAFE_ATTR: ["align", "start", "type", "checked", "disabled"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** Markdown in an element, of which only the blocks that change are made anew. */
export class MarkdownView {
  constructor(node) {
    Object.assign(this, { node, blocks: [] });
  }

  /** Shows a text. Formulas and code of the last block wait until it `isWhole`. */
  show(text, isWhole = true) {
    try {
      this.showBlocks(text);
      for (const block of isWhole ? this.blocks : this.blocks.slice(0, -1)) settle(block);
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      // what is nested too deeply for marked is shown as it was written
      const whole = element("p", { className: "markup" }, text);
      this.node.replaceChildren(whole);
      this.blocks = [{ raw: null, nodes: [whole] }];
    }
  }

  showBlocks(text) {
    const tokens = marked.lexer(text);
    const links = JSON.stringify(tokens.links);
    const blocks = tokens.filter(({ type }) => type !== "space" && type !== "def");
    let same = links === this.links ? 0 : -1;
    while (same >= 0 && blocks[same] && blocks[same].raw === this.blocks[same]?.raw) same += 1;
    same = Math.max(0, same);
    this.blocks.splice(same).forEach(({ nodes }) => nodes.forEach((node) => node.remove()));
    for (const token of blocks.slice(same)) {
      const nodes = [...made(token).childNodes];
      this.node.append(...nodes);
      this.blocks.push({ raw: token.raw, nodes });
    }
    this.links = links;
  }
}

/** Typesets formulas and colours code of a block, once. What cannot be loaded leaves them as they are. */
function settle(block) {
  if (block.isSettled) return;
  block.isSettled = true;
  for (const node of block.nodes.filter(({ nodeType }) => nodeType === Node.ELEMENT_NODE)) {
    typeset(node).catch(() => {});
    highlight(node).catch(() => {});
  }
}

function made(token) {
  const fragment = DOMPurify.sanitize(marked.parser([token]), ALLOWED);
  for (const link of fragment.querySelectorAll("a"))
    Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const box of fragment.querySelectorAll("input"))
    Object.assign(box, { type: "checkbox", disabled: true });
  for (const table of fragment.querySelectorAll("table")) {
    const frame = element("div", {
      className: "wide-table",
      tabIndex: 0,
      role: "region",
      ariaLabel: "Table",
    });
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const pre of fragment.querySelectorAll("pre")) frameCode(pre);
  return fragment;
}

/** Puts the language and a button that copies above a block of code. */
function frameCode(pre) {
  const language = languageOf(pre.firstElementChild) ?? "text";
  const press = button("Copy", "Copy this code", async () => {
    await copy(pre.textContent);
    press.textContent = "Copied";
    setTimeout(() => {
      press.textContent = "Copy";
    }, 1500);
  });
  const bar = element("div", { className: "code-bar" }, element("span", {}, language), press);
  const frame = element("div", { className: "code" }, bar);
  Object.assign(pre, { tabIndex: 0 });
  pre.replaceWith(frame);
  frame.append(pre);
}
