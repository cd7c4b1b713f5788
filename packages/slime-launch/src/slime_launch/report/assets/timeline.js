"use strict";
// Who was busy when: lanes on a canvas with zoom and pan, by pointer and by keyboard.
(() => {
const { el, duration, colour } = Report;
const LANE = 24, BAR = 16, AXIS = 24, LABELS = 112;
// Kinds of work that are usual have their colour in every run; others take what is left of them.
const COLOURS = {
  generate: "--c0", train: "--c1", score: "--c2", send: "--c3", evaluate: "--c4", save: "--c5", split: "--c6", log_probs: "--c7",
  forward_backward: "--c8", optimizer: "--c9", export: "--c10", critic: "--c11", weight_sums: "--c12", "hand over": "--c13",
  ref_log_probs: "--c14", values: "--c15",
};
const PLACES = 16;

/** Colours of kinds of work, each its own as long as there are enough; waiting is grey whatever is waited for. */
Report.workColours = (kinds) => {
  const own = (what) => (what.startsWith("wait") ? "--wait" : COLOURS[what]);
  const taken = new Set(kinds.map(own));
  const free = Array.from({ length: PLACES }, (_, place) => `--c${place}`).filter((name) => !taken.has(name));
  return kinds.map((what, place) => own(what) ?? free.shift() ?? Report.colourName(place));
};

/** A round step of seconds such that about eight marks fit. */
const markStep = (seconds) => {
  const rough = seconds / 8;
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];
  return steps.find((step) => step >= rough) ?? 10 ** Math.floor(Math.log10(rough || 1)) * (rough < 1 ? 1 : 10);
};

const markText = (at, step) => {
  if (step < 1) return `${at.toFixed(Math.min(6, Math.ceil(-Math.log10(step))))} s`;
  const hours = Math.floor(at / 3600), minutes = Math.floor(at / 60) % 60, seconds = Math.round(at % 60);
  const two = (value) => String(value).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(seconds)}` : `${minutes}:${two(seconds)}`;
};

/** First span of a lane that ends after a time; spans are sorted by start. */
const firstAfter = (spans, at) => {
  let low = 0, high = spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle][0] + spans[middle][1] <= at) low = middle + 1;
    else high = middle;
  }
  return low;
};

/** The drawing. `say` gets the words on a span that the pointer or the keys are on. Gives {node, update, focusRollout}. */
Report.timeline = (say) => {
  const canvas = el("canvas", { tabindex: "0", role: "img" });
  const node = el("div", { class: "timeline" }, canvas);
  const view = { from: 0, to: 1 };
  let timeline = { kinds: [], lanes: [] }, end = 1, at = null, asked = 0;

  const width = () => canvas.clientWidth - LABELS;
  const x = (time) => LABELS + ((time - view.from) / (view.to - view.from)) * width();
  const words = ({ lane, span }) => {
    const [start, seconds, what, rollout] = timeline.lanes[lane].spans[span];
    const of = rollout === null || rollout === undefined ? "" : `, step ${rollout}`;
    return `${timeline.lanes[lane].who}: ${timeline.kinds[what]}${of}, ${duration(seconds)}, from ${duration(start)} on`;
  };

  const drawLane = (pen, lane, place, colours) => {
    const top = AXIS + place * LANE + (LANE - BAR) / 2;
    let last = -1, lastWhat = -1;
    for (let index = firstAfter(lane.spans, view.from); index < lane.spans.length; index++) {
      const [start, seconds, what, rollout] = lane.spans[index];
      if (start > view.to) break;
      const left = Math.max(LABELS, x(start)), right = Math.min(LABELS + width(), x(start + seconds));
      if (right < last + 0.5 && what === lastWhat) continue;
      last = right;
      lastWhat = what;
      pen.fillStyle = colours[what];
      const wait = timeline.kinds[what].startsWith("wait");
      pen.fillRect(left, wait ? top + BAR / 2 - 2 : top, Math.max(0.7, right - left - (right - left > 4 ? 1 : 0)), wait ? 4 : BAR);
      if (right - left > 26 && !wait && rollout !== null && rollout !== undefined) {
        pen.fillStyle = colour("--on-bar");
        pen.fillText(String(rollout), left + 4, top + BAR / 2 + 0.5);
      }
    }
  };
  const drawMarks = (pen, height) => {
    const step = markStep(view.to - view.from);
    pen.fillStyle = colour("--soft");
    for (let mark = Math.ceil(view.from / step) * step; mark <= view.to; mark += step) {
      const left = Math.round(x(mark)) + 0.5;
      pen.strokeStyle = colour("--grid");
      pen.beginPath();
      pen.moveTo(left, AXIS - 4);
      pen.lineTo(left, height);
      pen.stroke();
      if (left < canvas.clientWidth - 30) pen.fillText(markText(mark, step), left + 3, 10);
    }
  };
  const paint = () => {
    asked = 0;
    if (!canvas.clientWidth) return;
    const height = AXIS + timeline.lanes.length * LANE + 4, sharp = devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(canvas.clientWidth * sharp);
    canvas.height = Math.round(height * sharp);
    const pen = canvas.getContext("2d");
    pen.scale(sharp, sharp);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    drawMarks(pen, height);
    const colours = Report.workColours(timeline.kinds).map(colour);
    timeline.lanes.forEach((lane, place) => {
      if (at?.lane === place) {
        pen.fillStyle = colour("--raised");
        pen.fillRect(0, AXIS + place * LANE, canvas.clientWidth, LANE);
      }
      pen.fillStyle = colour("--text");
      pen.fillText(lane.who.length > 17 ? `${lane.who.slice(0, 16)}…` : lane.who, 4, AXIS + (place + 0.5) * LANE);
      drawLane(pen, lane, place, colours);
    });
    if (at && at.span !== null) {
      const [start, seconds] = timeline.lanes[at.lane].spans[at.span];
      const left = Math.max(LABELS, x(start));
      pen.strokeStyle = colour("--text");
      pen.lineWidth = 1.5;
      if (x(start + seconds) > LABELS) pen.strokeRect(left, AXIS + at.lane * LANE + 2, Math.max(2, x(start + seconds) - left), LANE - 4);
    }
  };
  const draw = () => (asked ||= requestAnimationFrame(paint));

  const look = (from, to) => {
    const long = Math.min(end, Math.max(1e-3, to - from));
    view.from = Math.max(0, Math.min(end - long, from));
    view.to = view.from + long;
    draw();
  };
  const zoom = (factor, around = (view.from + view.to) / 2) => look(around - (around - view.from) * factor, around + (view.to - around) * factor);
  const pan = (share) => look(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));
  const point = (lane, span) => {
    at = span === null ? null : { lane, span };
    say(at ? words(at) : "");
    draw();
  };
  const step = (by, lanes = 0) => {
    if (!timeline.lanes.length) return;
    const lane = Math.max(0, Math.min(timeline.lanes.length - 1, (at?.lane ?? 0) + lanes));
    const { spans } = timeline.lanes[lane];
    if (!spans.length) return;
    const near = at === null ? firstAfter(spans, view.from) : lanes ? firstAfter(spans, timeline.lanes[at.lane].spans[at.span][0]) : at.span + by;
    const span = Math.max(0, Math.min(spans.length - 1, near));
    const [start, seconds] = spans[span];
    point(lane, span);
    if (start < view.from || start + seconds > view.to) look(start + seconds / 2 - (view.to - view.from) / 2, start + seconds / 2 + (view.to - view.from) / 2);
  };

  const under = (event) => {
    const box = canvas.getBoundingClientRect();
    const time = view.from + ((event.clientX - box.left - LABELS) / width()) * (view.to - view.from);
    const lane = Math.floor((event.clientY - box.top - AXIS) / LANE);
    const spans = timeline.lanes[lane]?.spans;
    if (!spans || event.clientX - box.left < LABELS) return { time, lane: null, span: null };
    const span = firstAfter(spans, time);
    return { time, lane, span: span < spans.length && spans[span][0] <= time ? span : null };
  };
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, from: view.from, to: view.to };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => (drag = null));
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const by = ((drag.x - event.clientX) / width()) * (drag.to - drag.from);
      return look(drag.from + by, drag.to + by);
    }
    const { lane, span } = under(event);
    if (span !== at?.span || lane !== at?.lane) point(lane, span);
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey && document.activeElement !== canvas) return; // the page scrolls
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, under(event).time);
  }, { passive: false });
  canvas.addEventListener("dblclick", () => look(0, end));
  const keys = {
    ArrowLeft: () => step(-1), ArrowRight: () => step(1), ArrowUp: () => step(0, -1), ArrowDown: () => step(0, 1),
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: () => look(0, end),
    Home: () => look(0, view.to - view.from), End: () => look(end - (view.to - view.from), end),
    PageUp: () => pan(-0.8), PageDown: () => pan(0.8),
  };
  canvas.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  new ResizeObserver(draw).observe(canvas);

  return {
    node, zoom, pan, redraw: draw, all: () => look(0, end),
    /** Show the time in which a rollout was worked on. */
    focusRollout: (rollout) => {
      const spans = timeline.lanes.flatMap((lane) => lane.spans.filter((span) => span[3] === rollout));
      if (!spans.length) return false;
      const from = spans.reduce((least, span) => Math.min(least, span[0]), Infinity), to = spans.reduce((most, span) => Math.max(most, span[0] + span[1]), 0);
      look(from - 0.05 * (to - from), to + 0.05 * (to - from));
      return true;
    },
    update: (fresh, same) => {
      const whole = !same || (view.from === 0 && view.to === end);
      timeline = fresh ?? { kinds: [], lanes: [] };
      for (const lane of timeline.lanes) lane.spans.sort((a, b) => a[0] - b[0]);
      end = timeline.lanes.reduce((most, lane) => lane.spans.reduce((last, span) => Math.max(last, span[0] + span[1]), most), 1e-3);
      if (!same) at = null;
      canvas.setAttribute("aria-label", `Timeline of ${timeline.lanes.length} lanes over ${duration(end)}. Arrow keys go from span to span and lane to lane, plus and minus zoom, 0 shows all; the table below has the sums.`);
      if (whole) look(0, end);
      draw();
    },
  };
};
})();
