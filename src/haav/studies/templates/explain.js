/* Draws a photo, its caption, and where each word came from. `haav serve` and the pages of `haav explain` use it.

   A photo has `title`, `image` (an address) and what `haav explain` writes as JSON. Before the explanation is there, its
   words have only the weights of views, and `titles` names the views. */

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function percent(share) {
  return share > 0 && share < 0.005 ? "<1\u00a0%" : `${Math.round(100 * share)}\u00a0%`;
}

/* `photo.forced`: a user chose words or views, so the confidence, which was fitted without that, says nothing */
export function sureness(photo) {
  if (photo.unfamiliar) return "Not sure: I may not know this kind of picture";
  return photo.forced ? "No score, since you chose words or views" : `${percent(photo.confidence)} sure`;
}

/* Names, titles and colours of the views of a photo */
function viewsOf(photo) {
  const names = Object.keys(photo.views || photo.titles || photo.words[0]?.views || {});
  return names.map((name, index) => {
    const view = photo.views?.[name];
    const position = view ? view.position : index;
    return { name, title: view?.title || photo.titles?.[name] || name, colour: `--view: var(--v${position % 6})`, ...view };
  });
}

function weightOf(word, name) {
  return word.looks ? word.looks[name]?.weight || 0 : word.views?.[name] || 0;
}

/* The weights of all views as one bar */
function stackedBar(word, views) {
  return make("span", { class: "stack", "aria-hidden": "true" }, ...views.map((view) =>
    make("span", { style: `${view.colour}; width: ${100 * weightOf(word, view.name)}%` })));
}

/* A caption with its bars, to look at only */
export function plainCaption(photo) {
  const views = viewsOf(photo);
  const caption = make("p", { class: "plain-caption" });
  for (const word of photo.words) {
    caption.append(make("span", { class: "plain-word" }, make("span", {}, word.word), stackedBar(word, views)), " ");
  }
  if (!photo.words.length) caption.append("(no words)");
  return caption;
}

export function legend(photo) {
  return make("ul", { class: "legend", "aria-label": "Colours of the views" }, ...viewsOf(photo).map((view) =>
    make("li", { style: view.colour, title: view.name }, make("span", { class: "dot" }), view.title)));
}

const DWELL = 90; // milliseconds that the pointer rests on a word before it is shown, so that crossing one does nothing
const HEAT = 64; // pixels of a heat map's side; the browser enlarges it

/* The attention to the cells of a view, smoothed. What the word did not look at is darkened: the more it trusts the view,
   the darker. */
function heatMap(view, look) {
  const cells = look.places.map(([token, share]) => ({ box: view.places[token].box, share }))
    .filter(({ box }) => box && (box[2] - box[0]) * (box[3] - box[1]) < 0.9); // the whole photo is no place in it
  if (!cells.length) return null;
  const values = new Float32Array(HEAT * HEAT);
  for (let y = 0; y < HEAT; y++) {
    for (let x = 0; x < HEAT; x++) {
      let [sum, weights] = [0, 1e-9];
      for (const { box: [x1, y1, x2, y2], share } of cells) {
        const across = ((x + 0.5) / HEAT - (x1 + x2) / 2) / (x2 - x1);
        const down = ((y + 0.5) / HEAT - (y1 + y2) / 2) / (y2 - y1);
        const near = Math.exp(-2 * (across * across + down * down));
        sum += near * share;
        weights += near;
      }
      values[y * HEAT + x] = sum / weights;
    }
  }
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const canvas = make("canvas", { class: "heat", width: HEAT, height: HEAT });
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(HEAT, HEAT);
  const dark = 255 * (0.3 + 0.35 * look.weight);
  values.forEach((value, index) => {
    pixels.data.set([8, 8, 20, dark * (1 - ((value - least) / (most - least + 1e-9)) ** 0.7)], 4 * index);
  });
  context.putImageData(pixels, 0, 0);
  return canvas;
}

