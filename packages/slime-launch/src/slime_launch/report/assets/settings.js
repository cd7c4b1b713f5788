"use strict";
// Settings with the origin of each value; of several runs, what differs comes first.
(() => {
const { el, number, field, select, offer, debounce } = Report;
let parts = null;

/** One row per name, {name, values, origins, differs}, with a place per run; what differs comes first, defaults last. */
Report.gatherSettings = (runs) => {
  const rows = new Map();
  runs.forEach((run, place) => {
    for (const [name, value, origin] of run.settings ?? []) {
      if (!rows.has(name)) rows.set(name, { name, values: new Array(runs.length).fill(null), origins: new Array(runs.length).fill(null) });
      rows.get(name).values[place] = value;
      rows.get(name).origins[place] = origin;
    }
  });
  const every = [...rows.values()];
  for (const row of every) {
    row.differs = new Set(row.values).size > 1;
    row.given = row.origins.some((origin) => origin !== null && origin !== "default");
  }
  return every.sort((a, b) => b.differs - a.differs || b.given - a.given || a.name.localeCompare(b.name));
};

const draw = () => {
  const { runs } = Report.data;
  const words = parts.search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = Report.gatherSettings(runs).filter((row) => {
    const text = [row.name, ...row.values, ...row.origins].join(" ").toLowerCase();
    return words.every((word) => text.includes(word)) && (!parts.origin.value || row.origins.includes(parts.origin.value)) && (!parts.differing.checked || row.differs);
  });
  const columns = [["setting", "text"], ...runs.flatMap((run) => [[runs.length > 1 ? run.name : "value", "text"], ["origin", "text"]])];
  const cells = rows.map((row) => [
    row.differs ? el("span", {}, row.name, " ", el("span", { class: "chip warn" }, "differs")) : row.name,
    ...row.values.flatMap((value, place) => [value === null ? el("span", { class: "soft" }, "not set") : el("code", {}, value), el("span", { class: row.origins[place] === "default" ? "soft" : "chip" }, row.origins[place] ?? "–")]),
  ]);
  parts.count.textContent = `${number(rows.length)} settings`;
  Report.refill(parts.table, [columns, rows], () => rows.length ? Report.table("Settings and where their values come from", columns, cells, { class: "wide settings" }) : el("p", { class: "empty" }, "No setting passes the filter."));
};

const build = (panel) => {
  parts = {
    search: el("input", { type: "search", placeholder: "name, value or origin", input: debounce(draw) }),
    origin: select([["", "any"]], "", draw),
    differing: el("input", { type: "checkbox", change: () => draw() }),
    count: el("span", { class: "soft", role: "status" }),
    table: el("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Settings" }),
  };
  parts.only = el("label", { class: "pick" }, parts.differing, el("span", {}, "only what differs"));
  panel.append(el("form", { class: "row filters", role: "search", "aria-label": "Filter settings", submit: (event) => event.preventDefault() }, field("find", parts.search), field("origin", parts.origin), parts.only, parts.count), parts.table);
};

Report.tabs.settings = {
  title: "Settings",
  render: (panel) => {
    if (!parts) build(panel);
    const { runs } = Report.data;
    parts.only.hidden = runs.length === 1;
    offer(parts.origin, [["", "any"], ...[...new Set(runs.flatMap((run) => (run.settings ?? []).map(([, , origin]) => origin)))].sort().map((origin) => [origin, origin])]);
    draw();
  },
};
})();
