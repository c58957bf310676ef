/** The list of kept conversations: search, rename, export, import, delete. */

import { agrees, announce, button, byId, count, download, element, tell } from "./elements.js";
import { forget, forgetAll, keep, kept } from "./store.js";
import { asMarkdown, newConversation, packed, titleOf, unpacked } from "./turns.js";

const MOST_IMPORTED_BYTES = 100_000_000;
const narrow = matchMedia("(max-width: 48rem)");

/** The list beside the conversation. */
export class List {
  /**
   * @param actions What it asks of the page: `open(id)`, `fresh()`, `gone(id)` once one was deleted (null:
   *   all), `renamed(id, title)`, and `current()`, the id of what is shown.
   */
  constructor(actions) {
    Object.assign(this, { actions, entries: new Map(), target: null, drawn: "" });
    byId("fresh").onclick = () => this.leave(actions.fresh);
    byId("search").oninput = () => this.show();
    byId("open-list").onclick = () => this.slide(true);
    byId("close-list").onclick = () => this.slide(false);
    byId("export-all").onclick = () => this.exportAll();
    byId("delete-all").onclick = () => this.deleteAll();
    byId("import").onclick = () => byId("import-file").click();
    byId("import-file").onchange = ({ target }) => this.import(target);
    byId("rename").onclick = () => this.act(this.rename);
    byId("export-markdown").onclick = () => this.act((id) => this.export(id, "md"));
    byId("export-json").onclick = () => this.act((id) => this.export(id, "json"));
    byId("delete").onclick = () => this.act(this.delete);
    narrow.onchange = () => this.slide(false);
    this.slide(false);
  }

  async load() {
    this.entries = new Map((await kept()).flatMap(whole).map((data) => [data.id, data]));
    this.show();
  }

  /** Keeps a conversation, and shows it first. */
  async keep(conversation) {
    const data = packed(conversation);
    this.entries.delete(data.id);
    this.entries = new Map([[data.id, data], ...this.entries]);
    this.show();
    await keep(data);
  }

  /** Shows the conversations in which all words of the search stand. */
  show() {
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = [...this.entries.values()].filter((data) => has(data, words));
    byId("list-note").textContent = words.length
      ? `${found.length} of ${count(this.entries.size, "conversation")}`
      : this.entries.size
        ? ""
        : "No conversations yet.";
    const current = this.actions.current();
    const drawn = JSON.stringify([current, found.map(({ id, title }) => [id, title])]);
    // what has not changed keeps its focus
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    byId("list").replaceChildren(
      ...found.map(({ id, title, changed }) => this.item(id, title, changed, id === current)),
    );
    for (const name of ["export-all", "delete-all"]) byId(name).disabled = !this.entries.size;
  }

  item(id, title, changed, isCurrent) {
    const open = element(
      "button",
      { type: "button", className: "open", onclick: () => this.leave(() => this.actions.open(id)) },
      element("span", { className: "title" }, title),
      element("time", { dateTime: new Date(changed).toISOString() }, dayOf(changed)),
    );
    if (isCurrent) open.setAttribute("aria-current", "true");
    const more = button("⋯", `More for “${title}”`, () => this.openMenu(id, more));
    more.setAttribute("aria-haspopup", "true");
    const item = element("li", {}, open, more);
    item.dataset.id = id;
    return item;
  }

  itemOf(id) {
    return [...byId("list").children].find((item) => item.dataset.id === id);
  }

  openMenu(id, near) {
    const menu = byId("menu");
    this.target = id;
    menu.showPopover();
    const { bottom, right, top } = near.getBoundingClientRect();
    menu.style.left = `${Math.max(8, Math.min(right - menu.offsetWidth, innerWidth - menu.offsetWidth - 8))}px`;
    const fits = bottom + menu.offsetHeight <= innerHeight;
    menu.style.top = `${fits ? bottom : Math.max(8, top - menu.offsetHeight)}px`;
    menu.querySelector("button").focus();
  }

  act(act) {
    byId("menu").hidePopover();
    act.call(this, this.target);
  }

