"use strict";
// The namespace of the page's scripts, and what all of them use: elements, numbers as text, colours.
const Report = { data: null, tabs: {}, state: { run: 0, hidden: new Set() } };

(() => {
/**
 * Build an element. Text from a run is only ever a child, which becomes a text node: never markup, never an attribute
 * that could hold code.
 */
Report.el = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(2)) {
    if (child !== null && child !== undefined) node.append(child instanceof Node ? child : String(child));
  }
  return node;
};
const el = Report.el;

/** A number for people: four significant digits, thousands apart, a dash where there is none. */
Report.number = (value) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0"; // of -0, too
  if (Number.isInteger(value)) return value.toLocaleString("en").replaceAll(",", "\u2009");
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en").replaceAll(",", "\u2009");
  return String(Number(value.toPrecision(4)));
};

/** A duration for people. */
Report.duration = (seconds) => {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(1)} min`;
  return `${(seconds / 3600).toFixed(2)} h`;
};

Report.percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)} %`);
Report.moment = (time) => (time ? new Date(time * 1000).toISOString().slice(0, 19).replace("T", " ") + " UTC" : "–");

// Okabe and Ito's colours, which people with colour-blindness can tell apart, see report.css.
const COLOURS = 8;
Report.colourName = (place) => `--c${place % COLOURS}`;

let probe = null;
/** What a CSS variable is now, for a canvas: in the light and in the dark. */
Report.colour = (name) => {
  probe ??= document.body.appendChild(el("span", { hidden: true }));
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
};

/** An ordinary table: `columns` are [title, "number", "bar" or "text"], rows hold text or elements. Narrow windows show columns' titles in cells. */
Report.table = (caption, columns, rows, attributes = {}) =>
  el(
    "table",
    attributes,
    el("caption", { class: attributes["data-caption"] ? "" : "unseen" }, caption),
    el("thead", {}, el("tr", {}, columns.map(([title, kind]) => el("th", { scope: "col", class: kind }, title)))),
    el(
      "tbody",
      {},
      rows.map((row) =>
        el("tr", {}, row.map((cell, place) => el(place ? "td" : "th", { class: columns[place][1], scope: place ? null : "row", "data-column": place ? columns[place][0] : null }, cell))),
      ),
    ),
  );

/** A part of a tab with its heading. */
Report.section = (title, ...children) => el("section", {}, el("h2", {}, title), ...children);

/** A control with the words that name it. */
Report.field = (words, control) => el("label", { class: "field" }, el("span", {}, words), control);

/** A list to choose from; `choices` are texts, or [value, text]. */
Report.select = (choices, value, change, attributes = {}) => {
  const node = el("select", { ...attributes, change: () => change(node.value) });
  for (const choice of choices) {
    const [key, text] = Array.isArray(choice) ? choice : [choice, choice];
    const option = el("option", {}, text);
    option.value = key;
    node.append(option);
  }
  node.value = value;
  return node;
};

const filled = new WeakMap();
/** Put what `make` makes of `source` into a node; nothing moves, and no focus is lost, where the source is as before. */
Report.refill = (node, source, make) => {
  const key = JSON.stringify(source);
  if (filled.get(node) === key) return;
  filled.set(node, key);
  node.replaceChildren(...[make()].flat());
};

/** Other choices for a list; the chosen one stays where it is still offered. */
Report.offer = (node, choices) => {
  const value = node.value;
  Report.refill(node, choices, () => [...Report.select(choices, value, () => {}).childNodes]);
  node.value = value;
  if (node.selectedIndex < 0) node.selectedIndex = 0;
};

Report.debounce = (call, milliseconds = 150) => {
  let timer = 0;
  return (...words) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...words), milliseconds);
  };
};

Report.run = () => Report.data.runs[Report.state.run];
/** Runs that are drawn, each with its place, which is its colour. */
Report.shownRuns = () =>
  Report.data.runs.map((run, place) => ({ run, place })).filter(({ run }) => !Report.state.hidden.has(run.name));

Report.problem = (words) => {
  const node = document.getElementById("problem");
  node.textContent = words;
  node.hidden = !words;
};
window.addEventListener("error", (event) => Report.problem(`This page failed: ${event.message}`));
window.addEventListener("unhandledrejection", (event) => Report.problem(`This page failed: ${event.reason}`));
})();
