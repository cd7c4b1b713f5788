"use strict";
// One chart in a card: drawn by uPlot when it comes into view, with values under the cursor and the same as a table.
(() => {
const { el, number, colour, colourName } = Report;
const HEIGHT = 190;
const POINTS_SHOWN = 40;

const alpha = (name, share) => colour(name).replace(/^rgb\((.*)\)$/, `rgba($1, ${share})`);

/** Trailing mean over `width` values, gaps left out. */
const smoothed = (values, width) => {
  const window = [];
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    if (window.push(value) > width) window.shift();
    return window.reduce((sum, one) => sum + one, 0) / window.length;
  });
};

/** Lines that share an x: the union of all of theirs, with gaps where one has no value. */
const aligned = (lines) => {
  const every = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const place = new Map(every.map((x, index) => [x, index]));
  const spread = (x, values) => {
    const full = new Array(every.length).fill(null);
    x.forEach((at, index) => (full[place.get(at)] = values[index] ?? null));
    return full;
  };
  return { x: every, lines: lines.map((line) => ({ ...line, values: spread(line.x, line.values), low: line.low && spread(line.x, line.low), high: line.high && spread(line.x, line.high) })) };
};

/** What uPlot is given: per line itself, and beside it what it is made of (before smoothing) or its interval. */
const plan = (chart, smooth) => {
  const { x, lines } = aligned(chart.lines);
  const data = [x];
  const series = [{}];
  const bands = [];
  for (const line of lines) {
    if (line.low) {
      bands.push({ series: [series.length + 1, series.length], fill: () => alpha(line.colour, 0.13) });
      series.push({ stroke: () => alpha(line.colour, 0.35), width: 1, points: { show: false } }, { stroke: () => alpha(line.colour, 0.35), width: 1, points: { show: false } });
      data.push(line.low, line.high);
    }
    if (smooth > 1 && !line.low) {
      series.push({ stroke: () => alpha(line.colour, 0.28), width: 1, points: { show: false } });
      data.push(line.values);
    }
    line.place = series.length;
    const few = line.values.filter((value) => value !== null).length <= POINTS_SHOWN;
    series.push({ stroke: () => colour(line.colour), width: 1.6, dash: line.dash, points: { show: few && (smooth === 1 || Boolean(line.low)), size: 4, fill: () => colour(line.colour) } });
    data.push(smooth > 1 && !line.low ? smoothed(line.values, smooth) : line.values);
  }
  series.forEach((one) => (one.spanGaps = true));
  return { data, series, bands, lines };
};

const axis = (more) => ({
  stroke: () => colour("--soft"),
  grid: { stroke: () => colour("--grid"), width: 1 },
  ticks: { stroke: () => colour("--grid"), width: 1, size: 4 },
  font: "11px system-ui, sans-serif",
  ...more,
});

/** Room for the longest label of an axis, in pixels. */
const roomFor = (_, labels) => Math.max(40, 14 + 6.5 * Math.max(0, ...(labels ?? []).map((label) => label.length)));

/** What the y axis spans: of values that are all the same, a little around them. */
const span = (_, least, most) => {
  if (least === null) return [0, 1];
  if (least !== most) return uPlot.rangeNum(least, most, 0.1, true);
  const around = Math.abs(least) / 10 || 1;
  return [least - around, most + around];
};

const options = (node, chart, { series, bands }, moved) => ({
  width: Math.max(120, node.clientWidth),
  height: HEIGHT,
  legend: { show: false },
  cursor: { sync: { key: chart.kind }, drag: { x: true, y: false }, points: { size: 6 } },
  scales: { x: { time: false }, y: { range: span } },
  axes: [axis({ size: 28 }), axis({ size: roomFor, values: (_, ticks) => ticks.map(number) })],
  padding: [8, 10, 0, 0],
  series,
  bands,
  hooks: { setCursor: [moved] },
});

const describe = (chart, lines) =>
  `${chart.title}, by ${chart.xTitle}. ` +
  lines
    .map(({ label, values }) => {
      const known = values.filter((value) => value !== null);
      if (!known.length) return `${label}: no values.`;
      const least = known.reduce((a, b) => Math.min(a, b)), most = known.reduce((a, b) => Math.max(a, b));
      return `${label}: from ${number(known[0])} to ${number(known.at(-1))}, least ${number(least)}, most ${number(most)}.`;
    })
    .join(" ") +
  " Left and right arrow keys read values.";

