"use strict";
// report.html: the charts, the list of prompts, and each prompt's rounds token by token.

const figures = block("figures");
const tokens = block("tokens");
const SHARE = { low: 0, high: 1, format: (value) => `${Math.round(100 * value)}`, said: percent };
const ROUNDS_AT_ONCE = 400;

(function positions() {
  const size = figures.blockSize;
  for (const key of ["acceptance", "conditional", "accuracy"]) {
    const series = both((one) => one[`${key}_by_position`].map((y, slot) => ({ x: slot + 1, y })));
    const slots = [...Array(size - 1).keys()].map((slot) => slot + 1);
    lineChart(`chart-${key}`, {
      x: { low: 1, high: Math.max(2, size - 1), ticks: slots, title: "slot of the block", format: String, name: (slot) => `slot ${slot}` },
      y: { ...SHARE, title: "share of rounds in %" },
      series,
    });
  }
})();

(function lengths() {
  const share = (one) => one.histogram.map((count) => (one.rounds ? count / one.rounds : 0));
  barChart("chart-histogram", {
    labels: figures.drafter.histogram.map((_, place) => place + 1),
    title: "tokens emitted by a round",
    y: { title: "share of rounds in %", format: SHARE.format, said: percent },
    series: both(share, "values"),
    said: (place) => `${place + 1} ${place ? "tokens" : "token"}`,
  });
  if (figures.misses === null) return;
  const total = figures.misses.reduce((sum, [, count]) => sum + count, 0) || 1;
  barChart("chart-misses", {
    labels: figures.misses.map(([label]) => label),
    title: "place of the right token",
    y: { title: "share of the misses in %", format: SHARE.format, said: percent },
    series: [{ name: "drafter", colour: "drafter", values: figures.misses.map(([, count]) => count / total) }],
    said: (place) => `place ${figures.misses[place][0]}: ${figures.misses[place][1]} rounds`,
  });
})();

(function curves() {
  const curve = (id, field, title, x, rules = []) => {
    const widths = Object.keys(figures.drafter[field] ?? {}).map(Number).sort((a, b) => a - b);
    if (widths.length === 0) return;
    const series = both((one) => widths.map((width) => ({ x: width, y: (one[field] ?? {})[width] ?? null })));
    lineChart(id, {
      x: { log: true, low: widths[0], high: widths.at(-1), ticks: widths, format: String, ...x },
      y: { low: field === "ddtree" ? 1 : 0, high: figures.blockSize - (field === "ddtree" ? 0 : 1), title, format: String, said: figure },
      series,
      rules,
    });
  };
  curve("chart-streak", "streak", "mean streak in slots", { title: "k, candidates that count", name: (width) => `top-${width}` });
  const chain = { y: figures.drafter.tau.pooled, name: "chain τ", colour: "grey" };
  curve("chart-ddtree", "ddtree", "τ in tokens per round", { title: "nodes of the tree", name: (nodes) => `${nodes} nodes` }, [chain]);
  const labels = ["walk", "random anchors", "training says"].slice(0, figures.trainingTau === null ? 2 : 3);
  const values = (one, training) => [one.tau.pooled, one.random_anchor_tau ?? 0, training].slice(0, labels.length);
  const series = [{ name: "drafter", colour: "drafter", values: values(figures.drafter, figures.trainingTau) }];
  if (figures.reference) series.push({ name: "reference", colour: "reference", values: values(figures.reference, 0) });
  barChart("chart-anchors", {
    labels, title: "where the blocks stand", series,
    y: { title: "τ in tokens per round", format: (value) => figure(value, value % 1 ? 2 : 0), said: (value) => (value ? figure(value) : "–") },
    said: (place) => labels[place],
  });
})();

/** A series for each drafter that the report has; `of` makes its points or values. */
function both(of, as = "points") {
  const made = [{ name: "drafter", colour: "drafter", marker: "circle", [as]: of(figures.drafter) }];
  if (figures.reference) made.push({ name: "reference", colour: "reference", marker: "square", dash: "6 4", [as]: of(figures.reference) });
  return made;
}

promptList(byId("prompts"), {
  name: (place) => figures.ids[place],
  text: (place) => block(`prompt-${place}`).text,
  open: (room, place) => showWalk(room, block(`prompt-${place}`)),
});

// ---- one prompt's rounds ------------------------------------------------------------------------------------------

function showWalk(place, prompt) {
  const plain = make("pre", { class: "plain", tabindex: 0 }, prompt.text);
  if (!prompt.rounds || prompt.rounds.length === 0) {
    place.append(plain);
    return;
  }
  plain.hidden = true;
  const flow = make("pre", { class: "tokens", "aria-label": "the completion, round by round; arrow keys go from round to round" });
  const lens = make("div", { class: "lens", role: "status", tabindex: 0 }, make("p", {}, "Point at a round, or go from one to the next with the arrow keys, to see its whole block."));
  const drafts = make("button", { type: "button" }, "hide wrong drafts");
  drafts.addEventListener("click", () => {
    drafts.textContent = flow.classList.toggle("hide-drafts") ? "show wrong drafts" : "hide wrong drafts";
  });
  const turn = make("button", { type: "button", "aria-pressed": "false" }, "plain text");
  turn.addEventListener("click", () => {
    plain.hidden = !plain.hidden;
    flow.hidden = lens.hidden = !plain.hidden;
    turn.setAttribute("aria-pressed", String(!plain.hidden));
  });
  const more = make("button", { type: "button", hidden: "" });
  place.append(make("div", { class: "bar-of-tools" }, drafts, turn, more), flow, plain, lens);
  fillWalk(flow, prompt, more);
  lookInto(flow, lens, prompt);
}