/* The boxes of the objects that a word looked at most, with their names */
function objectBoxes(view, look) {
  const most = Math.max(...look.places.map(([, share]) => share), 1e-9);
  return look.places.filter(([token, share]) => view.places[token].box && share > 0.2 * most).slice(0, 5).map(([token, share]) => {
    const { box: [x1, y1, x2, y2], label } = view.places[token];
    const place = `left: ${100 * x1}%; top: ${100 * y1}%; width: ${100 * (x2 - x1)}%; height: ${100 * (y2 - y1)}%`;
    return make("div", { class: "box", style: `${view.colour}; ${place}; opacity: ${0.4 + (0.6 * share) / most}` },
      make("span", {}, `${label} ${percent(share)}`));
  });
}

/* The sentences that a word looked at most. One that several crops retrieved is listed once. */
function sentences(view, look, word, image) {
  const byText = new Map();
  for (const [token, share] of look.places) {
    const { label, box } = view.places[token];
    if (!label) continue;
    const entry = byText.get(label) || { label, share: 0, boxes: [] };
    entry.share += share;
    if (box && !entry.boxes.some((other) => String(other) === String(box))) entry.boxes.push(box);
    byText.set(label, entry);
  }
  const best = [...byText.values()].sort((one, other) => other.share - one.share).slice(0, 5);
  const parts = best.some((entry) => entry.boxes.some((box) => !isWhole(box)));
  const list = make("ul", { class: "sentences" }, ...best.map((entry) => make("li", {},
    parts ? make("span", { class: "crops" }, ...entry.boxes.map((box) => cropOf(image, box))) : "",
    make("span", { class: "text" }, ...marked(entry.label, word)),
    make("span", { class: "share" }, percent(entry.share)))));
  const head = make("p", { class: "found-for" }, make("span", { class: "text" }, "Captions of photos like this"), make("span", { class: "share" }, "attention"));
  if (!parts && best[0]?.boxes.length) head.prepend(cropOf(image, best[0].boxes[0]));
  return best.length ? [head, list] : [];
}

function isWhole([x1, y1, x2, y2]) {
  return x2 - x1 > 0.99 && y2 - y1 > 0.99;
}

/* A small picture of the part of the photo that a sentence was found for */
function cropOf(image, box) {
  const [x1, y1, x2, y2] = box;
  const at = (start, end) => (end - start > 0.99 ? 0 : (100 * start) / (1 - (end - start)));
  const label = isWhole(box) ? "found for the whole photo" : "found for this part of the photo";
  return make("span", { class: "crop", role: "img", "aria-label": label, title: label,
    style: `background-image: url("${image}"); background-size: ${100 / (x2 - x1)}% ${100 / (y2 - y1)}%; `
      + `background-position: ${at(x1, x2)}% ${at(y1, y2)}%`,
  });
}

/* A sentence, with a word set off wherever it says it */
function marked(sentence, word) {
  return sentence.split(/(\s+)/).map((part) =>
    part.toLowerCase().replace(/[.,!?]$/, "") === word ? make("mark", {}, part) : part);
}

/* A bar from 0 to 100 %, with a tick where it was before */
function track(share, before) {
  const bar = make("span", { class: "track", "aria-hidden": "true" }, make("span", { style: `width: ${Math.min(100, 100 * share)}%` }));
  if (before !== undefined) bar.append(make("i", { style: `left: ${100 * before}%` }));
  return bar;
}

function effect(word, after, instead) {
  const [before, then] = [word.probability, after].map(percent);
  const likely = before === then ? "just as likely" : `${after > word.probability ? "more likely" : "less likely"}: ${before} → ${then}`;
  if (instead === "<eos>") return [`the caption would end here; “${word.word}” ${likely}`];
  if (instead) return [make("em", {}, instead), ` instead; “${word.word}” ${likely}`];
  return [`same word, ${likely}`];
}

