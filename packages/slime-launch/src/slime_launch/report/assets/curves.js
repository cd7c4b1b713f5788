"use strict";
// Every series of the run: the main charts, and a list to pick others from.
(() => {
const { el, field, select } = Report;
const cards = new Map();
const chosen = new Set();
let parts = null, smooth = 1, listed = "";

/** Series by kind and name with what is known of them, over all runs. */
const everySeries = () => {
  const found = new Map();
  for (const run of Report.data.runs) {
    for (const [kind, { series }] of Object.entries(run.curves ?? {})) {
      for (const name of Object.keys(series)) {
        const key = `${kind} ${name}`;
        if (!found.has(key)) found.set(key, { key, kind, name, title: run.titles?.[name] ?? "" });
      }
    }
  }
  return [...found.values()].sort((a, b) => a.name.localeCompare(b.name));
};

const draw = () => {
  const known = new Map(everySeries().map((one) => [one.key, one]));
  const picked = [...chosen].filter((key) => known.has(key)).map((key) => {
    const { kind, name, title } = known.get(key);
    return { ...Report.chartOf({ title: name, kind, names: [name], unit: "", note: title }), key };
  });
  const main = parts.main.checked ? Report.mainCharts().map(Report.chartOf) : [];
  Report.fillGrid(parts.grid, cards, [...picked, ...main], smooth);
  parts.none.hidden = cards.size > 0;
};

const pick = (keys, wanted) => {
  for (const key of keys) wanted ? chosen.add(key) : chosen.delete(key);
  for (const box of parts.list.querySelectorAll("input")) box.checked = chosen.has(box.value);
  draw();
};

const fillList = () => {
  const series = everySeries();
  const names = series.map((one) => one.key).join("\n");
  if (names === listed) return;
  listed = names;
  const groups = Map.groupBy ? Map.groupBy(series, (one) => one.name.split("/")[0]) : new Map([["series", series]]);
  parts.list.replaceChildren(
    ...[...groups].map(([group, members]) =>
      el(
        "fieldset",
        {},
        el("legend", {}, group),
        members.map((one) => {
          const box = el("input", { type: "checkbox", change: () => pick([one.key], box.checked) });
          box.value = one.key;
          box.checked = chosen.has(one.key);
          return el("label", { class: "pick" }, box, el("span", {}, one.name.slice(group.length + 1) || one.name, one.title ? el("small", {}, one.title) : ""));
        }),
      ),
    ),
  );
  filter();
};

const filter = () => {
  const words = parts.search.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const label of parts.list.querySelectorAll("label")) {
    const text = `${label.querySelector("input").value} ${label.textContent}`.toLowerCase();
    label.hidden = !words.every((word) => text.includes(word));
  }
  for (const group of parts.list.querySelectorAll("fieldset")) group.hidden = !group.querySelector("label:not([hidden])");
};

const build = (panel) => {
  const shown = () => [...parts.list.querySelectorAll("label:not([hidden]) input")].map((box) => box.value);
  parts = {
    search: el("input", { type: "search", placeholder: "name or meaning", input: () => filter() }),
    main: el("input", { type: "checkbox", checked: true, change: () => draw() }),
    list: el("div", { class: "picks", tabindex: "0", role: "group", "aria-label": "Series" }),
    grid: el("div", { class: "grid" }),
    none: el("p", { class: "empty", hidden: true }, "Pick series at the left."),
  };
  const widths = [["1", "none"], ["5", "5 points"], ["20", "20 points"], ["50", "50 points"]];
  panel.append(
    el(
      "div",
      { class: "split picker" },
      el(
        "aside",
        { "aria-label": "Choice of series" },
        field("find a series", parts.search),
        el("div", { class: "row" },
          el("button", { type: "button", click: () => pick(shown(), true) }, "pick all listed"),
          el("button", { type: "button", click: () => pick([...chosen], false) }, "pick none")),
        parts.list,
      ),
      el(
        "div",
        {},
        el("div", { class: "row" },
          el("label", { class: "pick" }, parts.main, el("span", {}, "main charts")),
          field("smooth over", select(widths, "1", (value) => { smooth = Number(value); draw(); })),
          el("span", { class: "soft" }, "drag to zoom, double-click to see all, arrow keys read values")),
        parts.none,
        parts.grid,
      ),
    ),
  );
};

Report.tabs.curves = {
  title: "Curves",
  render: (panel) => {
    if (!parts) build(panel);
    fillList();
    draw();
  },
};
})();
