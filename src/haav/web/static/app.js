/* The page: its three screens (home, album, one photo), what is dropped on it, and what the address says.

   #                  home
   #album             several photos
   #photo-3           the photo with id 3, in this browser only
   #sample-cat.jpg    a sample photo of the server */

import { Problem, call, hasKey, useKey } from "./api.js";
import { playing, switches } from "./controls.js";
import { explainer, legend, make, plainCaption, sureness } from "./explain.js";
import { DEFAULTS, add, caption, captionAll, clear, ensurePreview, find, photos, restore, shown, watch } from "./photos.js";
import { download, toCsv, toHtml, toJsonl, toText } from "./save.js";
import * as storage from "./storage.js";

const by = (id) => document.getElementById(id);
let model = null;
let play = {}; // settings that the next photos begin with
let screen = null; // what draws the photo that is shown: {photo, draw}

function say(text, seconds = 0) {
  by("status").textContent = text;
  clearTimeout(say.timer);
  if (seconds) say.timer = setTimeout(() => say(""), 1000 * seconds);
}

function complain(text) {
  by("problem").textContent = text;
  by("problem").hidden = !text;
}

/* Photos that come in */

function defaults() {
  return { ...DEFAULTS, beam: model.beam };
}

function take(files) {
  if (!files.length || !model) return;
  complain("");
  const added = files.map((file) => add(file, { ...defaults(), ...play }));
  added.forEach(storage.save);
  if (added.length === 1) return open(added[0]);
  go("#album");
  return captionAll();
}

function takeFiles(list) {
  take([...list].map((file) => ({ blob: file, name: file.name })));
}

/* A sample has an address that others can be sent. */
async function takeSample(name) {
  const known = photos.find((photo) => photo.sample && photo.name === name);
  if (known) return open(known);
  const response = await call(`/samples/${encodeURIComponent(name)}`);
  if (!response.ok) return gone();
  return take([{ blob: await response.blob(), name, sample: true }]);
}

for (const id of ["file", "camera"]) {
  by(id).addEventListener("change", () => {
    takeFiles(by(id).files);
    by(id).value = ""; // the same file can be chosen again
  });
}
document.addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files].filter((file) => file.type.startsWith("image/"));
  if (files.length) takeFiles(files);
});
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("over");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("over");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("over");
  takeFiles(event.dataTransfer.files);
});

/* Screens */

function go(address) {
  if (location.hash === address) show();
  else location.hash = address; // show() follows
}

function open(photo) {
  go(photo.sample ? `#sample-${photo.name}` : `#photo-${photo.id}`);
}

function gone() {
  history.replaceState(null, "", "#");
  show();
  say("That photo was only in the browser that opened it. Choose one of yours, or one of these.", 8);
}

function ensureExplained(photo) {
  if (!photo.explained && !photo.busy && !photo.problem && !photo.late) caption(photo, true);
}

