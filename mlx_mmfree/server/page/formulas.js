/** Formulas in answers: marked finds them, KaTeX typesets them as MathML once they are complete. */

import { element } from "./elements.js";
import DOMPurify from "./vendor/purify.es.mjs";

const MOST_CHARACTERS = 2000;
const CLASS = "formula-source";
/** No links, no colours from elsewhere; boxes stay small and macros end. */
const LIMITS = { output: "mathml", throwOnError: true, trust: false, strict: "ignore", maxSize: 10, maxExpand: 100 };
const ALLOWED = {
  USE_PROFILES: { mathMl: true },
  FORBID_CONTENTS: ["annotation"],
  FORBID_ATTR: ["href", "style", "class", "id"],
  RETURN_DOM_FRAGMENT: true,
};

// no space within $ and $, and no digit after: "$5 and $10" stays text
const INLINE = [
  /^\$\$(?!\$)((?:\\.|[^\\$`])+?)\$\$/s,
  /^\$(?![\s$])((?:\\.|[^\\$\n`])*?(?:\\.|[^\\$\n`\s]))\$(?![\d$])/,
  /^\\\((.+?)\\\)/s,
  /^\\\[(.+?)\\\]/s,
];
const BLOCK = [/^ {0,3}\$\$((?:\\.|[^\\$`])+?)\$\$[ \t]*(?:\n|$)/s, /^ {0,3}\\\[(.+?)\\\][ \t]*(?:\n|$)/s];

function token(type, patterns) {
  return (text) => {
    const part = text.slice(0, MOST_CHARACTERS);
    const found = patterns.map((pattern) => pattern.exec(part)).find(Boolean);
    return found?.[1].trim() ? { type, raw: found[0], formula: found[1] } : undefined;
  };
}

const escaped = (text) => text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
const source = ({ raw }) => `<code class="${CLASS}">${escaped(raw.trim())}</code>`;

/** What marked knows of formulas. They come as code with their source until they are typeset. */
export const formulaExtensions = [
  {
    name: "formulaBlock",
    level: "block",
    start: (text) => text.match(/(?:^|\n) {0,3}(?:\$\$|\\\[)/)?.index,
    tokenizer: token("formulaBlock", BLOCK),
    renderer: (given) => `<p>${source(given)}</p>`,
  },
  {
    name: "formula",
    level: "inline",
    start: (text) => text.match(/\$|\\[([]/)?.index,
    tokenizer: token("formula", INLINE),
    renderer: source,
  },
];

/** The formula in a text between its signs, and whether it has a line of its own. */
function partsOf(raw) {
  const isWide = /^(?:\$\$|\\\[)/.test(raw);
  const size = raw.startsWith("$") && !isWide ? 1 : 2;
  return { formula: raw.slice(size, -size), isWide };
}

/** Typesets the formulas below an element. One that is broken becomes the text that it was. */
export async function typeset(root) {
  const found = [...root.querySelectorAll(`code.${CLASS}`)];
  if (!found.length) return;
  await import("./vendor/katex.min.js");
  for (const node of found) node.replaceWith(made(node.textContent));
}

function made(raw) {
  const { formula, isWide } = partsOf(raw);
  try {
    const text = self.katex.renderToString(formula, { ...LIMITS, displayMode: isWide });
    const math = DOMPurify.sanitize(text, ALLOWED);
    if (!math.querySelector("math")) return raw;
    const properties = isWide ? { className: "formula wide-formula", tabIndex: 0 } : { className: "formula" };
    return element("span", { ...properties, title: raw }, math);
  } catch {
    return raw;
  }
}
