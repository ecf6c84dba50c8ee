/* What the page shows, as text, CSV, JSON lines, or one HTML file that needs no network. */

import { call } from "./api.js";
import { shown } from "./photos.js";

const SIDE = 1024; // of photos in the HTML file, in pixels

export function toText(photos) {
  return photos.map((photo) => `${photo.name}\t${shown(photo)?.caption ?? ""}\n`).join("");
}

export function toCsv(photos) {
  const cell = (value) => (/[",\r\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value);
  const rows = photos.map((photo) => [photo.name, shown(photo)?.caption ?? "", shown(photo)?.confidence ?? "", photo.problem || ""]);
  return [["image", "caption", "confidence", "error"], ...rows].map((row) => `${row.map(cell).join(",")}\r\n`).join("");
}

export function toJsonl(photos) {
  const lines = photos.map((photo) => (photo.answer ? { ...shown(photo), image: photo.name } : { image: photo.name, error: photo.problem || "no caption yet" }));
  return lines.map((line) => `${JSON.stringify(line)}\n`).join("");
}

/* The template of `haav explain`, filled with the photos that have an explanation */
export async function toHtml(photos) {
  const texts = await Promise.all(["explain.html", "style.css", "explain.js"].map(async (file) => (await call(`/static/${file}`)).text()));
  const [template, style, script] = texts;
  const explained = photos.filter((photo) => photo.explained);
  const data = await Promise.all(explained.map(async (photo) =>
    ({ ...photo.answer, ...shown(photo), n_best: [], title: photo.name, image: await dataUri(photo.address) })));
  const title = explained.length === 1 ? explained[0].name : `${explained.length} photos`;
  const values = { title: escaped(title), style, script, data: JSON.stringify(data).replaceAll("<", "\\u003c") };
  return template.replace(/\{\{(\w+)\}\}/g, (_, name) => values[name]);
}

function escaped(text) {
  return text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
}

async function dataUri(address) {
  const image = new Image();
  image.src = address;
  await image.decode();
  const scale = Math.min(1, SIDE / Math.max(image.naturalWidth, image.naturalHeight));
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(image.naturalWidth * scale);
  canvas.height = Math.round(image.naturalHeight * scale);
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.85);
}

export function download(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
