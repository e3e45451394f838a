"use strict";
// What every page shares: its data, the switch of light and dark, and charts that are drawn as wide as they stand.

const byId = (id) => document.getElementById(id);

/** The data block `id` of this page, null where it has none. */
function block(id) {
  const found = byId(id);
  return found === null ? null : JSON.parse(found.textContent);
}

const missing = (value) => value === null || value === undefined;
const figure = (value, digits = 3) => (missing(value) ? "–" : value.toFixed(digits));
const signed = (value) => (missing(value) ? "–" : (value < 0 ? "" : "+") + value.toFixed(3));
const percent = (value) => (missing(value) ? "–" : `${(100 * value).toFixed(1)} %`);

/** An HTML element; texts are set as text, never as markup. */
function make(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function draw(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) if (!missing(value)) element.setAttribute(key, value);
  element.append(...children.filter((child) => !missing(child)));
  return element;
}

(function theme() {
  const root = document.documentElement;
  const kept = { get: () => localStorage.getItem("dflash-theme"), set: (to) => localStorage.setItem("dflash-theme", to) };
  try { if (kept.get()) root.dataset.theme = kept.get(); } catch { /* a browser that keeps nothing for files */ }
  byId("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { kept.set(root.dataset.theme); } catch { /* the same */ }
  });
})();

// ---- scales -------------------------------------------------------------------------------------------------------

/** Round ticks from `low` to `high`, about `count` of them. */
function niceTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step / 1e6; tick += step) ticks.push(Math.round(tick / step) * step);
  return ticks;
}

function scale(axis, low, high, from, to) {
  const turn = axis.log ? (value) => Math.log2(value) : (value) => value;
  const [a, b] = [turn(low), turn(high)];
  return (value) => (b === a ? (from + to) / 2 : from + ((turn(value) - a) / (b - a)) * (to - from));
}

// ---- charts -------------------------------------------------------------------------------------------------------

const MARKS = {
  circle: (x, y) => draw("circle", { cx: x, cy: y, r: 4 }),
  square: (x, y) => draw("rect", { x: x - 3.6, y: y - 3.6, width: 7.2, height: 7.2 }),
  diamond: (x, y) => draw("path", { d: `M${x} ${y - 5}L${x + 5} ${y}L${x} ${y + 5}L${x - 5} ${y}Z` }),
  down: (x, y) => draw("path", { d: `M${x - 6} ${y - 5}H${x + 6}L${x} ${y + 6}Z` }),
  star: (x, y) => {
    const corner = (place) => {
      const [radius, angle] = [place % 2 ? 4.5 : 11, (Math.PI * place) / 5 - Math.PI / 2];
      return `${x + radius * Math.cos(angle)} ${y + radius * Math.sin(angle)}`;
    };
    return draw("path", { d: `M${[...Array(10).keys()].map(corner).join("L")}Z` });
  },
};

function mark(kind, x, y, hollow) {
  const shape = MARKS[kind](x, y);
  shape.setAttribute("class", hollow ? "mark hollow" : "mark");
  return shape;
}

/** Draw into the element `id`, now and whenever its width changes; `paint(svg, width, height)` fills the drawing. */
function chart(id, legend, paint) {
  const place = byId(id);
  if (place === null) return;
  if (legend.length > 1 || legend.some((one) => one.always)) place.before(keyOf(legend));
  let width = 0;
  const redraw = () => {
    if (place.clientWidth === width || place.clientWidth === 0) return;
    width = place.clientWidth;
    const height = Number(place.dataset.height);
    const title = place.closest("figure").querySelector("figcaption strong").textContent;
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, tabindex: 0, role: "img", "aria-label": `${title}: a chart, its figures are in the table; arrow keys read it` });
    place.replaceChildren(svg);
    paint(svg, width, height, place);
  };
  redraw();
  new ResizeObserver(redraw).observe(place);
}

