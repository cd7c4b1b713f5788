"use strict";
// The sample browser: filters, the table, and which sample is open.
(() => {
const { el, number, field, select, offer, debounce } = Report;
const PROMPT_SHOWN = 160;
// Where not all columns fit, those with the highest numbers of `responsive` are left out.
const COLUMNS = [
  { title: "step", field: "rollout", responsive: 2, width: 70, sorter: "number" },
  { title: "index", field: "index", responsive: 4, width: 66, sorter: "number" },
  { title: "group", field: "group", responsive: 6, width: 66, sorter: "number", visible: false },
  { title: "reward", field: "reward", responsive: 1, width: 72, sorter: "number" },
  { title: "length", field: "length", responsive: 3, width: 68, sorter: "number" },
  { title: "status", field: "status", responsive: 5, width: 90, sorter: "string" },
  { title: "dropped", field: "dropped", responsive: 6, width: 86, sorter: "string" },
  { title: "prompt", field: "prompt", responsive: 0, minWidth: 120, sorter: "string" },
];
const NUMBERS = new Set(["rollout", "index", "group", "reward", "length"]);
let parts = null, table = null, built = null, shownOf = null, open = null, found = null, asked = null;

const rows = (run) =>
  (run.samples ?? []).map((sample, id) => ({
    id, rollout: sample.rollout, index: sample.index, group: sample.group, reward: sample.reward, length: sample.length,
    status: sample.failure ? "not scored" : sample.status, dropped: sample.dropped ?? "", prompt: Report.promptStart(sample, PROMPT_SHOWN),
  }));

const cell = (view) => {
  const value = view.getValue();
  return document.createTextNode(NUMBERS.has(view.getField()) ? number(value) : String(value ?? ""));
};

const bound = (input) => (input.value === "" ? null : Number(input.value));

/** Whether a row passes every filter but the search. */
const passes = (row) => {
  const { lowReward, highReward, lowLength, highLength, rollout } = parts.bounds;
  const within = (value, low, high) => (low === null && high === null) || (value !== null && value !== undefined && (low === null || value >= low) && (high === null || value <= high));
  const dropped = parts.dropped.value;
  return (
    within(row.reward, bound(lowReward), bound(highReward)) &&
    within(row.length, bound(lowLength), bound(highLength)) &&
    within(row.rollout, bound(rollout), bound(rollout)) &&
    (parts.status.value === "" || row.status === parts.status.value) &&
    (dropped === "" || (dropped === "kept" ? !row.dropped : dropped === "any" ? Boolean(row.dropped) : row.dropped === dropped.slice(1)))
  );
};

/** Ids of samples whose prompt or response has the words, or null for all. */
const search = async (words) => {
  if (!words) return null;
  const ids = new Set();
  const { samples } = Report.run();
  for (let id = 0; id < samples.length; id++) if ((await Report.searchText(samples[id])).includes(words)) ids.add(id);
  return ids;
};

const refilter = async () => {
  const words = parts.search.value.trim().toLowerCase().replaceAll(/\s+/g, " ");
  asked = words;
  const ids = await search(words);
  if (asked !== words || !table) return;
  found = ids;
  await built;
  table.setFilter((row) => passes(row) && (found === null || found.has(row.id)));
};

const count = () => {
  const run = Report.run();
  const shown = table?.getDataCount("active") ?? 0, kept = run.samples?.length ?? 0;
  parts.count.textContent = `${number(shown)} of ${number(kept)} samples` + (run.samples_total > kept ? `; ${number(run.samples_total)} were generated` : "");
};

const order = () => table.getData("active").map((row) => row.id);

/** Open a sample by its place in the run's list. */
const show = async (id, { scroll = true } = {}) => {
  const run = Report.run();
  const sample = run.samples?.[id];
  if (!sample) return;
  open = { run: run.name, rollout: sample.rollout, index: sample.index };
  mark(id);
  Report.setHash("samples", { ...(Report.data.runs.length > 1 ? { run: run.name } : {}), rollout: sample.rollout, index: sample.index });
  if (scroll && table.getRow(id)) table.scrollToRow(id, "center", false).catch(() => {}); // it may be filtered out
  await Report.showSample(parts.detail, run, sample);
};

const mark = (id) => {
  table.deselectRow();
  if (table.getRow(id)) table.selectRow(id);
};

const opened = () => Report.run().samples?.findIndex((sample) => open?.run === Report.run().name && sample.rollout === open.rollout && sample.index === open.index) ?? -1;

/** Open the sample that lies some rows further in the table's order. */
const go = (by) => {
  const ids = order();
  if (!ids.length) return;
  const place = ids.indexOf(opened());
  show(ids[Math.max(0, Math.min(ids.length - 1, place === -1 ? 0 : place + by))]);
};
Report.openSample = (sample) => show(Report.run().samples.indexOf(sample));

const sort = () => built.then(() => table.setSort(parts.sort.value, parts.down.getAttribute("aria-pressed") === "true" ? "desc" : "asc"));

const makeTable = () => {
  table = new Tabulator(parts.table, {
    data: rows(Report.run()),
    columns: COLUMNS.map((column) => ({ ...column, formatter: cell, headerHozAlign: NUMBERS.has(column.field) ? "right" : "left", hozAlign: NUMBERS.has(column.field) ? "right" : "left", sorterParams: NUMBERS.has(column.field) ? { alignEmptyValues: "bottom" } : {} })),
    index: "id", height: "100%", layout: "fitColumns", responsiveLayout: "hide", selectableRows: 1, resizableRows: false, placeholder: "no sample passes the filters",
    rowHeight: 26,
  });
  built = new Promise((resolve) => table.on("tableBuilt", resolve));
  table.on("tableBuilt", () => parts.table.querySelector(".tabulator-tableholder").setAttribute("aria-label", "Rows of samples"));
  table.on("rowClick", (_, row) => show(row.getData().id, { scroll: false }));
  table.on("dataFiltered", () => setTimeout(count));
  table.on("dataLoaded", () => setTimeout(count));
  parts.table.setAttribute("aria-label", "Samples; up and down arrow keys open one after another");
  parts.table.tabIndex = 0;
  parts.table.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined || event.target !== parts.table) return;
    event.preventDefault();
    go(by);
  });
};

