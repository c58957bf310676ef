/** Colours of code: highlight.js finds the words of a language, DOMPurify lets pass what it marks. */

import DOMPurify from "./vendor/purify.es.mjs";

const MOST_CHARACTERS = 20_000;
const ALLOWED = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };

/** The language of a block of code, as its fence names it. */
export const languageOf = (code) => /(?:^| )language-([\w+#-]+)/.exec(code?.className ?? "")?.[1];

/** Colours the blocks of code below an element whose language is known. The text stays as it is. */
export async function highlight(root) {
  const found = [...root.querySelectorAll("pre > code")].filter(
    (code) => languageOf(code) && code.textContent.length <= MOST_CHARACTERS,
  );
  if (!found.length) return;
  const { default: library } = await import("./vendor/highlight.min.js");
  for (const code of found) {
    const language = languageOf(code);
    const text = code.textContent;
    if (!library.getLanguage(language)) continue;
    const marks = DOMPurify.sanitize(library.highlight(text, { language, ignoreIllegals: true }).value, ALLOWED);
    if (marks.textContent === text) code.replaceChildren(marks);
  }
}