/* How a word used a view: what it trusted, what it needed, and what it looked at */
function viewCard(view, word, image, only) {
  const look = word.looks[view.name];
  const card = make("section", { class: "view-card", style: view.colour },
    make("h3", { title: `view ${view.name}` }, make("span", { class: "dot" }), view.title));
  if (!view.places.length) {
    card.append(make("p", { class: "soft" }, "This photo has no such view."));
    return card;
  }
  const after = Math.max(0, word.probability - look.lost);
  card.append(make("dl", { class: "bars" },
    make("dt", {}, "trusted"), make("dd", {}, track(look.weight), make("span", {}, percent(look.weight))),
    ...(only ? [] : [make("dt", {}, "without it"), make("dd", {}, track(after, word.probability),
      make("span", {}, ...effect(word, after, look.instead)))])));
  if (view.shows === "sentences") card.append(...sentences(view, look, word.word, image));
  return card;
}

function alternatives(word, index, actions) {
  const row = (text, share, use) => {
    const inside = [make("span", { class: "text" }, text), track(share), make("span", { class: "share" }, percent(share))];
    if (!use) return make("li", {}, make("span", { class: "alternative" }, ...inside));
    const button = make("button", { type: "button", class: "alternative", title: `Go on with “${text}”` }, ...inside);
    button.addEventListener("click", use);
    return make("li", {}, button);
  };
  const list = make("ul", { class: "alternatives" }, row(word.word, word.probability),
    ...word.alternatives.map(([text, share]) => row(text, share, actions.replace && (() => actions.replace(index, text)))));
  const section = make("section", { class: "others-here" }, make("h3", {}, "What else it could have said here"));
  if (actions.replace) section.append(make("p", { class: "soft" }, "Choose a word, and the caption goes on from there."));
  if (word.alternatives[0]?.[1] > word.probability) {
    section.append(make("p", { class: "soft" }, `“${word.alternatives[0][0]}” is likelier here, but makes a whole caption that fits less well.`));
  }
  section.append(list);
  if (actions.ban) {
    const ban = make("button", { type: "button", class: "quiet" }, `Never say “${word.word}”`);
    ban.addEventListener("click", () => actions.ban(word.word));
    section.append(ban);
  }
  return section;
}

/* The word to show first: of those that say something about the photo, the one that the views disagree on most */
function mostDisputed(words) {
  const rank = (word) => (word.content ? 1 : 0) + word.disagreement / 2;
  return words.reduce((best, word, index) => (rank(word) > rank(words[best]) ? index : best), 0);
}

/* Lays out a photo beside its caption. `below` is an element to keep under the photo. Returns a function that draws:

   `draw(photo, actions)`: `actions.replace(index, text)` and `actions.ban(word)` where a server can be asked again,
   `actions.changed`: indices of words to mark, `actions.before`: an element above the caption, `actions.legend`: one that
   names the colours, instead of a plain list. */