const build = (panel) => {
  const later = debounce(refilter);
  const input = (type, attributes = {}) => el("input", { type, input: later, ...attributes });
  const from = (low, high, what) => el("span", { class: "range" }, low, "–", high, void low.setAttribute("aria-label", `${what} from`), void high.setAttribute("aria-label", `${what} to`));
  parts = {
    search: input("search", { placeholder: "words of prompt or response" }),
    bounds: { lowReward: input("number", { step: "any" }), highReward: input("number", { step: "any" }), lowLength: input("number", { min: "0" }), highLength: input("number", { min: "0" }), rollout: input("number", { min: "0" }) },
    status: select([["", "any"]], "", later),
    dropped: select([["", "any"]], "", later),
    sort: select(COLUMNS.map((column) => column.field), "rollout", () => sort()),
    down: el("button", { type: "button", "aria-pressed": "false", "aria-label": "greatest first", title: "greatest first", click: () => {
      parts.down.setAttribute("aria-pressed", String(parts.down.getAttribute("aria-pressed") !== "true"));
      sort();
    } }, "↓"),
    count: el("span", { class: "soft", role: "status" }),
    table: el("div", { class: "samples" }),
    detail: el("div", { class: "detail", "aria-label": "The open sample", role: "region" }),
  };
  const { lowReward, highReward, lowLength, highLength, rollout } = parts.bounds;
  const reset = () => {
    for (const control of [parts.search, parts.status, parts.dropped, ...Object.values(parts.bounds)]) control.value = "";
    refilter();
  };
  panel.append(
    el("form", { class: "row filters", role: "search", "aria-label": "Filter samples", submit: (event) => event.preventDefault() },
      field("text", parts.search), el("div", { class: "field", role: "group", "aria-label": "Reward" }, el("span", {}, "reward"), from(lowReward, highReward, "reward")),
      el("div", { class: "field", role: "group", "aria-label": "Length" }, el("span", {}, "length"), from(lowLength, highLength, "length")),
      field("step", rollout), field("status", parts.status), field("dropped", parts.dropped)),
    el("div", { class: "row" }, field("sort by", parts.sort), parts.down,
      el("button", { type: "button", click: () => go(-1) }, "previous"), el("button", { type: "button", click: () => go(1) }, "next"),
      el("button", { type: "button", click: reset }, "clear filters"), parts.count),
    el("div", { class: "split browser" }, parts.table, parts.detail),
  );
  parts.detail.append(el("p", { class: "empty" }, "Choose a sample in the table."));
  makeTable();
};

const choices = (run) => {
  const every = rows(run);
  offer(parts.status, [["", "any"], ...[...new Set(every.map((row) => row.status))].sort().map((status) => [status, status])]);
  const reasons = [...new Set(every.map((row) => row.dropped).filter(Boolean))].sort();
  offer(parts.dropped, [["", "any"], ["kept", "kept"], ...(reasons.length ? [["any", "dropped"], ...reasons.map((reason) => [`=${reason}`, reason])] : [])]);
};

Report.tabs.samples = {
  title: "Samples",
  render: async (panel) => {
    if (!parts) build(panel);
    const run = Report.run();
    const fresh = shownOf !== run;
    const other = fresh && shownOf?.name !== run.name;
    shownOf = run;
    choices(run);
    await built;
    if (fresh) await table.replaceData(rows(run));
    if (fresh && parts.search.value) await refilter();
    count();
    const id = opened();
    if (id >= 0) mark(id);
    else if (other) parts.detail.replaceChildren(el("p", { class: "empty" }, run.samples?.length ? "Choose a sample in the table." : "No texts were kept of this run; --report-samples keeps them."));
  },
  /** A link such as #samples?rollout=3&index=97. */
  follow: async (words) => {
    await built;
    const rollout = Number(words.get("rollout")), index = Number(words.get("index"));
    if (!words.has("index") || (open && open.run === Report.run().name && open.rollout === rollout && open.index === index)) return;
    const id = Report.run().samples?.findIndex((sample) => sample.rollout === rollout && sample.index === index) ?? -1;
    if (id >= 0) await show(id);
    else parts.detail.replaceChildren(el("p", { class: "empty" }, `Sample ${index} of step ${rollout} was not kept.`));
  },
};
})();
