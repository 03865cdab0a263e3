"use strict";
// One page for a report in a file and for one that is served: the latter requests what is new. Texts of models and data
// become text nodes, never markup.
const COLORS = 8;
const DASHES = ["", "8 4", "2 3", "10 3 2 3", "16 5", "10 3 2 3 2 3", "4 3", "16 3 5 3", "2 7"];
const PAGE = 12, MOST_SAMPLES = 2000;
const first = JSON.parse(document.getElementById("data").textContent);
const view = {runs: [], hidden: new Set(), zoom: null, smooth: 0, metric: "", axis: "step", shown: PAGE, opened: new Set(), histograms: {}, differences: []};
const $ = id => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") node.onclick = value;
    else if (value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter(child => child != null));
  return node;
}
function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) if (value != null) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
function number(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2).replace(/\.?0*e\+?/, "e")
    : size >= 1000 ? Math.round(value).toLocaleString("en-US") : String(+value.toPrecision(4));
  return text.replaceAll("-", "−");
}
const signed = value => value > 0 ? `+${number(value)}` : number(value);
function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 90) return `${+seconds.toPrecision(3)} s`;
  if (seconds < 5400) return `${+(seconds / 60).toPrecision(2)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;
}
const count = (amount, word) => `${amount.toLocaleString("en-US")} ${word}${amount === 1 ? "" : "s"}`;
const least = values => values.reduce((a, b) => b < a ? b : a, Infinity);
const most = values => values.reduce((a, b) => b > a ? b : a, -Infinity);
const mean = values => values.reduce((a, b) => a + b, 0) / values.length;
const isNumber = value => typeof value === "number";
const several = () => view.runs.length > 1;
const visible = () => view.runs.filter((run, place) => !view.hidden.has(place));
const meaning = name => first.meanings[name] || "";
function last(run, name) {
  for (let i = run.rows.length - 1; i >= 0; i--) if (run.rows[i][name] != null) return run.rows[i][name];
  return null;
}
const chip = run => el("i", {class: `chip c${run.color}`, "aria-hidden": "true"});
// A piece of a line, as the chart draws it.
function key({color, dash}) {
  const line = svg("line", {x1: 1, x2: 43, y1: 4, y2: 4, class: `line c${color}`, "stroke-dasharray": DASHES[dash]});
  return svg("svg", {class: "key", viewBox: "0 0 44 8", width: 44, height: 8, "aria-hidden": "true"}, line);
}
// A table that becomes a list of cards on a narrow screen: each cell carries the title of its column.
function table(titles, rows, isNumeric = false) {
  const head = el("tr", {}, ...titles.map((title, at) => el("th", {scope: "col", class: isNumeric && at ? "n" : null}, title)));
  const body = rows.map(cells => el("tr", {}, ...cells.map((cell, at) => {
    const content = cell instanceof Node ? cell : document.createTextNode(cell);
    return at ? el("td", {class: isNumeric ? "n" : null, "data-title": typeof titles[at] === "string" ? titles[at] : titles[at].textContent}, content) : el("th", {scope: "row"}, content);
  })));
  return el("table", {class: isNumeric && titles.length > 2 && titles.every(title => typeof title === "string") ? "cards numbers" : "cards"}, el("thead", {}, head), el("tbody", {}, ...body));
}

// What the server sends.

function take(found) {
  view.histograms = found.histograms;
  view.differences = found.differences;
  found.runs.forEach((news, place) => {
    const run = view.runs[place] ||= {rows: [], samples: [], transcripts: [], names: new Set(), color: place % COLORS, place};
    if (run.generation !== news.generation) Object.assign(run, {rows: [], samples: [], transcripts: [], names: new Set(), thinned: null});
    const {rows, samples, ...rest} = news;
    Object.assign(run, rest);
    run.rows.push(...rows);
    run.samples.push(...samples);
    if (run.samples.length > MOST_SAMPLES) run.samples.splice(0, run.samples.length - MOST_SAMPLES);
    run.isNew = rows.length + samples.length > 0;
    for (const row of rows) for (const name in row) if (name !== "step" && name !== "wall") run.names.add(name);
    const begun = run.rows.find(row => row.wall != null);
    run.begin = begun ? begun.wall - (begun["time/step"] || begun["time/eval"] || 0) : null;
  });
}
async function ask() {
  const have = view.runs.map(run => [run.generation, run.rows_end, run.samples_end].join(".")).join(",");
  try {
    const answer = await fetch(`data?have=${have}`, {cache: "no-store"});
    if (!answer.ok) throw new Error(answer.status);
    take(await answer.json());
    $("live").textContent = "live";
    drawRuns();
    if (view.runs.some(run => run.isNew)) redraw();
  } catch {
    $("live").textContent = "the server does not answer";
  }
  setTimeout(ask, document.hidden ? 10000 : 2000);
}

// The axis: steps, or the time since a run's start.

const UNITS = [["seconds", 1, 180, "s"], ["minutes", 60, 10800, "min"], ["hours", 3600, 259200, "h"], ["days", 86400, Infinity, "days"]];
function unit() {
  if (view.axis === "step") return {name: "step", size: 1};
  const longest = most(view.runs.filter(run => run.begin != null).map(run => (run.rows.findLast(row => row.wall != null)?.wall ?? run.begin) - run.begin));
  const [name, size] = UNITS.find(each => longest < each[2]) || UNITS[0];
  return {name, size};
}
function position(run, row) {
  if (view.axis === "step") return row.step;
  return row.wall == null || run.begin == null ? null : (row.wall - run.begin) / view.unit.size;
}
const isShown = at => at != null && (!view.zoom || (at >= view.zoom[0] && at <= view.zoom[1]));
const isRowShown = (run, row) => !view.zoom || isShown(position(run, row));
function zoomTo(zoom) {
  view.zoom = zoom;
  $("range").value = zoom ? zoom.map(end => +end.toPrecision(6)).join(" - ") : "";
  draw();
}
// "7", "3 - 20", "3-" -> the ends; null for anything else.
function range(text) {
  const found = text.match(/^\s*([\d.]+)\s*(?:(-|–|to)\s*([\d.]+)?)?\s*$/);
  return found && [+found[1], found[3] ? +found[3] : found[2] ? Infinity : +found[1]];
}