const asTable = (chart) => {
  const { x, lines } = aligned(chart.lines);
  const columns = [[chart.xTitle, "number"], ...lines.map((line) => [line.label, "number"])];
  const rows = x.map((at, place) => [number(at), ...lines.map((line) => number(line.values[place]) + (line.low ? ` (${number(line.low[place])} – ${number(line.high[place])})` : ""))]);
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${chart.title} as a table` }, Report.table(chart.title, columns, rows));
};

/**
 * A card. `chart` has title, unit, kind, xTitle, note and lines: [{label, colour, dash, x, values, low, high}].
 * Gives {node, update(chart, smooth), close()}.
 */
Report.card = (chart, smooth = 1) => {
  let plot = null, drawn = null, current = chart, width = smooth, tabled = false;
  const view = el("div", { class: "plot", tabindex: "0", role: "img" });
  const legend = el("div", { class: "legend", role: "status" });
  const toggle = el("button", { type: "button", class: "quiet", "aria-pressed": "false", click: () => show(!tabled) }, "table");
  const node = el("article", { class: "card" }, el("div", { class: "card-head" }, el("h3", {}, ""), toggle), view, legend);

  const keys = () => {
    const at = plot?.cursor.idx;
    legend.replaceChildren(
      ...(drawn?.lines ?? []).map((line) => {
        const values = drawn.data[line.place];
        const last = values.findLast((value) => value !== null);
        const mark = el("i", { class: line.dash ? "dashed" : "" });
        mark.style.borderColor = `var(${line.colour})`;
        return el("span", {}, mark, line.label, el("b", {}, number(at === null || at === undefined ? last : values[at])));
      }),
      el("span", { class: "at" }, `${current.xTitle} ${at === null || at === undefined ? "" : number(drawn.data[0][at])}`),
    );
  };
  const draw = () => {
    if (tabled || !view.clientWidth) return;
    const kept = plot && { scale: { ...plot.scales.x }, full: [plot.data[0][0], plot.data[0].at(-1)] };
    plot?.destroy();
    drawn = plan(current, width);
    plot = new uPlot(options(view, current, drawn, keys), drawn.data, view);
    if (kept && (kept.scale.min > kept.full[0] || kept.scale.max < kept.full[1])) plot.setScale("x", kept.scale);
    view.setAttribute("aria-label", describe(current, drawn.lines));
    keys();
  };
  const show = (table) => {
    tabled = table;
    toggle.setAttribute("aria-pressed", String(table));
    toggle.textContent = table ? "chart" : "table";
    toggle.setAttribute("aria-label", `${current.title} as a ${table ? "chart" : "table"}`);
    node.querySelector(".scroll")?.remove();
    view.hidden = legend.hidden = table;
    if (table) node.append(asTable(current));
    else draw();
  };
  view.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!plot || step === undefined) return;
    event.preventDefault();
    const last = drawn.data[0].length - 1;
    const at = Math.max(0, Math.min(last, (plot.cursor.idx ?? (step < 0 ? last + 1 : -1)) + step));
    const first = drawn.data[drawn.lines[0].place][at];
    plot.setCursor({ left: plot.valToPos(drawn.data[0][at], "x"), top: first === null ? 1 : plot.valToPos(first, "y") });
  });
  const seen = new IntersectionObserver(([entry]) => entry.isIntersecting && !plot && draw());
  seen.observe(view);
  const sized = new ResizeObserver(() => plot && view.clientWidth && view.clientWidth !== plot.width && plot.setSize({ width: view.clientWidth, height: HEIGHT }));
  sized.observe(view);
  const update = (fresh, smooth = width) => {
    current = fresh;
    width = smooth;
    node.querySelector("h3").replaceChildren(fresh.title, fresh.unit ? el("small", {}, ` ${fresh.unit}`) : "", fresh.note ? el("small", { class: "note" }, fresh.note) : "");
    if (tabled || plot) show(tabled);
    else toggle.setAttribute("aria-label", `${fresh.title} as a table`);
  };
  update(chart);
  const card = { node, update, scale: () => plot && [plot.scales.y.min, plot.scales.y.max], redraw: () => plot?.redraw(false), close: () => { plot?.destroy(); seen.disconnect(); sized.disconnect(); cards.delete(card); } };
  cards.add(card);
  return card;
};

const cards = new Set();
/** After a change between light and dark. */
Report.recolour = () => cards.forEach((card) => card.redraw());

const X_TITLES = { rollout: "step", train: "optimizer step", eval: "after step" };
const DASHES = [undefined, [6, 4], [2, 3], [10, 3, 2, 3]];

/** Names without the parts that all of them begin with; of one name, its last part. */
const shortNames = (names) => {
  const split = names.map((name) => name.split("/"));
  let same = 0;
  while (split.every((parts) => same < parts.length - 1 && parts[same] === split[0][same])) same++;
  return split.map((parts) => parts.slice(names.length === 1 ? 1 : same).join("/") || parts.join("/"));
};

/** The chart of some series over the runs that are shown: colours tell runs apart, or names in one run. */
Report.chartOf = ({ title, kind, names, unit, note }) => {
  const runs = Report.shownRuns();
  const one = Report.data.runs.length === 1;
  const short = shortNames(names);
  const lines = runs.flatMap(({ run, place }) => {
    const { x, series } = run.curves?.[kind] ?? { x: [], series: {} };
    return names
      .filter((name) => series[name])
      .map((name) => ({
        label: [one ? "" : run.name, one || names.length > 1 ? short[names.indexOf(name)] : ""].filter(Boolean).join(" · "),
        colour: colourName(one ? names.indexOf(name) : place),
        dash: one ? undefined : DASHES[names.indexOf(name) % DASHES.length],
        x,
        values: series[name],
      }));
  });
  return { title, kind, unit, note, xTitle: X_TITLES[kind] ?? kind, lines };
};

/** Main charts of all runs, each once. */
Report.mainCharts = () => {
  const charts = new Map();
  for (const run of Report.data.runs) for (const chart of run.charts ?? []) if (!charts.has(chart.title)) charts.set(chart.title, chart);
  return [...charts.values()];
};

/** Keep a grid of cards in step with the charts it should show; `kept` maps a key to its card. */
Report.fillGrid = (grid, kept, charts, smooth = 1) => {
  const wanted = new Map(charts.filter((chart) => chart.lines.length).map((chart) => [chart.key ?? chart.title, chart]));
  for (const [key, card] of kept) {
    if (wanted.has(key)) continue;
    card.node.remove();
    card.close();
    kept.delete(key);
  }
  let before = null;
  for (const [key, chart] of wanted) {
    if (kept.has(key)) kept.get(key).update(chart, smooth);
    else kept.set(key, Report.card(chart, smooth));
    const { node } = kept.get(key);
    const place = before ? before.nextSibling : grid.firstChild;
    if (place !== node) grid.insertBefore(node, place);
    before = node;
  }
};
})();