/** The rounds as spans, some hundreds at a time. */
function fillWalk(flow, prompt, more) {
  const { ids, rounds } = prompt;
  const starts = [];
  rounds.reduce((anchor, [advance]) => (starts.push(anchor), anchor + advance), 0);
  prompt.starts = starts;
  flow.append(make("span", { class: "prefill", title: "from the prefill" }, ...piece(ids[0])));
  let shown = 0;
  const go = () => {
    const until = Math.min(rounds.length, shown + ROUNDS_AT_ONCE);
    for (; shown < until; shown += 1) flow.append(roundOf(prompt, shown));
    more.hidden = shown === rounds.length;
    more.textContent = `show more: ${shown} of ${rounds.length} rounds`;
    const end = starts[shown - 1] + rounds[shown - 1][0] + 1;
    if (shown === rounds.length && end < ids.length) flow.append(make("span", { class: "rest", title: "not walked" }, ...ids.slice(end).flatMap(piece)));
  };
  more.addEventListener("click", go);
  go();
}

function roundOf(prompt, index) {
  const [advance, accepted, drafted, ranks] = prompt.rounds[index];
  const emitted = prompt.ids.slice(prompt.starts[index] + 1, prompt.starts[index] + 1 + advance);
  const round = make("span", { class: "round", "data-round": index, tabindex: index ? -1 : 0 });
  if (accepted) round.append(make("span", { class: "accepted" }, ...emitted.slice(0, accepted).flatMap(piece)));
  if (advance > accepted && drafted.length === 0) round.append(make("span", { class: "bonus", title: "bonus of a whole block" }, ...piece(emitted[accepted])));
  else if (advance > accepted) {
    const rank = ranks[accepted];
    const far = rank < 2 ? 0 : rank < 8 ? 1 : rank < 64 ? 2 : 3;
    round.append(make("del", {}, seen(drafted[0])), make("span", { class: "missed", "data-far": far }, ...piece(emitted[accepted])), make("sup", {}, `#${rank + 1}`));
  }
  return round;
}

/** The pieces of a token in the running text; a line end is marked and breaks the line. */
function piece(token) {
  const parts = text(token).split("\n");
  return parts.flatMap((part, place) => (place ? [make("span", { class: "nl" }), "\n", part] : [part])).filter((part) => part !== "");
}

const text = (token) => tokens[token] || `⟨${token}⟩`;

/** A token where its spaces and line ends have to be seen. */
const seen = (token) => text(token).replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");

/** The whole block of the round that is pointed at or focused: drafted, right, and the right one's place. */
function lookInto(flow, lens, prompt) {
  let now = null;
  const look = (round) => {
    if (round === null || round === now) return;
    now?.classList.remove("now");
    now = round;
    now.classList.add("now");
    lens.replaceChildren(...blockOf(prompt, Number(round.dataset.round)));
  };
  const near = (event) => event.target.closest(".round");
  flow.addEventListener("pointerover", (event) => look(near(event)));
  flow.addEventListener("focusin", (event) => look(near(event)));
  flow.addEventListener("click", (event) => near(event)?.focus({ preventScroll: true }));
  flow.addEventListener("keydown", (event) => {
    const to = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    const next = to && near(event)?.[to];
    if (next?.classList.contains("round")) {
      near(event).tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
      event.preventDefault();
    }
  });
}

function blockOf(prompt, index) {
  const [advance, accepted, wrong, ranks] = prompt.rounds[index];
  const slots = figures.blockSize - 1, start = prompt.starts[index];
  const right = (slot) => (slot < ranks.length ? prompt.ids[start + 1 + slot] : null);
  const drafted = (slot) => (slot < accepted ? right(slot) : wrong[slot - accepted]);
  const kind = (slot) => {
    if (slot < accepted) return "accepted";
    if (right(slot) === null) return "beyond";
    if (slot === accepted) return "first";
    return drafted(slot) === right(slot) ? "late" : "wrong";
  };
  const row = (title, cell, class_ = () => null) => make("tr", {}, make("th", { scope: "row" }, title), ...[...Array(slots).keys()].map((slot) => make("td", { class: class_(slot) }, cell(slot))));
  const said = `Round ${index + 1} of ${prompt.rounds.length}, behind ${seen(prompt.ids[start])}: ${accepted} of ${slots} drafts accepted, ${advance} ${advance === 1 ? "token" : "tokens"} emitted${advance > accepted ? "" : ", cut at the end"}.`;
  return [
    make("p", {}, said),
    make("table", {}, make("tbody", {},
      row("slot", (slot) => String(slot + 1)),
      row("drafted", (slot) => seen(drafted(slot)), kind),
      row("right", (slot) => (right(slot) === null ? "end" : seen(right(slot)))),
      row("its place", (slot) => (slot < ranks.length ? `#${ranks[slot] + 1}` : "–")))),
  ];
}

openFromAddress();
