"use strict";
/* Draws one explanation. `explainPhoto(root, data, image)`: data as `haav explain --json` gives it, image an address. */

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function percent(value) {
  return `${Math.round(100 * value)} %`;
}

function explainPhoto(root, data, image) {
  const names = Object.keys(data.views);
  const colour = (name) => `--view: var(--v${names.indexOf(name) % 6})`;
  const strongest = (word) => names.reduce((best, name) => (word.looks[name].weight > word.looks[best].weight ? name : best));

  const picture = make("img", { src: image, alt: data.caption });
  const overlay = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  overlay.setAttribute("viewBox", "0 0 1 1");
  overlay.setAttribute("preserveAspectRatio", "none");
  overlay.setAttribute("aria-hidden", "true");
  const caption = make("p", { class: "caption", role: "group", "aria-label": "Words of the caption" });
  const detail = make("div", { "aria-live": "polite" });
  const buttons = data.words.map((word, at) => {
    const button = make("button", { class: "word", type: "button", style: colour(strongest(word)), "aria-pressed": "false" }, word.word);
    button.addEventListener("mouseenter", () => choose(at));
    button.addEventListener("focus", () => choose(at));
    button.addEventListener("click", () => choose(at));
    button.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step && buttons[at + step]) buttons[at + step].focus();
    });
    return button;
  });
  buttons.forEach((button) => caption.append(button, " "));

  function bar(name, look) {
    const fill = make("div", { class: "fill", style: `${colour(name)}; width: ${100 * look.weight}%` });
    return make("div", { class: "bar", style: colour(name) },
      make("span", { class: "name" }, name),
      make("div", { class: "track" }, fill),
      make("span", { class: "numbers" }, `${percent(look.weight)}, without it ${look.lost > 0.005 ? "−" : look.lost < -0.005 ? "+" : "±"}${percent(Math.abs(look.lost))}`));
  }

  function choose(at) {
    const word = data.words[at];
    buttons.forEach((button, number) => button.setAttribute("aria-pressed", String(number === at)));
    overlay.replaceChildren();
    const lists = [];
    for (const name of names) {
      const look = word.looks[name];
      const most = Math.max(...look.places.map(([, share]) => share), 1e-9);
      for (const [token, share] of look.places) {
        const box = data.views[name][token].box;
        if (!box) continue;
        const named = data.views[name][token].label !== "";
        const shape = document.createElementNS("http://www.w3.org/2000/svg", "rect");
        shape.setAttribute("x", box[0]);
        shape.setAttribute("y", box[1]);
        shape.setAttribute("width", box[2] - box[0]);
        shape.setAttribute("height", box[3] - box[1]);
        shape.setAttribute("style", `${colour(name)}; fill: ${named ? "none" : "var(--view)"}; fill-opacity: ${(0.55 * look.weight * share) / most};
          stroke: ${named ? "var(--view)" : "none"}; stroke-opacity: ${Math.min(1, 0.25 + share / most)}; stroke-width: 3; vector-effect: non-scaling-stroke`);
        overlay.append(shape);
      }
      const labelled = look.places.filter(([token]) => data.views[name][token].label).slice(0, 5);
      if (labelled.length) {
        lists.push(make("h2", { style: colour(name) }, make("span", { class: "name" }, name)),
          make("ul", { class: "sentences" }, ...labelled.map(([token, share]) =>
            make("li", {}, make("span", { class: "soft" }, percent(share)), data.views[name][token].label))));
      }
    }
    detail.replaceChildren(
      make("h2", {}, `“${word.word}”, probability ${percent(word.probability)}`),
      ...names.map((name) => bar(name, word.looks[name])),
      make("p", { class: "soft" }, "Bars: how much the word trusts each view. Beside them: how the word's probability changes when the view is taken away. A weight is not a proof; where the two disagree, believe the second."),
      ...lists);
  }

  const rows = names.filter((name) => name in data.alone).map((name) => make("tr", { style: colour(name) },
    make("th", { scope: "row" }, make("span", { class: "name" }, name)),
    make("td", {}, data.without[name] || "–"), make("td", {}, data.alone[name] || "–")));
  root.replaceChildren(
    make("h1", {}, data.title || "Why these words"),
    make("div", { class: "columns" },
      make("div", {}, make("div", { class: "photo" }, picture, overlay)),
      make("div", {}, caption, detail)),
    make("h2", {}, "With a view taken away, and alone"),
    make("table", {},
      make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "view"), make("th", { scope: "col" }, "caption without it"), make("th", { scope: "col" }, "caption from it alone"))),
      make("tbody", {}, ...rows)));
  if (buttons.length) choose(0);
}
