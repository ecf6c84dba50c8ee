/* Beside the caption of a photo: switches of the views, the captions to choose from, and settings to play with. */

import { make, percent } from "./explain.js";
import { candidates, caption } from "./photos.js";

/* The colours of the views, each with a switch */
export function switches(photo, model) {
  const boxes = model.views.map((name, index) => {
    const box = make("input", { type: "checkbox", role: "switch", value: name, style: `--view: var(--v${index % 6})` });
    box.addEventListener("change", () => {
      const on = boxes.filter((other) => other.checked).map((other) => other.value);
      caption(photo, true, { views: on.length === boxes.length ? null : on });
    });
    return box;
  });
  const labels = boxes.map((box) => make("label", { class: "switch", title: `view ${box.value}` }, box, model.titles[box.value]));
  const element = make("fieldset", { class: "switches" },
    make("legend", { class: "soft" }, "The bar under a word shows which view it trusted. Switch one off to see what changes."), ...labels);

  function update() {
    if (photo.busy && photo.explained) return; // what was just switched is on its way
    const on = photo.settings.views || model.views;
    for (const box of boxes) {
      box.checked = on.includes(box.value);
      box.disabled = box.checked && on.length === 1; // a caption needs a view
      box.parentElement.title = box.disabled ? "One view must stay on" : `view ${box.value}`;
    }
  }

  return { element, update };
}

/* `defaults`: the settings of a photo that nobody changed. `onChoice(index)`: one of several captions was chosen. `onPlay(settings)`: what the next photos begin with. */
export function playing(photo, defaults, onChoice, onPlay) {
  const list = make("ol", { class: "n-best" });
  const choices = make("section", {}, make("h3", {}, "Captions to choose from"), list);
  const refused = make("p", { class: "problem", role: "alert" });
  const [play, fill] = playForm(photo, defaults, refused, onPlay);
  const element = make("div", {}, choices, play);

  function update() {
    const captions = candidates(photo);
    choices.hidden = captions.length < 2;
    list.replaceChildren(...captions.map((candidate, index) => {
      const button = make("button", { type: "button", "aria-pressed": String(index === photo.choice) },
        `${candidate.caption} `, make("span", { class: "share" }, percent(candidate.confidence)));
      button.addEventListener("click", () => onChoice(index));
      return make("li", {}, button);
    }));
    refused.textContent = photo.refused || "";
    refused.hidden = !photo.refused;
    if (photo.refused) play.open = true;
    else fill(); // what was refused stays in the fields, to be mended
  }

  return { element, update };
}

function playForm(photo, defaults, refused, onPlay) {
  const text = (name, label, example) => make("label", {}, label, make("input", { name, type: "text", maxlength: "200", placeholder: example, autocomplete: "off" }));
  const slider = make("input", { name: "temperature", type: "range", min: "0.1", max: "1.5", step: "0.1" });
  const temperature = make("span", {});
  const way = make("select", { name: "method" }, make("option", { value: "beam" }, "likelihood"), make("option", { value: "sample" }, "chance"));
  const beam = make("label", {}, "Beam width", make("input", { name: "beam", type: "number", min: "1", max: "10", required: "" }));
  const heat = make("label", {}, make("span", {}, "Temperature ", temperature), slider);
  const number = make("label", {}, "How many (1–5)", make("input", { name: "n_best", type: "number", min: "1", max: "5", required: "" }));
  const form = make("form", {},
    text("prefix", "Begin with these words, and go on", "two people and"),
    text("must", "Must say (commas between words; dog|puppy: one of them)", "table, dog|puppy"),
    text("never", "Never say (commas between words)", "man, woman"),
    make("fieldset", {}, make("label", {}, "Pick words by", way), beam, heat, number),
    refused,
    make("div", { class: "tools" }, make("button", { class: "button small primary" }, "Caption again"),
      make("button", { class: "button small", type: "reset" }, "Reset")));

  let filled = null;

  function adapt() {
    beam.hidden = way.value !== "beam";
    heat.hidden = way.value !== "sample";
    temperature.textContent = Number(slider.value).toFixed(1);
  }

  function fill() {
    if (filled === photo.settings) return; // what is being typed stays
    filled = photo.settings;
    for (const name of ["prefix", "must", "never", "method", "temperature", "beam", "n_best"]) form.elements[name].value = photo.settings[name];
    adapt();
  }

  function ask(settings, compare) {
    const { method, beam: width, temperature: warmth, n_best } = settings;
    onPlay({ method, beam: width, temperature: warmth, n_best });
    caption(photo, true, settings, compare);
  }

  form.addEventListener("input", adapt);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const values = Object.fromEntries(new FormData(form));
    for (const name of ["beam", "temperature", "n_best"]) values[name] = Number(values[name]);
    ask({ ...values, beam: Math.max(values.beam, values.n_best) }, true);
  });
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    ask(defaults, false);
  });
  return [make("details", { class: "play" }, make("summary", {}, "Play with the caption"), form), fill];
}