function keyOf(legend) {
  const sample = (one) => {
    const svg = draw("svg", { class: `s-${one.colour}`, "aria-hidden": true });
    const inside = draw("g", { class: "chart" });
    if (one.bar) inside.append(draw("rect", { class: "bar", x: 6, y: 1, width: 12, height: 10 }));
    else {
      if (one.line !== false) inside.append(draw("line", { class: "line", x1: 0, x2: 26, y1: 6, y2: 6, "stroke-dasharray": one.dash }));
      if (one.marker) inside.append(mark(one.marker, 13, 6, one.hollow));
    }
    svg.append(inside);
    return make("li", {}, svg, one.name);
  };
  return make("ul", { class: "legend" }, ...legend.map(sample));
}

/** Axes with units and grid; returns where values lie. */
function axes(svg, width, height, x, y) {
  const edge = { left: 46, right: width - 12, top: 10, bottom: height - 40 };
  const [at, up] = [scale(x, x.low, x.high, edge.left + (x.inset ?? 8), edge.right - (x.inset ?? 8)), scale(y, y.low, y.high, edge.bottom, edge.top)];
  for (const tick of niceTicks(y.low, y.high, 5)) {
    svg.append(draw("line", { class: "gridline", x1: edge.left, x2: edge.right, y1: up(tick), y2: up(tick) }));
    svg.append(draw("text", { x: edge.left - 6, y: up(tick) + 4, "text-anchor": "end" }, y.format(tick)));
  }
  svg.append(draw("line", { class: "axis", x1: edge.left, x2: edge.right, y1: edge.bottom, y2: edge.bottom }));
  const room = Math.max(1, Math.floor((edge.right - edge.left) / (x.room ?? 26)));
  const every = Math.ceil(x.ticks.length / room);
  x.ticks.forEach((tick, place) => {
    if (place % every === 0) svg.append(draw("text", { x: at(tick), y: edge.bottom + 15, "text-anchor": "middle" }, x.format(tick)));
  });
  svg.append(draw("text", { class: "title-x", x: (edge.left + edge.right) / 2, y: height - 6, "text-anchor": "middle" }, x.title));
  svg.append(draw("text", { class: "title-y", x: 11, y: (edge.top + edge.bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 11 ${(edge.top + edge.bottom) / 2})` }, y.title));
  return { at, up, edge };
}

/**
 * Lines over x. A series has name, colour, marker, dash and points {x, y, low, high, marker, hollow, href, more};
 * a rule is a level {y, low, high, name, colour}. The pointer and the arrow keys read what stands at an x.
 */
function lineChart(id, { x, y, series, rules = [] }) {
  const legend = [...series, ...rules.map((rule) => ({ dash: "5 4", ...rule }))];
  chart(id, legend, (svg, width, height, place) => {
    const { at, up, edge } = axes(svg, width, height, x, y);
    for (const rule of rules) {
      const group = draw("g", { class: `s-${rule.colour}` });
      if (!missing(rule.low)) group.append(draw("rect", { class: "band", x: edge.left, width: edge.right - edge.left, y: up(rule.high), height: Math.max(1, up(rule.low) - up(rule.high)) }));
      group.append(draw("line", { class: "rule", x1: edge.left, x2: edge.right, y1: up(rule.y), y2: up(rule.y) }));
      svg.append(group);
    }
    const cursor = draw("line", { class: "cursor", y1: edge.top, y2: edge.bottom });
    svg.append(cursor);
    for (const one of series.toReversed()) {  // the first one lies on top
      const group = draw("g", { class: `s-${one.colour}` });
      let path = "", pen = "M";
      for (const point of one.points) {
        if (missing(point.y) || point.apart) { pen = point.apart ? pen : "M"; continue; }
        path += `${pen}${at(point.x)} ${up(point.y)}`;
        pen = "L";
      }
      if (one.line !== false) group.append(draw("path", { class: "line", d: path, "stroke-dasharray": one.dash }));
      for (const point of one.points.filter((point) => !missing(point.y))) {
        if (!missing(point.low)) group.append(draw("line", { class: "whisker", x1: at(point.x), x2: at(point.x), y1: up(point.low), y2: up(point.high) }));
        if (!one.marker) continue;
        const shape = mark(point.marker ?? one.marker, at(point.x), up(point.y), point.hollow ?? one.hollow);
        if (point.colour) shape.classList.add(`s-${point.colour}`);
        group.append(point.href ? draw("a", { href: point.href, "aria-label": point.said }, shape) : shape);
      }
      svg.append(group);
    }
    const stops = [...new Set(series.flatMap((one) => one.points.map((point) => point.x)))].sort((a, b) => a - b);
    const read = (stop) => [x.name(stop), ...series.flatMap((one) => one.points.filter((point) => point.x === stop).flatMap((point) => [`${one.name}: ${point.said ?? y.said(point.y)}`, ...(point.more ?? [])]))];
    reading(svg, place, stops, at, read, (stop) => { cursor.setAttribute("x1", at(stop)); cursor.setAttribute("x2", at(stop)); cursor.style.visibility = "visible"; }, () => { cursor.style.visibility = "hidden"; });
  });
}

/** Bars by category, one beside the other for each series {name, colour, values}. */
function barChart(id, { labels, title, y, series, said }) {
  chart(id, series.map((one) => ({ ...one, bar: true })), (svg, width, height, place) => {
    const places = labels.map((_, index) => index);
    const highest = Math.max(...series.flatMap((one) => one.values), 1e-9);
    const x = { low: -0.5, high: labels.length - 0.5, inset: 0, ticks: places, title, format: (tick) => labels[tick], room: 24 };
    const { at, up, edge } = axes(svg, width, height, x, { ...y, low: 0, high: highest * 1.12 });
    const step = at(1) - at(0), thick = Math.min(46, (step * 0.78) / series.length);
    series.forEach((one, number) => {
      const group = draw("g", { class: `s-${one.colour}` });
      one.values.forEach((value, index) => {
        const left = at(index) + thick * (number - series.length / 2);
        group.append(draw("rect", { class: "bar", x: left + 0.5, width: Math.max(1, thick - 1), y: up(value), height: Math.max(0, edge.bottom - up(value)), rx: 1.5 }));
        if (series.length === 1 && thick > 30) group.append(draw("text", { class: "bar-label", x: at(index), y: up(value) - 4, "text-anchor": "middle" }, y.format(value)));
      });
      svg.append(group);
    });
    reading(svg, place, places, at, (index) => [said(index), ...series.map((one) => `${one.name}: ${y.said(one.values[index])}`)]);
  });
}

/** Show the lines of `read(stop)` at the stop nearest to the pointer, or the one that the arrow keys came to. */
function reading(svg, place, stops, at, read, onShow = () => {}, onHide = () => {}) {
  const tip = make("div", { class: "tip", role: "status", hidden: "" });
  place.append(tip);
  let now = -1;
  const show = (index) => {
    now = Math.max(0, Math.min(stops.length - 1, index));
    const [first, ...others] = read(stops[now]);
    tip.replaceChildren(make("b", {}, first), ...others.map((line) => make("div", {}, line)));
    tip.hidden = false;
    const x = at(stops[now]), beside = x + 14 + tip.offsetWidth > place.clientWidth ? x - tip.offsetWidth - 14 : x + 14;
    tip.style.left = `${Math.max(0, beside)}px`;
    tip.style.top = "8px";
    onShow(stops[now]);
  };
  const hide = () => { tip.hidden = true; onHide(); };
  if (stops.length === 0) return;
  svg.addEventListener("pointermove", (event) => {
    const x = event.clientX - svg.getBoundingClientRect().left;
    show(stops.reduce((best, stop, index) => (Math.abs(at(stop) - x) < Math.abs(at(stops[best]) - x) ? index : best), 0));
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const turn = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (turn) { show(now + turn); event.preventDefault(); }
    if (event.key === "Escape") hide();
  });
}
