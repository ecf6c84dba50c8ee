/* The photos of this tab, kept for a reload. They stay in this browser and are dropped a day later. */

const STORE = "tabs";
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

/* A browser that keeps nothing, as in some private windows, loses the photos with a reload and nothing else. */
export async function save(photos) {
  const kept = photos.map(({ id, name, blob, settings, answer, explained, choice, before, problem }) =>
    ({ id, name, blob, settings, answer, explained, choice, before, problem }));
  await inStore("readwrite", (store) => store.put({ saved: Date.now(), photos: kept }, tab)).catch(() => {});
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
    return (await inStore("readonly", (store) => store.get(tab)))?.photos || [];
  } catch {
    return [];
  }
}
