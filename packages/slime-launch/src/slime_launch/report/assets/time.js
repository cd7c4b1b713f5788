"use strict";
// The tab of the timeline: the drawing with its controls, what time was lost to, and sums per lane.
(() => {
const { el, section, duration, percent, field } = Report;
let parts = null, drawing = null, drawnOf = null;

const legend = (kinds) => {
  const colours = Report.workColours(kinds);
  return kinds.map((what, place) => {
    const mark = el("i", { class: what.startsWith("wait") ? "thin" : "" });
    mark.style.background = `var(${colours[place]})`;
    return el("span", {}, mark, what);
  });
};

/** Time lost, greatest first, as a table whose bars show the shares. */
const lostTable = (lost) => {
  if (!lost?.length) return el("p", { class: "empty" }, "No times are known.");
  const rows = [...lost].sort((a, b) => b.seconds - a.seconds).map((row) => [row.what, Report.bar(row.share), percent(row.share), duration(row.seconds)]);
  return Report.table("Time lost, and to what", [["lost to", "text"], ["", "bar"], ["share", "number"], ["time", "number"]], rows, { class: "wide" });
};

/** A share as a bar; the figure stands beside it. */
Report.bar = (share, colour = "--c0") => {
  const bar = el("i");
  bar.style.width = `${100 * Math.max(0, Math.min(1, share ?? 0))}%`;
  bar.style.background = `var(${colour})`;
  return el("span", { class: "share", "aria-hidden": "true" }, bar);
};

const sums = ({ kinds, lanes }) => {
  const end = lanes.reduce((most, lane) => lane.spans.reduce((last, span) => Math.max(last, span[0] + span[1]), most), 0);
  const columns = [["lane", "text"], ...kinds.map((what) => [what, "number"]), ["no entry", "number"]];
  const rows = lanes.map((lane) => {
    const totals = new Array(kinds.length).fill(0);
    for (const [, seconds, what] of lane.spans) totals[what] += seconds;
    const rest = Math.max(0, end - totals.reduce((sum, one) => sum + one, 0));
    const cell = (seconds) => (seconds ? el("span", { title: percent(seconds / end) }, duration(seconds), el("small", {}, ` ${percent(seconds / end)}`)) : "–");
    return [lane.who, ...totals.map(cell), cell(rest)];
  });
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Sums per lane" }, Report.table("Time of each lane by kind of work, and its share of the run", columns, rows, { class: "wide" }));
};

const build = (panel) => {
  const say = (words) => (parts.said.textContent = words || "Point at a bar, or focus the drawing and use the arrow keys.");
  parts = { said: el("p", { class: "said", role: "status" }), legend: el("div", { class: "legend", role: "group", "aria-label": "Colours" }), lost: el("div"), sums: el("div"), missing: el("p", { class: "empty", hidden: true }, "This run has no times of who was busy when.") };
  drawing = Report.timeline(say);
  say("");
  const button = (words, name, call) => el("button", { type: "button", "aria-label": name, title: name, click: call }, words);
  const rollout = el("input", { type: "number", min: "0", class: "short", change: () => {
    if (rollout.value !== "" && !drawing.focusRollout(Number(rollout.value))) say(`No entry of step ${rollout.value}.`);
  } });
  panel.append(
    section(
      "Who was busy when",
      el("div", { class: "row" },
        button("+", "zoom in", () => drawing.zoom(0.6)), button("−", "zoom out", () => drawing.zoom(1 / 0.6)),
        button("←", "earlier", () => drawing.pan(-0.5)), button("→", "later", () => drawing.pan(0.5)), button("all", "show the whole run", () => drawing.all()),
        field("go to step", rollout), parts.legend),
      parts.missing, drawing.node, parts.said,
    ),
    section("Time lost", parts.lost),
    section("Sums", parts.sums),
  );
};

Report.tabs.time = {
  title: "Time",
  render: (panel) => {
    if (!parts) build(panel);
    const run = Report.run();
    const timeline = run.timeline ?? { kinds: [], lanes: [] };
    parts.missing.hidden = timeline.lanes.length > 0;
    drawing.node.hidden = timeline.lanes.length === 0;
    Report.refill(parts.legend, timeline.kinds, () => legend(timeline.kinds));
    drawing.update(timeline, drawnOf === run.name);
    drawnOf = run.name;
    Report.refill(parts.lost, timeline.lost ?? null, () => lostTable(timeline.lost));
    Report.refill(parts.sums, timeline, () => sums(timeline));
  },
  recolour: () => drawing?.redraw(),
};
})();
