"use strict";
// A response with its tokens coloured by a quantity, and the values of one token.
(() => {
const { el, number } = Report;
const STRONGEST = 60; // percent of the colour at the end of a scale
const SURPRISE = 6; // nats of -log p at the end of the scale
const QUIET = 0.98; // quantile that a scale ends at, so that one token doesn't pale all others

const drift = (sample, at) => {
  const engine = sample.log_probs?.[at], trainer = sample.train_log_probs?.[at];
  return engine === null || engine === undefined || trainer === null || trainer === undefined ? null : trainer - engine;
};

/** Whether the engine sampled a token: by its version, else by the mask. */
const sampled = (sample, at) => (sample.versions ? sample.versions[at] >= 0 : sample.mask ? sample.mask[at] === 1 : true);

/** Stretches of tokens that were sampled, and that were not: [{start, stop, sampled}]. */
Report.turns = (sample) => {
  const turns = [];
  for (let at = 0; at < (sample.tokens?.length ?? 0); at++) {
    const own = sampled(sample, at), last = turns.at(-1);
    if (last && last.sampled === own) last.stop = at + 1;
    else turns.push({ start: at, stop: at + 1, sampled: own });
  }
  return turns;
};

const tint = (name, percent) => `color-mix(in srgb, var(${name}) ${Math.round(percent)}%, transparent)`;

/** The end of a scale over values of either sign. */
const reach = (values) => {
  const sizes = values.filter((value) => value !== null && value !== undefined).map(Math.abs).sort((a, b) => a - b);
  return sizes.length ? sizes[Math.min(sizes.length - 1, Math.floor(QUIET * sizes.length))] || sizes.at(-1) || 1 : 1;
};

const signed = (values, [less, more]) => {
  const most = reach(values);
  const colour = (value) => (value === null || value === undefined || value === 0 ? "" : tint(value > 0 ? "--more" : "--less", STRONGEST * Math.min(1, Math.abs(value) / most)));
  return { colour: (at) => colour(values[at]), legend: [[colour(-most), `−${number(most)} ${less}`], [colour(-most / 3), ""], ["", "0"], [colour(most / 3), ""], [colour(most), `+${number(most)} ${more}`]] };
};

const ramp = (values, most, name, words) => {
  const colour = (value) => (value === null || value === undefined ? "" : tint(name, STRONGEST * Math.min(1, Math.max(0, value) / most)));
  return { colour: (at) => colour(values[at]), legend: [0, 0.33, 0.66, 1].map((share) => [colour(share * most), share === 0 ? "0" : share === 1 ? `${number(most)} ${words}` : ""]) };
};

const listed = (keys, texts, grey) => {
  const every = [...new Set(keys)].sort((a, b) => a - b);
  const colour = (key) => tint(grey(key) ? "--wait" : Report.colourName(every.filter((one) => !grey(one)).indexOf(key)), 38);
  return { colour: (at) => colour(keys[at]), legend: every.map((key) => [colour(key), texts(key)]) };
};

const LISTED_TURNS = 8;
const byTurn = (sample) => {
  const keys = [];
  Report.turns(sample).forEach((turn, place) => keys.push(...new Array(turn.stop - turn.start).fill(turn.sampled ? place : -1)));
  const scale = listed(keys, (key) => (key === -1 ? "not sampled: tools, templates" : `turn ${key / 2 + 1}`), (key) => key === -1);
  return { ...scale, legend: scale.legend.slice(0, LISTED_TURNS) };
};

/** What tokens can be coloured by: whether it is known of a sample, and its scale. */
Report.quantities = {
  advantage: { has: (s) => s.advantages, scale: (s) => signed(s.advantages, ["discouraged", "encouraged"]) },
  "log-prob drift": { has: (s) => s.log_probs && s.train_log_probs, scale: (s) => signed(s.tokens.map((_, at) => drift(s, at)), ["engine likelier", "trainer likelier"]) },
  surprise: { has: (s) => s.log_probs, scale: (s) => ramp(s.log_probs.map((value) => (value === null ? null : -value)), SURPRISE, "--c3", "nats, −log p of the engine") },
  mask: { has: (s) => s.tokens, scale: (s) => listed(s.tokens.map((_, at) => s.mask?.[at] ?? 1), (key) => (key ? "trained on" : "masked out"), (key) => !key) },
  version: { has: (s) => s.versions, scale: (s) => listed(s.versions, (key) => (key < 0 ? "not sampled" : `weights ${key}`), (key) => key < 0) },
  turn: { has: (s) => s.tokens, scale: byTurn },
  nothing: { has: () => true, scale: () => ({ colour: () => "", legend: [] }) },
};

/** Every value of one token as words. */
const values = (sample, at) => {
  const place = sample.cut && at >= sample.cut.at ? at + sample.cut.left_out : at;
  const rows = [["token", `${place + 1} of ${sample.length}`], ["text", JSON.stringify(sample.tokens[at])]];
  if (sample.log_probs) rows.push(["engine log p", number(sample.log_probs[at])]);
  if (sample.train_log_probs) rows.push(["trainer log p", number(sample.train_log_probs[at])]);
  if (drift(sample, at) !== null) rows.push(["drift", number(drift(sample, at))]);
  if (sample.advantages) rows.push(["advantage", number(sample.advantages[at])]);
  if (sample.versions) rows.push(["weights", sample.versions[at] < 0 ? "not sampled" : String(sample.versions[at])]);
  rows.push(["mask", String(sample.mask?.[at] ?? 1)]);
  return rows.flatMap(([name, value]) => [el("span", {}, `${name} `, el("b", {}, value), "  ")]);
};

/** The response. Gives {node, colourBy(name), jump(at)}. */
Report.response = (sample, quantity) => {
  const legend = el("div", { class: "legend", role: "group", "aria-label": "Colours of tokens" });
  const said = el("div", { class: "token-values", role: "status" }, el("span", { class: "soft" }, "Point at a token, or focus the text and use the arrow keys."));
  const text = el("div", { class: "passage tokens", tabindex: "0", role: "group", "aria-label": "Response; arrow keys read tokens and their values" });
  const spans = (sample.tokens ?? []).map((token, at) => {
    const span = el("span", { class: sample.mask?.[at] === 0 ? "masked" : null }, token);
    span.dataset.at = at;
    return span;
  });
  spans.forEach((span, at) => {
    if (sample.cut?.at === at) text.append(el("em", { class: "cut" }, `… ${number(sample.cut.left_out)} tokens left out …`));
    text.append(span);
  });
  if (!spans.length) text.append(el("em", { class: "soft" }, "no tokens"));
  let current = null;
  const point = (at, scroll) => {
    if (current !== null) spans[current].classList.remove("at");
    current = at;
    spans[at].classList.add("at");
    if (scroll) spans[at].scrollIntoView({ block: "nearest" });
    said.replaceChildren(...values(sample, at));
  };
  text.addEventListener("pointerover", (event) => event.target.dataset?.at && point(Number(event.target.dataset.at), false));
  text.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || !spans.length) return;
    event.preventDefault();
    point(Math.max(0, Math.min(spans.length - 1, current === null ? 0 : current + step)), true);
  });
  const colourBy = (name) => {
    const { colour, legend: rows } = Report.quantities[name].scale(sample);
    spans.forEach((span, at) => (span.style.background = colour(at)));
    legend.replaceChildren(...rows.map(([background, words]) => {
      const mark = el("i", { class: "swatch" });
      mark.style.background = background;
      return el("span", {}, mark, words);
    }));
  };
  colourBy(quantity);
  return { node: el("div", {}, legend, said, text), colourBy, jump: (at) => { point(at, true); text.focus({ preventScroll: true }); } };
};
})();
