/** Small helps with the elements of the page. */

export const byId = (id) => document.getElementById(id);

/** Whether one types on glass, where Enter begins a new line and a focus brings up the keyboard. */
export const isTouch = matchMedia("(pointer: coarse)").matches;

/** An element with properties and children. Strings become text, never HTML. */
export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

export const button = (label, name, onclick) =>
  element("button", { type: "button", ariaLabel: name, title: name, onclick }, label);

export const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

/** A number of bytes, as people write it. */
export function size(bytes) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  const power = bytes < 1000 ? 0 : Math.min(units.length - 1, Math.floor(Math.log10(bytes) / 3));
  return `${(bytes / 1000 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}

/** Says something to readers of screens. */
export const announce = (words) => {
  byId("news").textContent = words;
};

export const tell = (fault) => {
  byId("fault").textContent = fault;
};

/** Puts a text on the clipboard, also where the page came without encryption from another machine. */
export async function copy(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
  } else {
    const area = element("textarea", { value: text, className: "unseen" });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  announce("Copied");
}

/** Saves a text as a file of the person's own. */
export function download(name, type, text) {
  const href = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 1000);
}

/** Whether a person agrees with what cannot be undone. */
export function agrees(question, word) {
  const dialog = byId("confirm");
  byId("question").textContent = question;
  byId("agree").textContent = word;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((done) => {
    dialog.onclose = () => done(dialog.returnValue === "yes");
  });
}
