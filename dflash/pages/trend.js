"use strict";
// The trend page: τ and training's figures over the steps of each series.

block("series").forEach((series, place) => {
  const { points } = series;
  const steps = points.map((point) => point.step);
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  const x = {
    low: first === last ? first - 1 : first, high: first === last ? last + 1 : last, inset: 14, room: 54,
    ticks: new Set(steps).size <= 9 ? [...new Set(steps)] : niceTicks(first, last, 8), title: "training step",
    format: (step) => step.toLocaleString("en"), name: (step) => `step ${step}`,
  };
  const tau = points.map((point) => ({
    x: point.step, y: point.tau, low: point.ci95?.[0], high: point.ci95?.[1], href: point.href, hollow: !point.valid, apart: !point.valid,
    marker: !point.valid ? "circle" : point.best ? "star" : point.regression ? "down" : "circle",
    colour: !point.valid ? null : point.best ? "best" : point.regression ? "fail" : null,
    said: point.valid ? figure(point.tau) + (point.best ? ", the best" : "") : `${figure(point.tau)}, not valid: ${point.why}`,
    more: [
      point.ci95 ? `95 % interval ${figure(point.ci95[0])} to ${figure(point.ci95[1])}` : "no interval",
      ...(point.valid && point.against !== "–" ? [`against the best before: ${point.against}`] : []),
    ],
  }));
  const line = (key) => points.filter((point) => point.valid).map((point) => ({ x: point.step, y: point[key] }));
  const has = (key) => points.some((point) => !missing(point[key]));
  const series_ = [{ name: "τ", colour: "drafter", marker: "circle", points: tau }];
  if (has("randomAnchors")) series_.push({ name: "τ at random anchors", colour: "third", marker: "diamond", dash: "2 3", points: line("randomAnchors") });
  if (has("training")) series_.push({ name: "training says (streak + 1)", colour: "fourth", marker: "square", dash: "7 3", points: points.map((point) => ({ x: point.step, y: point.training })) });
  const { reference } = series;
  const rules = reference ? [{ y: reference.pooled, low: reference.ci95?.[0], high: reference.ci95?.[1], name: `reference ${figure(reference.pooled)}`, colour: "reference" }] : [];
  const all = [...tau.flatMap((point) => [point.y, point.high]), ...series_.slice(1).flatMap((one) => one.points.map((point) => point.y)), ...rules.flatMap((rule) => [rule.y, rule.high])];
  const highest = Math.max(...all.filter((value) => !missing(value)));
  const y = { low: 1, high: Math.min(series.blockSize, Math.ceil(highest + 0.3)), title: "τ in tokens per round", format: String, said: figure };
  lineChart(`chart-tau-${place}`, { x, y, series: series_, rules });

  for (const [key, title, colour] of [["loss", "loss", "third"], ["accuracy", "share of slots", "fourth"]]) {
    const values = points.map((point) => point[key]).filter((value) => !missing(value));
    if (values.length === 0) continue;
    const [low, high] = [0, Math.max(...values, 1e-9)];
    lineChart(`chart-${key}-${place}`, {
      x, series: [{ name: key, colour, marker: "circle", points: points.map((point) => ({ x: point.step, y: point[key] })) }],
      y: { low, high: key === "accuracy" ? 1 : high * 1.1, title, format: (value) => String(Number(value.toPrecision(3))), said: (value) => figure(value, 4) },
    });
  }
});
