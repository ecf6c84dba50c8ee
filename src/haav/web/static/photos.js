/* The photos of this page: what was asked about each, and what was answered. */

import { Problem, eventsOf, post } from "./api.js";

const AT_ONCE = 4; // photos of an album that are asked about at the same time; the server batches them

export const DEFAULTS = { views: null, prefix: "", must: "", never: "", method: "beam", beam: 5, temperature: 0.7, n_best: 1 };

/* In the order in which they were added. A photo has:
   id, name, blob, address, sample (whether it is one of the server's);
   settings, answer (as the API gives it for them), explained, choice (which of its captions is shown);
   before (the caption before the last change), unfamiliar (whether the picture is of a kind the model may not know);
   problem (why it has no answer), refused (why the last change was not made), late (why it has no explanation), busy. */
export let photos = [];
let onChange = () => {};
let counter = 0;

export function watch(listener) {
  onChange = listener;
}

export function add({ blob, name, sample }, settings) {
  const photo = newPhoto({ id: ++counter, blob, name: name || "photo", sample, settings, answer: null, explained: false, choice: 0 });
  photos.push(photo);
  return photo;
}

export function clear() {
  for (const photo of photos) {
    photo.abort?.abort();
    URL.revokeObjectURL(photo.address);
  }
  photos = [];
}

/* Photos as they were saved */
export function restore(saved) {
  photos = saved.map(newPhoto);
  counter = Math.max(0, ...photos.map((photo) => photo.id));
}

function newPhoto(photo) {
  return { ...photo, address: URL.createObjectURL(photo.blob) };
}

export function find(id) {
  return photos.find((photo) => photo.id === id);
}

/* The captions of a photo, the best first */
export function candidates(photo) {
  return photo.answer ? [photo.answer, ...(photo.answer.n_best || [])] : [];
}

/* The caption that is shown */
export function shown(photo) {
  const candidate = candidates(photo)[photo.choice];
  if (!candidate) return candidate;
  const { views, prefix, must, never } = photo.settings;
  return { ...candidate, unfamiliar: photo.unfamiliar, forced: Boolean(views || prefix || must || never) };
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

/* Asks for the caption of a photo and shows it at once; with `explain`, its explanation follows. `changes` of the settings
   hold when they are answered. Until then, and if they are refused, the caption so far stays. With `compare`, it is kept
   beside the new one. */
export async function caption(photo, explain, changes = {}, compare = true) {
  photo.abort?.abort();
  const abort = (photo.abort = new AbortController());
  const settings = { ...photo.settings, ...changes };
  const change = Object.keys(changes).length > 0;
  const before = !compare ? null : change ? shown(photo)?.caption : photo.before;
  if (change && settings.method === "sample") settings.seed = Math.floor(2 ** 31 * Math.random());
  let arrived = false;
  Object.assign(photo, { busy: true, problem: "", refused: "", late: "" });
  onChange(photo);
  const take = (event, data) => {
    if (event === "problem") photo.late = data.error;
    else {
      if (!arrived) Object.assign(photo, { settings, before, choice: change ? 0 : photo.choice });
      arrived = true;
      photo.unfamiliar ||= data.unfamiliar; // it is about the picture, whatever is switched off later
      Object.assign(photo, { answer: data, explained: event === "explanation" });
    }
    onChange(photo);
  };
  try {
    const fields = { ...fieldsOf(settings), ...(explain ? { format: "events" } : {}) };
    const response = await post("/v1/caption", photo, fields, abort.signal);
    if (explain) {
      for await (const [event, data] of eventsOf(response)) take(event, data);
      if (!photo.explained && !photo.late) throw new Problem("The server ended its answer early. Is it still running?");
    } else take("caption", await response.json());
  } catch (error) {
    if (error.name === "AbortError") return;
    const reason = error instanceof Problem ? error : new Problem("The connection to the server broke. Try again.");
    if (arrived) photo.late = reason.message;
    else if (photo.answer && change) photo.refused = reason.message;
    else Object.assign(photo, { answer: null, explained: false, problem: reason.message, hopeless: reason.status === 422 });
  }
  photo.busy = false;
  onChange(photo);
}

/* Captions those photos of an album that have no answer yet, a few at a time */
export async function captionAll() {
  const waiting = photos.filter((photo) => !photo.answer && !photo.problem && !photo.busy);
  const worker = async () => {
    for (let photo = waiting.shift(); photo; photo = waiting.shift()) {
      if (photos.includes(photo)) await Promise.all([caption(photo, false), ensurePreview(photo)]);
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
}
