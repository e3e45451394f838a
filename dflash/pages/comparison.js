"use strict";
// The comparison page: each pair prompt by prompt, as a chart and as a list whose prompts open.

const comparison = block("comparison");

comparison.pairs.forEach((pair, number) => {
  const [ours, theirs] = ["A", pair.letter];
  const size = comparison.blockSize;
  const points = pair.ours.map((y, place) => ({ x: pair.theirs[place], y, said: `${comparison.ids[place]}: ${figure(y)} against ${figure(pair.theirs[place])}` }));
  const scale = { low: 1, high: size, format: String, said: figure };
  lineChart(`chart-${pair.letter}`, {
    x: { ...scale, ticks: [...Array(size).keys()].map((place) => place + 1), title: `${theirs}'s τ in tokens per round`, name: (value) => `${theirs}'s τ ${figure(value)}` },
    y: { ...scale, title: `${ours}'s τ in tokens per round` },
    series: [
      { name: "as good", colour: "grey", dash: "4 4", points: [{ x: 1, y: 1, said: "as good" }, { x: size, y: size, said: "as good" }] },
      { name: "a prompt", colour: "drafter", marker: "circle", line: false, points: points.filter((point) => !missing(point.x) && !missing(point.y)) },
    ],
  });
  promptList(byId(`against-${pair.letter}`), {
    name: (place) => comparison.ids[place],
    text: (place) => block(`prompt-${place}`).join("\n"),
    open: (room, place) => {
      const texts = block(`prompt-${place}`);
      const shown = pair.same[place] ? [["both", texts[0]]] : [[comparison.names[0], texts[0]], [comparison.names[number + 1], texts[number + 1]]];
      for (const [name, text] of shown) room.append(make("p", { class: "whose" }, `completion of ${name}`), make("pre", { class: "plain", tabindex: 0 }, text));
    },
  });
});
openFromAddress();