function photoOfAddress() {
  const [, kind, name] = decodeURIComponent(location.hash).match(/^#(photo|sample)-(.+)$/) || [];
  if (kind === "photo") return find(Number(name));
  return kind && photos.find((photo) => photo.sample && photo.name === name);
}

function show() {
  say("");
  const photo = photoOfAddress();
  if (!photo && /^#sample-/.test(location.hash)) return takeSample(decodeURIComponent(location.hash.slice(8)));
  if (!photo && /^#photo-/.test(location.hash)) return gone();
  const name = photo ? "result" : location.hash === "#album" && photos.length ? "album" : "home";
  for (const id of ["home", "album", "result"]) by(id).hidden = id !== name;
  by("another").hidden = name === "home";
  by("to-album").hidden = name === "album" || photos.length < 2;
  by("to-album").textContent = `All ${photos.length} photos`;
  document.title = photo ? `${photo.name} · haav` : name === "album" ? `${photos.length} photos · haav` : "haav: captions, and where each word came from";
  if (name === "album") drawAlbum();
  if (screen?.photo !== photo) {
    screen = photo ? photoScreen(photo) : null;
    scrollTo({ top: 0 });
    by("main").focus({ preventScroll: true });
  }
  if (!photo) return;
  ensureExplained(photo);
  ensurePreview(photo);
  screen.draw();
}

function changed(photo) {
  if (!photo.busy) storage.save(photo);
  if (!by("album").hidden) drawAlbum();
  if (screen?.photo !== photo) return;
  ensureExplained(photo); // an album asks for captions only
  screen.draw();
}

function card(address, note, inside, press) {
  const image = make("img", { src: address, alt: "", loading: "lazy" });
  image.addEventListener("error", () => image.replaceWith(make("div", { class: "blank" }))); // until a preview is there
  const button = make("button", { type: "button", class: "card" }, image, make("div", { class: "text" }, inside,
    make("p", { class: "note", dir: "auto" }, note)));
  button.addEventListener("click", press);
  return make("li", {}, button);
}

function drawAlbum() {
  const focused = [...by("cards").children].findIndex((item) => item.contains(document.activeElement));
  by("cards").replaceChildren(...photos.map((photo) => {
    const said = shown(photo);
    const inside = said ? plainCaption(said)
      : make("p", { class: photo.problem ? "problem" : "soft waiting" }, sentence(photo.problem || "") || (photo.busy ? "Looking …" : "Waiting …"));
    return card(photo.address, said ? `${photo.name} · ${sureness(said)}` : photo.name, inside, () => open(photo));
  }));
  by("cards").children[focused]?.querySelector("button").focus({ preventScroll: true });
  const done = photos.filter((photo) => photo.answer).length;
  const failed = photos.filter((photo) => photo.problem).length;
  by("progress").textContent = `${done} of ${photos.length} captioned${failed ? `, ${failed} failed` : ""}`;
  by("album-title").textContent = `${photos.length} photos`;
  for (const button of document.querySelectorAll("[data-save]")) button.disabled = !done;
}

function photoScreen(photo) {
  const root = make("div", { class: "explanation" });
  const views = switches(photo, model);
  const knobs = playing(photo, defaults(), (index) => {
    Object.assign(photo, { choice: index, before: null });
    changed(photo);
  }, (settings) => (play = settings));
  const copy = make("button", { type: "button", class: "button small" }, "Copy caption");
  const keep = make("button", { type: "button", class: "button small" }, "Save as HTML");
  copy.addEventListener("click", () => copyText(shown(photo).caption));
  keep.addEventListener("click", async () => download(`${photo.name.replace(/\.\w+$/, "")}.html`, await toHtml([photo]), "text/html"));
  const below = make("div", {}, make("div", { class: "tools" }, copy, keep, ...neighbours(photo)), knobs.element);
  by("result").replaceChildren(root);
  let state = "";
  let drawCaption = null;

  function draw() {
    const said = shown(photo);
    const next = said ? "caption" : photo.problem ? "problem" : "waiting";
    if (next !== state) {
      if (next === "caption") drawCaption = explainer(root, below);
      else root.replaceChildren(next === "waiting" ? waitingFor(photo) : failure(photo));
      state = next;
    }
    root.setAttribute("aria-busy", String(Boolean(photo.busy)));
    if (state !== "caption") return;
    views.update();
    knobs.update();
    keep.disabled = !photo.explained || photo.busy;
    if (photo.busy && photo.explained) return; // the new caption is on its way; the one so far is shown as such
    drawCaption({ ...photo.answer, ...said, title: photo.name, image: photo.address, titles: model.titles }, {
      replace: (index, text) => caption(photo, true, { prefix: [...said.words.slice(0, index).map((word) => word.word), text].join(" ") }),
      ban: (word) => caption(photo, true, { never: [photo.settings.never, word].filter(Boolean).join(", ") }),
      legend: model.views.length > 1 ? views.element : null,
      ...comparison(photo, said),
    });
    by("announcement").textContent = said.caption;
    if (photo.late || photo.refused) say(sentence(photo.late || photo.refused), 8);
  }

  return { photo, draw };
}

/* Links to the photos before and after one */
function neighbours(photo) {
  const index = photos.indexOf(photo);
  return [["Previous", photos[index - 1]], ["Next", photos[index + 1]]].filter(([, other]) => other).map(([text, other]) => {
    const button = make("button", { type: "button", class: "button small" }, text);
    button.addEventListener("click", () => open(other));
    return button;
  });
}

function waitingFor(photo) {
  return make("div", { class: "columns looking" },
    make("div", { class: "photo" }, make("img", { src: photo.address, alt: "" })),
    make("div", { class: "words" }, make("p", { class: "file", dir: "auto" }, photo.name),
      make("p", { class: "soft waiting" }, "Looking at the photo …"),
      make("div", { "aria-hidden": "true" }, make("div", { class: "skeleton" }), make("div", { class: "skeleton" }))));
}

function failure(photo) {
  const again = make("button", { type: "button", class: "button" }, "Try again");
  again.addEventListener("click", () => caption(photo, true));
  const other = make("label", { class: "button primary", for: "file" }, "Choose another photo");
  return make("div", { class: "failed" }, make("h1", {}, "No caption"), make("p", { class: "file", dir: "auto" }, photo.name),
    make("p", { class: "problem", role: "alert" }, sentence(photo.problem)), make("div", { class: "tools" }, other, photo.hopeless ? "" : again));
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/* The caption before the last change, with the words that differ */
function comparison(photo, said) {
  if (!photo.before) return {};
  const [old, now] = [photo.before.split(" "), said.caption.split(" ")];
  const common = longestCommon(old, now);
  const kept = new Set(common.map(([index]) => index));
  const before = make("p", { class: "before" }, "Before: ");
  old.forEach((word, index) => before.append(kept.has(index) ? word : make("del", {}, word), " "));
  if (kept.size === old.length && old.length === now.length) before.append("(the same)");
  const stayed = new Set(common.map(([, index]) => index));
  return { before, changed: new Set(now.map((_, index) => index).filter((index) => !stayed.has(index))) };
}

/* Pairs of indices of the longest common subsequence of two lists of words */
function longestCommon(old, now) {
  const lengths = Array.from({ length: old.length + 1 }, () => new Array(now.length + 1).fill(0));
  for (let i = old.length - 1; i >= 0; i--) {
    for (let j = now.length - 1; j >= 0; j--) {
      lengths[i][j] = old[i] === now[j] ? 1 + lengths[i + 1][j + 1] : Math.max(lengths[i + 1][j], lengths[i][j + 1]);
    }
  }
  const pairs = [];
  for (let i = 0, j = 0; i < old.length && j < now.length;) {
    if (old[i] === now[j]) pairs.push([i++, j++]);
    else if (lengths[i + 1][j] >= lengths[i][j + 1]) i++;
    else j++;
  }
  return pairs;
}

/* Out of the page */

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied.", 3);
  } catch {
    say("This browser does not let pages copy. Select the caption instead.", 6);
  }
}

by("forget").addEventListener("click", () => {
  clear();
  storage.clear();
  go("#");
});

async function saveAlbum(how) {
  if (how === "copy") return copyText(toText(photos));
  if (how === "csv") return download("captions.csv", toCsv(photos), "text/csv");
  if (how === "jsonl") return download("captions.jsonl", toJsonl(photos), "application/jsonl");
  const captioned = photos.filter((photo) => photo.answer);
  for (const [index, photo] of captioned.entries()) {
    say(`Explaining photo ${index + 1} of ${captioned.length} …`);
    if (!photo.explained) await caption(photo, true);
  }
  say("");
  return download("captions.html", await toHtml(photos), "text/html");
}

for (const button of document.querySelectorAll("[data-save]")) {
  button.addEventListener("click", () => saveAlbum(button.dataset.save).catch((error) => say(error.message, 8)));
}

/* Start */

async function showSamples() {
  const response = await call("/v1/samples");
  if (!response.ok) return;
  const { photos: samples } = await response.json();
  samples.sort((one, other) => other.confidence - one.confidence);
  by("colours").replaceChildren(legend({ words: [], titles: model.titles }));
  by("samples").replaceChildren(...samples.map((sample) => sampleCard(sample.image, sureness(sample), plainCaption(sample))));
}

function sampleCard(file, text, said) {
  return card(`/samples/${file}`, text, said, () => go(`#sample-${file}`));
}

async function begin() {
  try {
    const response = await call("/v1/models");
    by("key-form").hidden = response.ok;
    if (!response.ok) return complain(hasKey() ? "This is not the key of this server." : "");
    complain("");
    const known = await response.json();
    model = known.models[0];
    by("samples").replaceChildren(...known.samples.map((file) => sampleCard(file, file, make("p", { class: "plain-caption soft waiting" }, "…"))));
    restore(await storage.load());
    photos.forEach(ensurePreview);
    show();
    if (photos.length > 1) captionAll(); // those that a reload interrupted
    await showSamples();
  } catch (error) {
    complain(error instanceof Problem ? error.message : `This page failed: ${error.message}`);
  }
}

by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(by("key").value);
  begin();
});
addEventListener("hashchange", show);
watch(changed);
begin();