export function explainer(root, below = "") {
  const picture = make("img", {});
  const overlay = make("div", { class: "overlay", "aria-hidden": "true" });
  const frame = make("div", { class: "photo" }, picture, overlay);
  picture.addEventListener("load", () => frame.style.setProperty("--ratio", picture.naturalWidth / picture.naturalHeight));
  const file = make("p", { class: "file", dir: "auto" });
  const before = make("div", {});
  const caption = make("p", { class: "caption", role: "group", "aria-label": "Words of the caption" });
  const sure = make("p", { class: "sure" });
  const looked = make("p", { class: "looked" });
  const colours = make("div", {});
  const detail = make("div", { class: "detail", "aria-live": "polite" });
  const alone = make("div", {});
  root.replaceChildren(make("div", { class: "columns" },
    make("div", { class: "words" }, file, before, caption, sure, colours),
    make("div", { class: "side" }, make("div", { class: "seen" }, frame, looked), make("div", { class: "below" }, below, alone)),
    make("div", { class: "why" }, detail)));

  return function draw(photo, actions = {}) {
    const views = viewsOf(photo);
    const explained = photo.words.every((word) => word.looks);
    const focused = [...caption.children].indexOf(document.activeElement);
    let timer = 0;

    const buttons = photo.words.map((word, index) => {
      const weights = views.map((view) => `${view.title} ${percent(weightOf(word, view.name))}`).join(", ");
      const button = make("button", { type: "button", class: "word", "aria-pressed": "false", title: weights, "aria-label": `${word.word}: ${weights}` },
        make("span", {}, word.word), stackedBar(word, views));
      if (actions.changed?.has(index)) button.classList.add("changed");
      button.addEventListener("mouseenter", () => (timer = setTimeout(() => show(index), DWELL)));
      button.addEventListener("mouseleave", () => clearTimeout(timer));
      button.addEventListener("focus", () => show(index));
      button.addEventListener("click", () => show(index));
      button.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (step && buttons[index + step]) buttons[index + step].focus();
        if (event.key === "Escape") show(-1);
      });
      return button;
    });

    function show(index) {
      buttons.forEach((button, number) => {
        button.setAttribute("aria-pressed", String(number === index));
        button.tabIndex = number === Math.max(0, index) ? 0 : -1; // one stop of the tab key; arrows lead to the others
      });
      overlay.replaceChildren();
      looked.textContent = "";
      const word = photo.words[index];
      if (!explained || !word) {
        const hint = explained ? "Choose a word to see where it came from." : "Finding out where each word came from …";
        detail.replaceChildren(make("p", { class: explained ? "soft" : "soft waiting" }, photo.words.length ? hint : ""));
        return;
      }
      const used = views.filter((view) => word.looks[view.name]);
      for (const view of used.filter((each) => each.places.length)) {
        const look = word.looks[view.name];
        if (view.shows === "heat") {
          overlay.append(heatMap(view, look) || "");
          looked.textContent = `Bright: where “${word.word}” looked`;
        }
        if (view.shows === "boxes") overlay.append(...objectBoxes(view, look));
      }
      detail.replaceChildren(
        make("h2", {}, "Why “", make("strong", {}, word.word), "”?"),
        make("div", { class: "view-cards" }, ...used.map((view) => viewCard(view, word, photo.image, used.length === 1))),
        alternatives(word, index, actions));
    }

    if (picture.getAttribute("src") !== photo.image) picture.src = photo.image;
    picture.alt = `Photo: ${photo.caption}`;
    file.textContent = photo.title || "";
    before.replaceChildren(actions.before || "");
    caption.replaceChildren(...(buttons.length ? buttons : [make("span", { class: "soft" }, "(no words)")]));
    sure.textContent = sureness(photo);
    sure.classList.toggle("doubt", Boolean(photo.unfamiliar));
    const named = actions.legend || legend(photo);
    if (colours.firstChild !== named) colours.replaceChildren(named); // a switch in it keeps the focus
    alone.replaceChildren(counterfactuals(photo, views));
    if (focused >= 0 && buttons[focused]) buttons[focused].focus({ preventScroll: true });
    else show(explained && photo.words.length ? mostDisputed(photo.words) : -1);
  };
}

/* What each view alone would have said, and what the others say without it */
function counterfactuals(photo, views) {
  const present = views.filter((view) => view.name in (photo.alone || {}));
  if (present.length < 2) return "";
  const rows = present.map((view) => make("tr", { style: view.colour },
    make("th", { scope: "row", title: `view ${view.name}` }, make("span", { class: "dot" }), view.title),
    make("td", {}, photo.alone[view.name] || "–"), make("td", {}, photo.without[view.name] || "–")));
  const two = present.length === 2; // being without one is having the other alone
  return make("details", { class: "counterfactuals", open: "" }, make("summary", {}, "What each view says on its own"),
    make("table", {},
      make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "view"), make("th", { scope: "col" }, "from it alone"),
        ...(two ? [] : [make("th", { scope: "col" }, "without it")]))),
      make("tbody", {}, ...rows.map((row) => {
        if (two) row.lastChild.remove();
        return row;
      }))));
}
