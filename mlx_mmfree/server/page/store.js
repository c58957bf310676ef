/** What the browser keeps: conversations in IndexedDB, settings in localStorage. */

const TABLE = "conversations";
const UNSAVED = "mmfree-unsaved-";
const SETTINGS = "mmfree-settings";

let opening = null;

function database() {
  opening ??= new Promise((done, failed) => {
    const request = indexedDB.open("mmfree", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
    request.onsuccess = () => done(request.result);
    request.onerror = () => failed(request.error);
  });
  return opening;
}

/** What an operation on the table gives, once it is written. */
async function operation(mode, act) {
  const transaction = (await database()).transaction(TABLE, mode);
  const request = act(transaction.objectStore(TABLE));
  return new Promise((done, failed) => {
    transaction.oncomplete = () => done(request.result);
    transaction.onerror = transaction.onabort = () => failed(transaction.error);
  });
}

const tabs = new BroadcastChannel("mmfree");

/** Tells the other tabs of this server that a conversation has changed. */
async function announced(id, work) {
  await work;
  tabs.postMessage(id);
}

/** All conversations as plain data, the last changed first. */
export async function kept() {
  const found = await operation("readonly", (table) => table.getAll());
  return found.sort((one, other) => other.changed - one.changed);
}

export const keep = (data) =>
  announced(
    data.id,
    operation("readwrite", (table) => table.put(data)),
  );
export const forget = (id) =>
  announced(
    id,
    operation("readwrite", (table) => table.delete(id)),
  );
export const forgetAll = () =>
  announced(
    null,
    operation("readwrite", (table) => table.clear()),
  );

/** Calls when another tab has changed a conversation, with its id; null: all of them. */
export function onChange(call) {
  tabs.onmessage = ({ data }) => call(data);
}

/** Keeps what an answer has so far when the page is left, for which a database takes too long. */
export function keepInHaste(id, { text, reasoning }) {
  localStorage.setItem(UNSAVED + id, JSON.stringify({ text, reasoning }));
}

/** Brings what was kept in haste into its conversations. */
export async function rescue() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(UNSAVED));
  for (const key of keys) {
    const data = await operation("readonly", (table) => table.get(key.slice(UNSAVED.length)));
    const turn = data?.turns.find(({ end }) => end === "writing");
    if (turn)
      await keep({
        ...data,
        turns: data.turns.with(data.turns.indexOf(turn), {
          ...turn,
          ...stored(key),
          end: "interrupted",
        }),
      });
    localStorage.removeItem(key);
  }
}

/** What localStorage has under a key; nothing where it is damaged. */
function stored(key) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? {};
  } catch {
    return {};
  }
}

/** The settings of this browser. */
export const keptSettings = () => stored(SETTINGS);

export function keepSettings(values) {
  localStorage.setItem(SETTINGS, JSON.stringify({ ...keptSettings(), ...values }));
}