  rename(id) {
    const item = this.itemOf(id);
    const { title } = this.entries.get(id);
    const input = element("input", { value: title, ariaLabel: "Name of the conversation", maxLength: 200 });
    const form = element("form", {}, input);
    const leave = (name) => {
      form.onsubmit = input.onblur = null;
      this.drawn = "";
      if (name && name !== title) this.actions.renamed(id, name);
      this.show();
      this.itemOf(id)?.querySelector("button").focus();
    };
    form.onsubmit = (event) => {
      event.preventDefault();
      leave(input.value.trim());
    };
    input.onblur = () => leave(input.value.trim());
    input.onkeydown = (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      leave(title);
    };
    item.replaceChildren(form);
    input.select();
  }

  export(id, kind) {
    const data = this.entries.get(id);
    const name =
      data.title
        .replace(/[^\p{L}\p{N} ._-]+/gu, " ")
        .trim()
        .slice(0, 60) || "conversation";
    if (kind === "md") download(`${name}.md`, "text/markdown", asMarkdown(unpacked(data)));
    else download(`${name}.json`, "application/json", `${JSON.stringify(data, null, 2)}\n`);
    announce("Exported");
  }

  exportAll() {
    download(
      "conversations.json",
      "application/json",
      `${JSON.stringify([...this.entries.values()], null, 2)}\n`,
    );
    announce("Exported");
  }

  async import(chooser) {
    const [file] = chooser.files;
    chooser.value = "";
    try {
      if (file.size > MOST_IMPORTED_BYTES) throw new Error("it is larger than 100 MB");
      const data = [
        await file
          .text()
          .then(JSON.parse)
          .catch(() => {
            throw new Error("it is not JSON");
          }),
      ].flat();
      const read = data.map(unpacked);
      for (const conversation of read.reverse()) {
        // none that is there is written over
        if (this.entries.has(conversation.id)) conversation.id = newConversation().id;
        await this.keep(conversation);
      }
      announce(`${count(read.length, "conversation")} imported`);
      tell("");
    } catch ({ message }) {
      tell(`“${file.name}” cannot be imported: ${message}.`);
    }
  }

  async delete(id) {
    if (!(await agrees(`Delete “${this.entries.get(id).title}”?`, "Delete"))) return;
    this.entries.delete(id);
    this.actions.gone(id);
    this.show();
    await forget(id);
    announce("Deleted");
    byId("search").focus();
  }

  async deleteAll() {
    if (!(await agrees(`Delete all ${count(this.entries.size, "conversation")}?`, "Delete all"))) return;
    this.entries.clear();
    this.actions.gone(null);
    this.show();
    await forgetAll();
    announce("All conversations deleted");
    byId("fresh").focus();
  }

  /** Does something for which the list goes out of the way, where there is little room. */
  leave(act) {
    if (narrow.matches) this.slide(false);
    act();
  }

  /** Slides the list in or out, where it is not beside the conversation. */
  slide(isOpen) {
    const isIn = isOpen || !narrow.matches;
    const wasOpen = document.body.classList.contains("listing");
    document.body.classList.toggle("listing", isOpen);
    byId("sidebar").inert = !isIn;
    byId("column").inert = isOpen && narrow.matches;
    byId("open-list").ariaExpanded = String(isOpen);
    if (isOpen) byId("close-list").focus();
    else if (wasOpen) byId("open-list").focus();
  }
}

/** What was kept as a conversation, if it still is one; what is damaged stays kept, and is not shown. */
function whole(data) {
  try {
    return [packed(unpacked(data))];
  } catch {
    return [];
  }
}

function has({ title, turns }, words) {
  if (!words.length) return true;
  const all = [title, ...turns.flatMap(({ text, files }) => [text, ...files.map((file) => file.name)])]
    .join("\n")
    .toLowerCase();
  return words.every((word) => all.includes(word));
}

function dayOf(time) {
  const date = new Date(time);
  const isToday = date.toDateString() === new Date().toDateString();
  return isToday
    ? date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" })
    : date.toLocaleDateString([], { day: "numeric", month: "short", year: "numeric" });
}
