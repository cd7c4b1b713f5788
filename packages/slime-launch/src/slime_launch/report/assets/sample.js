"use strict";
// One sample: its figures, the tree of its group, its prompt, its response, its metadata.
(() => {
const { el, number, section, select, field } = Report;
let quantity = "advantage";

const chip = (words, kind = "") => el("span", { class: `chip ${kind}` }, words);

const figures = (sample) => {
  const rows = [["reward", number(sample.reward)]];
  for (const [name, value] of Object.entries(sample.rewards ?? {})) rows.push([`reward: ${name}`, value !== null && typeof value === "object" ? JSON.stringify(value) : number(value)]);
  rows.push(["length", `${number(sample.length)} tokens`]);
  if (sample.label !== null && sample.label !== undefined) rows.push(["label", String(sample.label)]);
  return el("dl", { class: "figures" }, rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
};

const heading = (sample) =>
  el("div", { class: "sample-head" },
    el("h2", {}, `Sample ${sample.index}`, el("small", {}, ` step ${sample.rollout}, group ${sample.group}, trajectory ${sample.trajectory}`)),
    chip(sample.status, sample.status === "completed" ? "" : "warn"),
    sample.dropped ? chip(`dropped: ${sample.dropped}`, "warn") : null,
    sample.failure ? chip(`not scored: ${sample.failure}`, "warn") : null);

const prompt = (sample) => {
  if (typeof sample.prompt === "string" || !Array.isArray(sample.prompt)) return el("div", { class: "passage", tabindex: "0", role: "group", "aria-label": "Prompt" }, Report.promptText(sample));
  return el("div", { class: "messages" }, sample.prompt.map((message) =>
    el("div", { class: "message" }, el("b", {}, message?.role ?? ""), el("div", { class: "passage" }, Report.messageText(message)),
      message?.tool_calls ? el("pre", {}, JSON.stringify(message.tool_calls, null, 1)) : null)));
};

/** An item of the tree; `open` items show what is below them. */
const item = (words, act, below = [], current = false) => {
  const node = el("li", { role: "treeitem", tabindex: "-1", "aria-current": current ? "true" : null, "aria-expanded": below.length ? "true" : null }, el("span", { class: "leaf", click: act }, words), below.length ? el("ul", { role: "group" }, below) : null);
  node.act = act;
  return node;
};

const walk = (tree) => {
  const items = () => [...tree.querySelectorAll("[role=treeitem]")].filter((one) => !one.parentElement.closest('[aria-expanded="false"]'));
  const focus = (one) => {
    if (!one) return;
    tree.querySelectorAll('[tabindex="0"]').forEach((other) => (other.tabIndex = -1));
    one.tabIndex = 0;
    one.focus();
  };
  tree.addEventListener("keydown", (event) => {
    const one = event.target.closest("[role=treeitem]"), every = items(), place = every.indexOf(one);
    const open = one?.getAttribute("aria-expanded");
    const keys = {
      ArrowDown: () => focus(every[place + 1]), ArrowUp: () => focus(every[place - 1]), Home: () => focus(every[0]), End: () => focus(every.at(-1)),
      ArrowRight: () => (open === "false" ? one.setAttribute("aria-expanded", "true") : open && focus(every[place + 1])),
      ArrowLeft: () => (open === "true" ? one.setAttribute("aria-expanded", "false") : focus(one.parentElement.closest("[role=treeitem]"))),
      Enter: () => one.act(), " ": () => one.act(),
    };
    if (!one || !keys[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    keys[event.key]();
  });
};

const shortened = (text, most = 48) => {
  const flat = text.trim().replaceAll(/\s+/g, " ");
  return flat.length > most ? `${flat.slice(0, most)}…` : flat;
};

const turnItems = (sample, jump) =>
  Report.turns(sample).map((turn, place) =>
    item([el("b", { class: turn.sampled ? "" : "soft" }, turn.sampled ? `turn ${Math.floor(place / 2) + 1}` : "tool, template"), ` ${shortened(sample.tokens.slice(turn.start, turn.stop).join(""))} `, el("small", {}, `${turn.stop - turn.start} tokens`)], () => jump(turn.start)));

/** Group, its trajectories, their samples, and the turns of the open one. */
const tree = (run, sample, jump) => {
  const siblings = run.samples.filter((other) => other.rollout === sample.rollout && other.group === sample.group);
  const trajectories = new Map();
  for (const one of siblings) trajectories.set(one.trajectory, [...(trajectories.get(one.trajectory) ?? []), one]);
  const leaf = (one) => item([`sample ${one.index} `, el("small", {}, `reward ${number(one.reward)}, ${number(one.length)} tokens`)], () => Report.openSample(one), one === sample ? turnItems(sample, jump) : [], one === sample);
  const branches = [...trajectories].map(([number_, members]) => (members.length === 1 && members[0].trajectory === members[0].index ? leaf(members[0]) : item(`trajectory ${number_}`, () => Report.openSample(members[0]), members.map(leaf))));
  const rewards = siblings.map((one) => one.reward).filter((reward) => reward !== null);
  const mean = rewards.length ? `, mean reward ${number(rewards.reduce((sum, one) => sum + one, 0) / rewards.length)}` : "";
  const root = el("ul", { class: "tree", role: "tree", "aria-label": "Group, trajectories and turns" }, item([el("b", {}, `group ${sample.group}`), el("small", {}, ` ${siblings.length} samples kept${mean}`)], () => {}, branches));
  root.firstChild.tabIndex = 0;
  walk(root);
  return root;
};

const metadata = (values) => {
  const rows = Object.entries(values ?? {});
  return rows.length ? Report.table("Metadata", [["name", "text"], ["value", "text"]], rows.map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)]), { class: "wide" }) : null;
};

/** Draw a sample into the pane at the right. */
Report.showSample = async (pane, run, sample) => {
  await Report.whole(sample);
  const names = Object.keys(Report.quantities).filter((name) => Report.quantities[name].has(sample));
  const response = Report.response(sample, names.includes(quantity) ? quantity : names[0]);
  const choice = select(names, names.includes(quantity) ? quantity : names[0], (name) => {
    quantity = name;
    response.colourBy(name);
  });
  const link = el("button", { type: "button", class: "quiet", click: () => Report.copy(location.href, link) }, "copy link");
  const facts = metadata(sample.metadata);
  pane.replaceChildren(
    ...[
      heading(sample), figures(sample),
      section("Prompt", prompt(sample)),
      section("Response", el("div", { class: "row" }, field("colour by", choice), link), response.node),
      section("Group and turns", tree(run, sample, response.jump)),
      facts && section("Metadata", facts),
    ].filter(Boolean),
  );
  pane.scrollTop = 0;
};
})();
