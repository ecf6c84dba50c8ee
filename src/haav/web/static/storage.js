/* The photos of this tab, kept for a reload. They stay in this browser and are dropped a day later. */

const STORE = "photos";
const DAY = 24 * 3600 * 1000;

const tab = sessionStorage.getItem("tab") || String(Math.random());
sessionStorage.setItem("tab", tab);

function database() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open("haav", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE);
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function inStore(mode, use) {
  const base = await database();
  try {
    return await new Promise((resolve, reject) => {
      const transaction = base.transaction(STORE, mode);
      const request = use(transaction.objectStore(STORE));
      transaction.oncomplete = () => resolve(request?.result);
      transaction.onabort = () => reject(transaction.error);
    });
  } finally {
    base.close();
  }
}

const mine = IDBKeyRange.bound(`${tab}/`, `${tab}/\uffff`);

/* Keeps a photo. A browser that keeps nothing, as in some private windows, loses it with a reload and nothing else. */
export async function save({ abort, address, busy, previewed, ...photo }) {
  const record = { ...photo, saved: Date.now() };
  await inStore("readwrite", (store) => store.put(record, `${tab}/${photo.id}`)).catch(onlyRefusals);
}

export async function clear() {
  await inStore("readwrite", (store) => store.delete(mine)).catch(onlyRefusals);
}

export async function load() {
  try {
    await inStore("readwrite", (store) => {
      store.openCursor().onsuccess = ({ target: { result: cursor } }) => {
        if (!cursor) return;
        if (Date.now() - cursor.value.saved > DAY) cursor.delete();
        cursor.continue();
      };
    });
    const photos = await inStore("readonly", (store) => store.getAll(mine));
    return photos.sort((one, other) => one.id - other.id);
  } catch (error) {
    onlyRefusals(error);
    return [];
  }
}

function onlyRefusals(error) {
  if (!(error instanceof DOMException)) throw error;
}
