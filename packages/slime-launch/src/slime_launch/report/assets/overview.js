"use strict";
// The first tab: what came out, the main curves, evaluations with their intervals, the command.
(() => {
const { el, number, section, duration } = Report;
const cards = new Map();
let parts = null;

/** Headlines: tiles for one run, a table for several. */
const headline = (runs) => {
  if (runs.length === 1) {
    return el("dl", { class: "tiles" }, (runs[0].headline ?? []).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }
  const names = [...new Set(runs.flatMap((run) => (run.headline ?? []).map(([name]) => name)))];
  const values = runs.map((run) => new Map(run.headline ?? []));
  const columns = [["", "text"], ...runs.map((run) => [run.name, "text"])];
  const rows = names.map((name) => [name, ...values.map((found) => found.get(name) ?? "–")]);
  return el("div", { class: "scroll" }, Report.table("Headlines of the runs", columns, rows, { class: "wide" }));
};

const differing = (runs) => {
  const rows = Report.gatherSettings(runs).filter((row) => row.differs);
  if (!rows.length) return el("p", { class: "empty" }, "The runs have the same settings.");
  const columns = [["setting", "text"], ...runs.map((run) => [run.name, "text"])];
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Settings that differ" }, Report.table("Settings that differ", columns, rows.map((row) => [row.name, ...row.values.map((value) => el("code", {}, value ?? "not set"))]), { class: "wide settings" }));
};

const facts = (run) =>
  [run.directory, `began ${Report.moment(run.began)}`, run.ended ? `ended ${Report.moment(run.ended)}, after ${duration(run.ended - run.began)}` : null].filter(Boolean).join(" · ");

/** The score with its interval on the scale of all scores of the table. */
const interval = (row, low, high) => {
  const place = (value) => `${(100 * (value - low)) / (high - low || 1)}%`;
  const bar = el("i"), dot = el("b");
  if (row.low !== null && row.low !== undefined) {
    bar.style.left = place(row.low);
    bar.style.width = `${(100 * (row.high - row.low)) / (high - low || 1)}%`;
  }
  dot.style.left = place(row.score);
  return el("span", { class: "interval", "aria-hidden": "true" }, bar, dot);
};

const evalTable = (runs) => {
  const rows = runs.flatMap((run) => (run.evals ?? []).map((row) => ({ ...row, run: run.name })));
  if (!rows.length) return el("p", { class: "empty" }, "No evaluations: the run had no held-out prompts.");
  const ends = rows.flatMap((row) => [row.score, row.low ?? row.score, row.high ?? row.score]).filter((value) => value !== null);
  const low = Math.min(...ends), high = Math.max(...ends);
  const several = runs.length > 1;
  const others = [...new Set(rows.flatMap((row) => Object.keys(row.metrics ?? {})))];
  const columns = [["set", "text"], ...(several ? [["run", "text"]] : []), ["after step", "number"], [rows.every((row) => row.measure === "loss") ? "loss" : "score", "number"], ["95 % interval", "number"], ["", "bar"], ["samples", "number"], ...others.map((name) => [name, "number"])];
  rows.sort((a, b) => a.set.localeCompare(b.set) || a.run.localeCompare(b.run) || a.rollouts - b.rollouts);
  const cells = rows.map((row) => [
    row.set, ...(several ? [row.run] : []), number(row.rollouts), row.score?.toFixed(3) ?? "–",
    row.low === null || row.low === undefined ? "–" : `${row.low.toFixed(3)} – ${row.high.toFixed(3)}`,
    interval(row, low, high), number(row.samples), ...others.map((name) => number(row.metrics?.[name])),
  ]);
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Evaluations" }, Report.table("Scores on held-out prompts with 95 % intervals", columns, cells, { class: "wide" }));
};

/** Scores over rollouts, each set a chart, with the intervals as bands. */
const evalCharts = () => {
  const sets = [...new Set(Report.data.runs.flatMap((run) => (run.evals ?? []).map((row) => row.set)))];
  return sets.map((set) => ({
    key: `eval of ${set}`, title: `Evaluation: ${set}`, kind: "eval", unit: "", xTitle: "after step", note: "bands: 95 % intervals",
    lines: Report.shownRuns().map(({ run, place }) => {
      const rows = (run.evals ?? []).filter((row) => row.set === set);
      const line = { label: Report.data.runs.length === 1 ? rows[0]?.measure ?? "score" : run.name, colour: Report.colourName(place), x: rows.map((row) => row.rollouts), values: rows.map((row) => row.score) };
      return rows.some((row) => row.low !== null && row.low !== undefined) ? { ...line, low: rows.map((row) => row.low ?? row.score), high: rows.map((row) => row.high ?? row.score) } : line;
    }).filter((line) => line.x.length),
  }));
};

const build = (panel) => {
  parts = { head: el("div"), differing: el("div"), grid: el("div", { class: "grid" }), evals: el("div"), commands: el("div") };
  parts.differs = section("Settings that differ", parts.differing);
  panel.append(
    el("div", { class: "halves" }, section("What came out", parts.head), parts.differs),
    section("Main curves", parts.grid),
    section("Evaluations", parts.evals),
    section("Commands", parts.commands),
  );
};

const commands = (runs) =>
  runs.map((run) => {
    const copy = el("button", { type: "button", class: "quiet", click: () => Report.copy(run.command, copy) }, "copy");
    return el("div", { class: "command" }, el("p", { class: "soft" }, runs.length > 1 ? `${run.name}: ` : "", facts(run)), el("div", { class: "code" }, copy, el("pre", {}, run.command ?? "")));
  });

/** Put text on the clipboard and say so on the button. */
Report.copy = (text, button) => {
  const words = button.textContent;
  const say = (answer) => {
    button.textContent = answer;
    setTimeout(() => (button.textContent = words), 1500);
  };
  const copied = navigator.clipboard?.writeText(text) ?? Promise.reject(new Error("no clipboard"));
  copied.then(() => say("copied"), () => say("not allowed"));
};

Report.tabs.overview = {
  title: "Overview",
  render: (panel) => {
    if (!parts) build(panel);
    const { runs } = Report.data;
    const each = (...names) => runs.map((run) => [run.name, ...names.map((name) => run[name])]);
    Report.refill(parts.head, each("headline"), () => headline(runs));
    parts.head.parentElement.classList.toggle("whole", runs.length === 1);
    parts.differs.hidden = runs.length === 1;
    Report.refill(parts.differing, each("settings"), () => differing(runs));
    Report.fillGrid(parts.grid, cards, [...evalCharts(), ...Report.mainCharts().map(Report.chartOf)]);
    Report.refill(parts.evals, each("evals"), () => evalTable(runs));
    Report.refill(parts.commands, each("command", "directory", "began", "ended"), () => commands(runs));
  },
};
})();
