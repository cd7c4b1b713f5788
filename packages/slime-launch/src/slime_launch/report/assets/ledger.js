"use strict";
// The tab of the data: what became of every sample, how stale the tokens were, what happened when.
(() => {
const { el, number, section, percent } = Report;
const WAYS = [["trained", "--c0", "trained on"], ["filtered", "--c1", "filtered out"], ["aborted", "--c3", "aborted"], ["waiting", "--c2", "waiting"]];
let parts = null;

const ledger = (counts) => {
  if (!counts) return [el("p", { class: "empty" }, "This run kept no ledger.")];
  const whole = counts.generated || 1;
  const strip = el("div", { class: "strip", "aria-hidden": "true" }, WAYS.filter(([name]) => counts[name]).map(([name, colour]) => {
    const part = el("i");
    part.style.flexGrow = counts[name];
    part.style.background = `var(${colour})`;
    return part;
  }));
  const row = ([name, colour, words]) => {
    const mark = el("i", { class: "swatch" });
    mark.style.background = `var(${colour})`;
    return [el("span", {}, mark, words), number(counts[name] ?? 0), percent((counts[name] ?? 0) / whole)];
  };
  const columns = [["samples", "text"], ["count", "number"], ["share", "number"]];
  const dropped = Object.entries(counts.dropped ?? {}).sort((a, b) => b[1] - a[1]);
  const known = counts.generated != null;
  return [
    !known ? el("p", { class: "empty" }, "No checkpoint of this run was found, which has the ledger.") : el("p", {}, el("b", {}, number(counts.generated)), " samples were generated. ", counts.balances ? el("span", { class: "chip good" }, "✓ the ledger balances") : el("span", { class: "chip warn" }, "✗ the ledger does not balance")),
    known ? strip : null,
    known ? Report.table("What became of the samples", columns, WAYS.map(row), { class: "wide" }) : null,
    counts.stale ? el("p", {}, number(counts.stale), " were generated again, because they had become too old.") : null,
    dropped.length ? el("h3", {}, "Why groups were dropped") : null,
    dropped.length ? Report.table("Why groups were dropped", [["reason", "text"], ["groups", "number"]], dropped.map(([reason, count]) => [reason, number(count)]), { class: "wide" }) : null,
  ].filter(Boolean);
};

const staleness = (found) => {
  if (!found?.versions?.length) return el("p", { class: "empty" }, "Nothing was trained on, so nothing was stale.");
  const whole = found.tokens.reduce((sum, one) => sum + one, 0) || 1, most = Math.max(...found.tokens);
  const rows = found.versions.map((versions, place) => [number(versions), Report.bar(found.tokens[place] / most), number(found.tokens[place]), percent(found.tokens[place] / whole)]);
  return Report.table("Tokens trained on, by how many versions their weights were behind", [["versions behind", "number"], ["", "bar"], ["tokens", "number"], ["share", "number"]], rows, { class: "wide" });
};

const events = (run) => {
  if (!run.events?.length) return el("p", { class: "empty" }, "Nothing unusual happened.");
  const rows = run.events.map(([time, who, what]) => [Report.duration(time - run.began), who, what]);
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Events" }, Report.table("Events", [["after", "number"], ["who", "text"], ["what", "text"]], rows, { class: "wide" }));
};

Report.tabs.data = {
  title: "Data",
  render: (panel) => {
    if (!parts) {
      parts = { ledger: el("div"), staleness: el("div"), events: el("div") };
      panel.append(el("div", { class: "halves" }, section("What became of every sample", parts.ledger), section("Staleness", el("p", { class: "soft" }, "Tokens trained on, by how many versions the weights that sampled them were behind."), parts.staleness)), section("Events", parts.events));
    }
    const run = Report.run();
    Report.refill(parts.ledger, run.ledger ?? null, () => ledger(run.ledger));
    Report.refill(parts.staleness, run.staleness ?? null, () => staleness(run.staleness));
    Report.refill(parts.events, [run.began, run.events], () => events(run));
  },
};
})();
