/* The photos of this page: what was asked about each, and what was answered. */

import { Problem, eventsOf, post } from "./api.js";

const AT_ONCE = 4; // photos of an album that are asked about at the same time; the server batches them

export const DEFAULTS = { views: null, prefix: "", must: "", never: "", method: "beam", beam: 5, temperature: 0.7, n_best: 1 };

/* In the order in which they were added. A photo has: id, name, blob, address, settings, answer (as the API gives it),
   explained, choice (which of its captions is shown), before (the caption before the last change), problem, busy. */
export let photos = [];
let onChange = () => {};
let counter = 0;

export function watch(listener) {
  onChange = listener;
}

export function start(files, settings) {
  for (const photo of photos) {
    photo.abort?.abort();
    URL.revokeObjectURL(photo.address);
  }
  photos = files.map(({ blob, name }) => newPhoto(blob, name || "photo", settings));
  return photos;
}

/* Photos as they were saved */
export function restore(saved) {
  photos = saved.map((photo) => ({ ...photo, ...newPhoto(photo.blob, photo.name, photo.settings), id: photo.id, answer: photo.answer }));
  counter = Math.max(0, ...photos.map((photo) => photo.id));
}

function newPhoto(blob, name, settings) {
  return { id: ++counter, blob, name, address: URL.createObjectURL(blob), settings, answer: null, explained: false, choice: 0 };
}

export function find(id) {
  return photos.find((photo) => photo.id === id);
}

/* The captions of a photo, the best first */
export function candidates(photo) {
  return photo.answer ? [photo.answer, ...(photo.answer.n_best || [])] : [];
}

export function shown(photo) {
  return candidates(photo)[photo.choice];
}

/* A browser may be unable to show what the server can read, TIFF and HEIC for example. */
export async function ensurePreview(photo) {
  if (photo.previewed) return;
  photo.previewed = true;
  const image = new Image();
  image.src = photo.address;
  try {
    await image.decode();
  } catch {
    try {
      const preview = await (await post("/v1/preview", photo, {})).blob();
      URL.revokeObjectURL(photo.address);
      photo.address = URL.createObjectURL(preview);
      onChange(photo);
    } catch (error) {
      if (!(error instanceof Problem)) throw error; // the caption's own error is shown
    }
  }
}

function fieldsOf(settings) {
  const fields = { n_best: settings.n_best, method: settings.method };
  for (const name of ["prefix", "must", "never"]) if (settings[name].trim()) fields[name] = settings[name].trim();
  if (settings.views) fields.views = settings.views.join(",");
  if (settings.method === "beam") fields.beam = settings.beam;
  else Object.assign(fields, { samples: settings.n_best, temperature: settings.temperature, seed: settings.seed });
  return fields;
}

/* Asks for the caption of a photo and shows it at once; with `explain`, its explanation follows. */
export async function caption(photo, explain) {
  photo.abort?.abort();
  const abort = (photo.abort = new AbortController());
  Object.assign(photo, { busy: true, problem: "", slow: "" });
  onChange(photo);
  try {
    const fields = { ...fieldsOf(photo.settings), ...(explain ? { format: "events" } : {}) };
    const response = await post("/v1/caption", photo, fields, abort.signal);
    if (explain) {
      for await (const [name, data] of eventsOf(response)) answer(photo, name, data);
      if (!photo.explained && !photo.slow) throw new Problem("The server ended its answer early. Is it still running?");
    } else answer(photo, "caption", await response.json());
  } catch (error) {
    if (error.name === "AbortError") return;
    Object.assign(photo, { answer: null, explained: false, problem: error instanceof Problem ? error.message : "The connection to the server broke. Try again." });
  }
  photo.busy = false;
  onChange(photo);
}

function answer(photo, event, data) {
  if (event === "problem") photo.slow = data.error;
  else {
    photo.answer = data;
    photo.explained = event === "explanation";
    photo.choice = Math.min(photo.choice, candidates(photo).length - 1);
  }
  onChange(photo);
}

/* Asks again with other settings. The caption so far is kept beside the new one. */
export function recaption(photo, changes) {
  photo.before = shown(photo)?.caption ?? photo.before;
  const settings = { ...photo.settings, ...changes };
  if (settings.method === "sample") settings.seed = Math.floor(2 ** 31 * Math.random());
  Object.assign(photo, { settings, answer: null, explained: false, choice: 0 });
  return caption(photo, true);
}

/* Captions an album, a few photos at a time */
export async function captionAll() {
  const waiting = photos.filter((photo) => !photo.answer && !photo.problem);
  const all = photos;
  const worker = async () => {
    for (let photo = waiting.shift(); photo && photos === all; photo = waiting.shift()) {
      await Promise.all([caption(photo, false), ensurePreview(photo)]);
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
}
