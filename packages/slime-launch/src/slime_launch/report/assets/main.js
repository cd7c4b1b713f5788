"use strict";
// Start: unpack the data, make the tabs, follow links inside the page, watch a live run.
(() => {
const { el } = Report;
const ORDER = ["overview", "curves", "time", "samples", "data", "settings"];
const THEMES = ["light dark", "light", "dark"];
const THEME_WORDS = { "light dark": "◐ auto", light: "○ light", dark: "● dark" };
const OVER_RUNS = new Set(["overview", "curves"]); // tabs that draw several runs into one chart
const OF_ONE_RUN = new Set(["time", "samples", "data"]);
const stale = new Set(ORDER);
let current = null, written = "";

const panelOf = (name) => document.getElementById(`panel-${name}`);

const makeTabs = () => {
  const list = document.getElementById("tabs"), main = document.getElementById("main");
  main.replaceChildren();
  for (const name of ORDER) {
    list.append(el("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}`, "aria-selected": "false", tabindex: "-1", click: () => show(name) }, Report.tabs[name].title));
    main.append(el("div", { role: "tabpanel", id: `panel-${name}`, "aria-labelledby": `tab-${name}`, hidden: true }));
  }
  list.addEventListener("keydown", (event) => {
    const place = ORDER.indexOf(current);
    const to = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: ORDER.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const name = ORDER[(to + ORDER.length) % ORDER.length];
    show(name);
    document.getElementById(`tab-${name}`).focus();
  });
};

/** Open a tab; it is drawn if it was not since the data changed. */
const show = async (name, words = new URLSearchParams()) => {
  const moved = current !== name;
  current = name;
  for (const other of ORDER) {
    const tab = document.getElementById(`tab-${other}`);
    tab.setAttribute("aria-selected", String(other === name));
    tab.tabIndex = other === name ? 0 : -1;
    panelOf(other).hidden = other !== name;
  }
  offerRuns();
  if (moved && ![...words].length) Report.setHash(name);
  if (stale.delete(name)) await Report.tabs[name].render(panelOf(name));
  await Report.tabs[name].follow?.(words);
};

/** Keep the address in step with what is shown, so that it can be passed on. */
Report.setHash = (name, words = {}) => {
  const more = new URLSearchParams(words).toString();
  written = `#${name}${more ? `?${more}` : ""}`;
  history.replaceState(null, "", written);
};

const follow = () => {
  if (location.hash === written && current) return;
  const [name, more] = location.hash.slice(1).split("?");
  const words = new URLSearchParams(more);
  const place = Report.data.runs.findIndex((run) => run.name === words.get("run"));
  if (place >= 0 && place !== Report.state.run) chooseRun(place);
  written = location.hash;
  return show(ORDER.includes(name) ? name : "overview", words);
};

const redrawAll = () => {
  for (const name of ORDER) stale.add(name);
  stale.delete(current);
  return Report.tabs[current].render(panelOf(current));
};

const chooseRun = (place) => {
  Report.state.run = place;
  document.getElementById("run").value = String(place);
  if (current) redrawAll();
};

const offerRuns = () => {
  const several = Report.data.runs.length > 1;
  document.getElementById("runs").hidden = !several || !OVER_RUNS.has(current);
  document.getElementById("run-choice").hidden = !several || !OF_ONE_RUN.has(current);
};

const runChips = () => {
  const { runs } = Report.data;
  const box = document.getElementById("runs");
  Report.refill(box, runs.map(({ name, state }) => [name, state]), () => runs.map((run, place) => {
    const check = el("input", { type: "checkbox", change: () => {
      if (check.checked) Report.state.hidden.delete(run.name);
      else Report.state.hidden.add(run.name);
      redrawAll();
    } });
    check.checked = !Report.state.hidden.has(run.name);
    const mark = el("i", { class: "swatch" });
    mark.style.background = `var(${Report.colourName(place)})`;
    return el("label", { class: "pick" }, check, mark, el("span", {}, run.name, el("small", {}, ` ${run.state}`)));
  }));
};

const frame = () => {
  const { runs, slime, made } = Report.data;
  document.title = `${runs.map((run) => run.name).join(", ")} – slime report`;
  const choice = document.getElementById("run");
  Report.offer(choice, runs.map((run, place) => [String(place), run.name]));
  choice.value = String(Report.state.run);
  document.querySelector("h1 span").textContent = runs.length === 1 ? `${runs[0].name} · ${runs[0].state}` : `${runs.length} runs`;
  document.getElementById("made").textContent = `slime ${slime} · made ${Report.moment(made)}`;
  runChips();
};

const theme = () => {
  const button = document.getElementById("theme");
  let kept = null;
  try {
    kept = localStorage.getItem("slime-report-theme");
  } catch { /* no storage for files here */ }
  const set = (value) => {
    document.documentElement.style.colorScheme = value;
    button.textContent = THEME_WORDS[value];
    button.setAttribute("aria-label", `Colours: ${THEME_WORDS[value].slice(2)}; press to change`);
    button.value = value;
    Report.recolour();
    Report.tabs.time.recolour();
  };
  button.addEventListener("click", () => {
    const value = THEMES[(THEMES.indexOf(button.value) + 1) % THEMES.length];
    set(value);
    try {
      localStorage.setItem("slime-report-theme", value);
    } catch { /* the choice lasts as long as the page */ }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => set(button.value));
  set(THEMES.includes(kept) ? kept : THEMES[0]);
};

/** Fresh data of a live run: everything stays selected, and what is shown is drawn again. */
const changed = (data) => {
  const name = Report.run().name;
  Report.data = data;
  Report.state.run = Math.max(0, data.runs.findIndex((run) => run.name === name));
  frame();
  return redrawAll();
};

const start = async () => {
  if (typeof DecompressionStream === "undefined") throw new Error("the browser is too old: DecompressionStream is missing");
  theme();
  Report.data = await Report.load();
  frame();
  document.getElementById("run").addEventListener("change", (event) => chooseRun(Number(event.target.value)));
  makeTabs();
  await follow();
  window.addEventListener("hashchange", follow);
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    document.getElementById("main").focus();
  });
  if (Report.data.live) Report.watch(changed);
  document.body.dataset.ready = "true";
};
start();
})();
