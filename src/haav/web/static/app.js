"use strict";
/* Photo in, explanation out. The last photo is kept, so that switching a view off asks again. */

const at = (id) => document.getElementById(id);
let photo = null; // {blob, name, address}
let asked = 0; // only the answer to the newest question is shown
let key = sessionStorage.getItem("key") || ""; // of the API, where the server demands one

function say(text) {
  at("status").textContent = text;
}

function complain(text) {
  at("problem").textContent = text;
  at("problem").hidden = !text;
}

function call(path, options = {}) {
  return fetch(path, key ? { ...options, headers: { Authorization: `Bearer ${key}` } } : options);
}

function question(extra) {
  const form = new FormData();
  form.append("image", photo.blob, photo.name);
  form.append("beam", at("beam").value);
  form.append("n_best", at("n-best").value);
  form.append("views", [...document.querySelectorAll("#views input:checked")].map((box) => box.value).join(","));
  for (const [key, value] of Object.entries(extra)) form.append(key, value);
  return form;
}

async function answerOf(extra) {
  const response = await call("/v1/caption", { method: "POST", body: question(extra) });
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({ error: `the server answered ${response.status}.` }));
  throw new Error(problem.error || "the server cannot read this request.");
}

async function ask() {
  if (!photo) return;
  const mine = ++asked;
  if (!document.querySelector("#views input:checked")) {
    say("");
    complain("Switch at least one view on: without any there is nothing to see.");
    return;
  }
  complain("");
  const started = performance.now();
  const clock = setInterval(() => mine === asked && say(`Looking at ${photo.name} … ${((performance.now() - started) / 1000).toFixed(0)} s`), 250);
  say(`Looking at ${photo.name} …`);
  try {
    const data = await (await answerOf({ explain: "true" })).json();
    if (mine === asked) show(data, performance.now() - started);
  } catch (error) {
    if (mine === asked) {
      say("");
      complain(error instanceof TypeError ? "The server cannot be reached. Is it still running?" : error.message);
    }
  } finally {
    clearInterval(clock);
  }
}

function show(data, milliseconds) {
  const root = at("explanation");
  root.hidden = false;
  explainPhoto(root, { ...data, title: photo.name }, photo.address);
  at("others").replaceChildren(...(data.n_best || []).map((other) => make("li", {}, other.caption)));
  at("copy").disabled = at("download").disabled = false;
  at("copy").dataset.caption = data.caption;
  const doubt = data.unfamiliar ? "; I may not know this kind of picture" : "";
  say(`${(milliseconds / 1000).toFixed(1)} s, ${percent(data.confidence)} sure${doubt}`);
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const words = [...root.querySelectorAll(".word")];
  words.forEach((word, number) => {
    word.classList.add("hidden-word");
    setTimeout(() => word.classList.remove("hidden-word"), 90 * number);
  });
}

function take(blob, name) {
  if (!blob) return;
  if (photo) URL.revokeObjectURL(photo.address);
  photo = { blob, name: name || "photo", address: URL.createObjectURL(blob) };
  ask();
}

at("file").addEventListener("change", () => take(at("file").files[0], at("file").files[0]?.name));
at("controls").addEventListener("submit", (event) => event.preventDefault());
for (const id of ["beam", "n-best"]) at(id).addEventListener("change", ask);
document.addEventListener("paste", (event) => {
  const file = [...event.clipboardData.files].find((one) => one.type.startsWith("image/"));
  if (file) take(file, file.name);
});
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  at("drop").classList.add("over");
});
document.addEventListener("dragleave", () => at("drop").classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  at("drop").classList.remove("over");
  take(event.dataTransfer.files[0], event.dataTransfer.files[0]?.name);
});
at("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(at("copy").dataset.caption);
    say("Copied.");
  } catch {
    say("This browser does not let pages copy; select the caption instead.");
  }
});
at("download").addEventListener("click", async () => {
  try {
    const page = await (await answerOf({ format: "html" })).blob();
    const link = make("a", { href: URL.createObjectURL(page), download: `${photo.name}.html` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  } catch (error) {
    complain(error.message);
  }
});

async function begin() {
  try {
    const response = await call("/v1/models");
    at("key-form").hidden = response.ok;
    if (!response.ok) return complain(key ? "This is not the key of this server." : "");
    complain("");
    const found = await response.json();
    const model = found.models[0];
    at("beam").value = model.beam;
    at("views").append(...model.views.map((name) => {
      const box = make("input", { type: "checkbox", value: name });
      box.checked = true;
      box.addEventListener("change", ask);
      return make("label", {}, box, ` ${name}`);
    }));
    at("samples").append(...found.samples.map((file) => {
      const button = make("button", { type: "button", class: "sample", "aria-label": `Sample photo: ${file.replace(".jpg", "")}` },
        make("img", { src: `/samples/${file}`, alt: "" }));
      button.addEventListener("click", async () => take(await (await fetch(`/samples/${file}`)).blob(), file));
      return button;
    }));
  } catch {
    complain("The server cannot be reached. Is it still running?");
  }
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value;
  sessionStorage.setItem("key", key);
  begin();
});
begin();
