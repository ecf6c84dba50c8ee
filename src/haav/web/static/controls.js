/* Under the caption of a photo: switches of the views, the captions to choose from, and the settings to play with. */

import { make, percent } from "./explain.js";
import { DEFAULTS, candidates, recaption } from "./photos.js";

/* `model`: as GET /v1/models gives it. `onPlay(settings)` is told which settings the next photos begin with. */
export function controls(photo, model, onChoice, onPlay) {
  const switches = make("fieldset", { class: "switches" }, make("legend", {}, "Switch a view off and see what changes"));
  const boxes = model.views.map((name, index) => {
    const box = make("input", { type: "checkbox", role: "switch", value: name, style: `--view: var(--v${index % 6})` });
    box.addEventListener("change", () => {
      const on = boxes.filter((other) => other.checked).map((other) => other.value);
      if (!on.length) {
        box.checked = true; // a caption needs a view
        return;
      }
      recaption(photo, { views: on.length === boxes.length ? null : on });
    });
    switches.append(make("label", { class: "switch", title: `view ${name}` }, box, model.titles[name]));
    return box;
  });
  const list = make("ol", { class: "n-best", "aria-label": "Captions, the best first" });
  const [play, fill] = playForm(photo, onPlay);
  const element = make("div", {}, list, switches, play);

  function update() {
    const on = photo.settings.views || model.views;
    for (const box of boxes) {
      box.checked = on.includes(box.value);
      box.disabled = box.checked && on.length === 1; // a caption needs a view
    }
    switches.hidden = boxes.length < 2;
    const captions = candidates(photo);
    list.hidden = captions.length < 2;
    list.replaceChildren(...captions.map((candidate, index) => {
      const button = make("button", { type: "button", "aria-pressed": String(index === photo.choice) },
        `${candidate.caption} `, make("span", { class: "share" }, percent(candidate.confidence)));
      button.addEventListener("click", () => onChoice(index));
      return make("li", {}, button);
    }));
    fill();
  }

  return { element, update };
}

function playForm(photo, onPlay) {
  const text = (name, label, example) => make("label", {}, label, make("input", { name, type: "text", maxlength: "200", placeholder: example, autocomplete: "off" }));
  const slider = make("input", { name: "temperature", type: "range", min: "0.1", max: "1.5", step: "0.1" });
  const temperature = make("span", {});
  const way = make("select", { name: "method" }, make("option", { value: "beam" }, "the likeliest (beam search)"), make("option", { value: "sample" }, "drawn by chance (sampling)"));
  const beam = make("label", {}, "Beam width", make("input", { name: "beam", type: "number", min: "1", max: "10", required: "" }));
  const heat = make("label", {}, make("span", {}, "Temperature ", temperature), slider);
  const number = make("label", {}, "Captions", make("input", { name: "n_best", type: "number", min: "1", max: "5", required: "" }));
  const form = make("form", {},
    text("prefix", "Begin with these words, and go on", "two people and"),
    text("must", "Must say (commas between words)", "dog|puppy"),
    text("never", "Never say", "man, woman"),
    make("fieldset", {}, make("label", {}, "Captions are", way), beam, heat, number),
    make("div", { class: "tools" }, make("button", { class: "button small primary" }, "Caption again"),
      make("button", { class: "button small", type: "reset" }, "As at first")));

  function adapt() {
    beam.hidden = way.value !== "beam";
    heat.hidden = way.value !== "sample";
    temperature.textContent = Number(slider.value).toFixed(1);
  }

  function fill() {
    for (const name of ["prefix", "must", "never", "method", "temperature", "beam", "n_best"]) {
      const field = form.elements[name];
      if (document.activeElement !== field) field.value = photo.settings[name];
    }
    adapt();
  }

  function ask(settings) {
    const { method, beam: width, temperature: heatValue, n_best } = settings;
    onPlay({ method, beam: width, temperature: heatValue, n_best });
    recaption(photo, settings);
  }

  form.addEventListener("input", adapt);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const values = Object.fromEntries(new FormData(form));
    for (const name of ["beam", "temperature", "n_best"]) values[name] = Number(values[name]);
    ask({ ...values, beam: Math.max(values.beam, values.n_best) });
  });
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    ask({ ...DEFAULTS });
  });
  return [make("details", { class: "play" }, make("summary", {}, "Play with the caption"), form), fill];
}
