/** Text files that go with the next message. They are read here; only the message takes them to the server. */

import { announce, button, byId, count, element, size, tell } from "./elements.js";
import { wordCount } from "./turn_view.js";

const MOST_BYTES = 1_000_000;
const MOST_WORDS = "about 170,000 words of English";

let files = [];

/** The files so far, which are then no longer there. */
export function takeFiles() {
  const taken = files;
  files = [];
  show();
  return taken;
}

export const hasFiles = () => files.length > 0;

async function read(file) {
  if (file.size > MOST_BYTES) {
    throw new Error(
      `“${file.name}” has ${size(file.size)}. A file may have at most ${size(MOST_BYTES)}, ${MOST_WORDS}.`,
    );
  }
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    text = "\0";
  }
  if (text.includes("\0")) throw new Error(`“${file.name}” is not a UTF-8 text file.`);
  if (!text.trim()) throw new Error(`“${file.name}” is empty.`);
  return { name: file.name, text };
}

async function add(chosen) {
  tell("");
  const results = await Promise.allSettled([...chosen].map(read));
  files.push(...results.flatMap(({ value }) => value ?? []));
  tell(results.flatMap(({ reason }) => reason?.message ?? []).join(" "));
  show();
  announce(`${count(files.length, "file")} attached`);
  byId("message").focus();
}

function show() {
  byId("files").replaceChildren(
    ...files.map((file) =>
      element(
        "li",
        {},
        `${file.name} · ${count(wordCount(file.text), "word")}`,
        button("✕", `Remove ${file.name}`, () => {
          files = files.filter((other) => other !== file);
          show();
          byId("message").focus();
        }),
      ),
    ),
  );
}

/** Takes files that are chosen, dropped on the page, or pasted. */
export function listenForFiles() {
  const chooser = byId("attach-file");
  byId("attach").onclick = () => chooser.click();
  chooser.onchange = async () => {
    await add(chooser.files);
    chooser.value = "";
  };
  const hold = (event) => {
    if (event.dataTransfer?.types.includes("Files")) event.preventDefault();
  };
  document.addEventListener("dragover", hold);
  document.addEventListener("drop", (event) => {
    hold(event);
    if (event.dataTransfer?.files.length) add(event.dataTransfer.files);
  });
  byId("message").addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    add(event.clipboardData.files);
  });
}
