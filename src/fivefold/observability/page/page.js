"use strict";
// One page for a report in a file and for one that is served: the latter asks for what is new. Texts of models and data
// become text nodes, never markup.
const COLORS = ["#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#65a30d"];
const DASHES = ["", "5 3", "2 2", "8 3 2 3"];
const HEIGHT = 210, LEFT = 54, RIGHT = 10, TOP = 10, BOTTOM = 22, PAGE = 40;
const first = JSON.parse(document.getElementById("data").textContent);
const view = {runs: [], hidden: new Set(), zoom: null, smooth: 0, metric: "", shown: PAGE};
const $ = id => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value != null) node.setAttribute(name, value);
  node.append(...children.filter(child => child != null));
  return node;
}
function svg(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}
function number(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
  return size >= 1000 ? Math.round(value).toLocaleString("en-US") : String(+value.toPrecision(4));
}
function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 90) return `${+seconds.toPrecision(3)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;
}
const least = values => values.reduce((a, b) => b < a ? b : a, Infinity);
const most = values => values.reduce((a, b) => b > a ? b : a, -Infinity);
const visible = () => view.runs.filter((run, place) => !view.hidden.has(place));
const isWithin = step => !view.zoom || (step >= view.zoom[0] && step <= view.zoom[1]);
const meaning = name => first.meanings[name] || "";
function last(run, name) {
  for (let i = run.rows.length - 1; i >= 0; i--) if (run.rows[i][name] != null) return run.rows[i][name];
  return null;
}

// --- what the server knows ---------------------------------------------------------------------------------------------

function take(found) {
  found.runs.forEach((news, place) => {
    const run = view.runs[place] ||= {rows: [], samples: [], names: new Set(), color: COLORS[place % COLORS.length]};
    if (run.generation !== news.generation) Object.assign(run, {rows: [], samples: [], names: new Set(), thinned: {rows: 0, seconds: []}});
    const {rows, samples, ...rest} = news;
    Object.assign(run, rest);
    run.rows.push(...rows);
    run.samples.push(...samples);
    if (run.samples.length > 2000) run.samples.splice(0, run.samples.length - 2000);
    run.isNew = rows.length + samples.length > 0;
    for (const row of rows) for (const name in row) run.names.add(name);
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
    if (view.runs.some(run => run.isNew)) draw();
  } catch {
    $("live").textContent = "the server does not answer";
  }
  setTimeout(ask, document.hidden ? 10000 : 2000);
}

// --- runs --------------------------------------------------------------------------------------------------------------

const STATES = {running: "running", finished: "finished", ended: "ended when asked to", failed: "failed", dead: "gone without a word", over: "over"};
function drawRuns() {
  $("runs").replaceChildren(...view.runs.map((run, place) => {
    const facts = [["step", run.total ? `${run.step} of ${run.total}` : run.step], ["a step", duration(run.seconds_per_step)]];
    if (run.seconds_left != null) facts.push(["left", duration(run.seconds_left)]);
    for (const [label, name] of [["reward", "reward/mean"], ["loss", "policy/loss"], ["tokens/s", "throughput/tokens_per_second"]])
      if (last(run, name) != null) facts.push([label, number(last(run, name))]);
    const accuracy = [...run.names].filter(name => /^val\/.*accuracy$/.test(name)).sort()[0];
    if (accuracy) facts.push(["accuracy", number(last(run, accuracy))]);
    const top = el("div", {class: "top", title: view.runs.length > 1 ? "Show or hide this run" : null},
      el("i", {class: "chip", style: `background:${run.color}`}), el("b", {}, run.name), el("span", {class: `badge ${run.state}`}, STATES[run.state]));
    if (view.runs.length > 1) top.onclick = () => { view.hidden.has(place) ? view.hidden.delete(place) : view.hidden.add(place); drawRuns(); draw(); };
    const share = run.total ? Math.min(100, 100 * run.step / run.total) : 0;
    return el("div", {class: `run${view.hidden.has(place) ? " off" : ""}`}, top, el("div", {class: "path"}, run.path),
      run.total ? el("div", {class: "bar"}, el("i", {style: `width:${share}%;background:${run.color}`})) : null,
      el("div", {class: "facts"}, ...facts.map(([label, value]) => el("span", {}, `${label} `, el("em", {}, String(value))))),
      ...run.warnings.map(text => el("div", {class: "warning"}, text)),
      run.reason && run.state !== "running" ? el("div", {class: "reason"}, run.reason) : null);
  }));
}

// --- curves ------------------------------------------------------------------------------------------------------------

function matches(pattern, names) {
  const form = new RegExp(`^${pattern.replace(/[.+?^${}()|[\]\\]/g, "\\$&").replace(/\*/g, ".*")}$`);
  return names.filter(name => form.test(name));
}
function chartsToDraw() {
  const names = [...new Set(visible().flatMap(run => [...run.names]))].filter(name => name !== "step" && name !== "wall").sort();
  if (view.metric) {
    const words = view.metric.toLowerCase().split(/\s+/).filter(Boolean);
    return names.filter(name => words.every(word => name.toLowerCase().includes(word))).map(name => [name, [name]]);
  }
  return first.charts.map(([title, patterns]) => [title, [...new Set(patterns.flatMap(pattern => matches(pattern, names)))]]).filter(([, found]) => found.length);
}
function smoothed(points) {
  if (!view.smooth) return points;
  let mean = 0, weight = 0;
  return points.map(([step, value]) => {
    mean = view.smooth * mean + (1 - view.smooth) * value;
    weight = view.smooth * weight + (1 - view.smooth);
    return [step, mean / weight];
  });
}
function seriesOf(names) {
  const runs = visible(), several = view.runs.length > 1, found = [];
  names.forEach((name, at) => runs.forEach(run => {
    const points = run.rows.filter(row => row[name] != null && isWithin(row.step)).map(row => [row.step, row[name]]);
    if (points.length) found.push({name, run, points, line: smoothed(points), label: several ? `${run.name} · ${name}` : name,
      color: several ? run.color : COLORS[at % COLORS.length], dash: several ? DASHES[at % DASHES.length] : ""});
  }));
  return found;
}
function ticks(low, high) {
  const raw = (high - low) / 4, size = 10 ** Math.floor(Math.log10(raw));
  const gap = [1, 2, 5, 10].map(factor => factor * size).find(each => each >= raw), found = [];
  for (let i = Math.ceil(low / gap - 1e-9); i * gap <= high + gap * 1e-9; i++) found.push(+(i * gap).toPrecision(12));
  return found;
}
function drawChart(title, names, width) {
  const series = seriesOf(names);
  if (!series.length) return null;
  const all = series.flatMap(each => view.smooth ? each.line : each.points), steps = all.map(point => point[0]);
  let low = least(all.map(point => point[1])), high = most(all.map(point => point[1]));
  if (high - low < 1e-12 * Math.max(1, Math.abs(high))) [low, high] = [low - 0.5 * (Math.abs(low) || 1), high + 0.5 * (Math.abs(high) || 1)];
  const from = least(steps), to = Math.max(most(steps), from + 1);
  const x = step => LEFT + (step - from) / (to - from) * (width - LEFT - RIGHT);
  const y = value => TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM);
  const picture = svg("svg", {viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": title});
  const text = (content, place) => { const node = svg("text", place); node.textContent = content; picture.append(node); };
  for (const tick of ticks(low, high)) {
    picture.append(svg("line", {class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick)}));
    text(number(tick), {x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end"});
  }
  for (const tick of ticks(from, to)) if (Number.isInteger(tick)) text(tick, {x: x(tick), y: HEIGHT - 6, "text-anchor": "middle"});
  const path = points => points.map(([step, value]) => `${x(step).toFixed(1)},${y(Math.min(high, Math.max(low, value))).toFixed(1)}`).join(" ");
  for (const {points, line, color, dash} of series) {
    if (view.smooth) picture.append(svg("polyline", {points: path(points), fill: "none", stroke: color, "stroke-width": 1, opacity: 0.22}));
    picture.append(svg("polyline", {points: path(line), fill: "none", stroke: color, "stroke-width": 1.7, "stroke-dasharray": dash, "stroke-linejoin": "round"}));
    if (line.length === 1) picture.append(svg("circle", {cx: x(line[0][0]), cy: y(line[0][1]), r: 3, fill: color}));
  }
  const several = view.runs.length > 1, legend = el("div", {class: "legend"}, ...names.flatMap(name => {
    const own = series.filter(each => each.name === name);
    if (!own.length) return [];
    const key = own[0].dash ? `border-color:${several ? "currentColor" : own[0].color};border-top-style:dashed` : `border-color:${several ? "currentColor" : own[0].color}`;
    return [el("span", {title: meaning(name)}, el("i", {class: "key", style: key}), `${name} `, ...own.flatMap(({color, points, run}) =>
      [el("b", {style: several ? `color:${color}` : null, title: several ? run.name : null}, number(points[points.length - 1][1])), " "]))];
  }));
  const figure = el("figure", {class: "chart"}, el("figcaption", {title: names.map(meaning).join(" ")}, title), picture, legend);
  pointTo(figure, picture, series, {x, from, to, width});
  return figure;
}
function pointTo(figure, picture, series, {x, from, to, width}) {
  const tip = el("div", {class: "tip", hidden: ""}), cross = svg("line", {class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden"});
  const brush = svg("rect", {class: "brush", y: TOP, height: HEIGHT - TOP - BOTTOM, width: 0});
  picture.append(cross, brush);
  figure.append(tip);
  let start = null;
  const stepAt = event => {
    const box = picture.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * width;
    return Math.min(to, Math.max(from, from + (at - LEFT) / (width - LEFT - RIGHT) * (to - from)));
  };
  picture.onpointermove = event => {
    const at = stepAt(event), near = series.flatMap(each => each.points).reduce((best, [step]) => Math.abs(step - at) < Math.abs(best - at) ? step : best, Infinity);
    if (start != null) {
      const ends = [x(start), x(at)].sort((a, b) => a - b);
      brush.setAttribute("x", ends[0]);
      brush.setAttribute("width", ends[1] - ends[0]);
    }
    cross.setAttribute("visibility", "visible");
    cross.setAttribute("x1", x(near));
    cross.setAttribute("x2", x(near));
    const lines = series.flatMap(({label, color, points}) => {
      const point = points.find(([step]) => step === near);
      return point ? [el("div", {}, el("i", {class: "key", style: `border-color:${color}`}), `${label} `, el("b", {}, number(point[1])))] : [];
    });
    tip.replaceChildren(el("div", {class: "soft"}, `step ${near}`), ...lines);
    tip.hidden = false;
    const scale = picture.getBoundingClientRect().width / width, left = x(near) * scale + 22;
    tip.style.top = "2.4rem";
    tip.style.left = left + tip.offsetWidth > figure.clientWidth - 6 ? `${Math.max(4, x(near) * scale - tip.offsetWidth + 4)}px` : `${left}px`;
  };
  picture.onpointerleave = () => { cross.setAttribute("visibility", "hidden"); tip.hidden = true; };
  picture.onpointerdown = event => { start = stepAt(event); picture.setPointerCapture(event.pointerId); event.preventDefault(); };
  picture.onpointerup = event => {
    const ends = [start, stepAt(event)].sort((a, b) => a - b);
    start = null;
    brush.setAttribute("width", 0);
    if (x(ends[1]) - x(ends[0]) > 8) { view.zoom = [Math.floor(ends[0]), Math.ceil(ends[1])]; draw(); }
  };
  picture.ondblclick = () => { view.zoom = null; draw(); };
}
function drawCharts() {
  const place = $("charts"), columns = getComputedStyle(place).gridTemplateColumns.split(" ");
  const width = Math.max(260, Math.round(parseFloat(columns[0]) || 440) - 28);
  const figures = chartsToDraw().map(([title, names]) => drawChart(title, names, width)).filter(Boolean);
  place.replaceChildren(...(figures.length ? figures : [el("p", {class: "soft"}, view.metric ? "No metric has this name." : "No metrics yet.")]));
}

// --- numbers and time --------------------------------------------------------------------------------------------------

function drawNumbers() {
  const runs = visible(), names = [...new Set(runs.flatMap(run => [...run.names]))].sort();
  const shown = [...names.filter(name => /^val\/.*accuracy$/.test(name)), ...first.numbers.filter(name => names.includes(name))];
  const cells = values => values.map(value => el("td", {class: "n"}, number(value)));
  const head = runs.length > 1 ? runs.map(run => run.name) : ["first", "last", "least", "most"];
  const rows = shown.map(name => {
    if (runs.length > 1) return el("tr", {}, el("td", {title: meaning(name)}, name), ...cells(runs.map(run => last(run, name))));
    const values = runs.length ? runs[0].rows.map(row => row[name]).filter(value => value != null) : [];
    return values.length ? el("tr", {}, el("td", {title: meaning(name)}, name), ...cells([values[0], values[values.length - 1], least(values), most(values)])) : null;
  });
  $("numbers").replaceChildren(el("table", {}, el("tr", {}, el("th", {}, runs.length > 1 ? "last value" : "metric"), ...head.map(title => el("th", {class: "n"}, title))), ...rows.filter(Boolean)));
}
function drawTimes() {
  const runs = visible();
  const totals = run => {
    const found = {};
    // Of a stretch of steps whose curves are thinned its sums come along.
    for (const row of [...run.thinned.seconds, ...run.rows.slice(run.thinned.rows)]) if (isWithin(row.step)) for (const name of run.names) if (name.startsWith("time/")) found[name.slice(5)] = (found[name.slice(5)] || 0) + (row[name] || 0);
    return found;
  };
  const all = runs.map(totals), stages = [...new Set(all.flatMap(Object.keys))].filter(name => name !== "step");
  stages.sort((a, b) => Math.max(...all.map(each => each[b] || 0)) - Math.max(...all.map(each => each[a] || 0)));
  const parts = runs.map((run, place) => {
    const whole = stages.reduce((sum, name) => sum + (all[place][name] || 0), 0) || 1, here = stages.filter(name => all[place][name]);
    const stack = el("div", {class: "stack"}, ...here.map(name => el("i", {style: `width:${100 * all[place][name] / whole}%;background:${run.stage_colors[name]}`, title: `${name} ${duration(all[place][name])}`})));
    const legend = el("div", {class: "legend"}, ...here.map(name => el("span", {}, el("i", {class: "key", style: `border-color:${run.stage_colors[name]};border-top-width:8px`}),
      `${name} `, el("b", {}, `${Math.round(100 * all[place][name] / whole)}%`), ` ${duration(all[place][name])}`)));
    const box = el("div", {class: "box", style: "margin-bottom:.8rem"}, el("b", {}, runs.length > 1 ? run.name : "Stages, all steps together"), stack, legend);
    // The one piece of markup that comes ready: our own code drew it, with every name escaped.
    const lanes = el("div", {style: "margin-top:.8rem"});
    lanes.innerHTML = run.timeline;
    box.append(lanes);
    return box;
  });
  $("times").replaceChildren(...parts);
}

// --- samples -----------------------------------------------------------------------------------------------------------

function wanted() {
  const words = $("search").value.toLowerCase(), kind = $("kind").value, reward = $("reward").value;
  const range = $("steps").value.match(/^\s*(\d+)\s*(?:-\s*(\d+)?)?\s*$/), isRange = $("steps").value.includes("-");
  const from = range ? +range[1] : -Infinity, to = !range || (isRange && !range[2]) ? Infinity : +(range[2] ?? range[1]);
  return sample => sample.step >= from && sample.step <= to && (!kind || sample.kind === kind)
    && (!reward || (reward === "none" ? sample.reward == null : sample.reward != null && (sample.reward > 0) === (reward === "above")))
    && (!words || [sample.prompt, sample.response, sample.ground_truth].some(text => String(text ?? "").toLowerCase().includes(words)));
}
function drawSamples() {
  const several = view.runs.length > 1, keep = wanted();
  const found = visible().flatMap(run => run.samples.filter(keep).map(sample => [run, sample]));
  found.reverse();
  if (several) found.sort((a, b) => b[1].step - a[1].step);
  const text = content => el("td", {class: "text"}, el("pre", {}, String(content ?? "")));
  const rows = found.slice(0, view.shown).map(([run, sample]) => {
    const parts = Object.entries(sample.reward_parts || {}).map(([name, value]) => `${name} ${number(value)}`).join(", ");
    return el("tr", {}, el("td", {}, String(sample.step)), several ? el("td", {}, el("i", {class: "chip", style: `display:inline-block;background:${run.color}`, title: run.name})) : null,
      el("td", {class: "soft"}, String(sample.kind ?? "")), text(sample.prompt), text(sample.response), el("td", {}, String(sample.ground_truth ?? "")),
      el("td", {class: `n ${sample.reward > 0 ? "good" : "bad"}`, title: parts}, number(sample.reward)),
      el("td", {class: "n soft", title: sample.finished === false ? "cut at the limit of tokens" : null}, `${sample.response_tokens ?? ""}${sample.finished === false ? " …" : ""}`));
  });
  const head = ["step", ...(several ? ["run"] : []), "", "prompt", "response", "truth", "reward", "tokens"];
  $("rows").replaceChildren(el("table", {class: "samples"}, el("tr", {}, ...head.map(title => el("th", {class: title === "reward" || title === "tokens" ? "n" : null}, title))), ...rows));
  $("count").textContent = `${found.length} sample${found.length === 1 ? "" : "s"}`;
  $("more").hidden = found.length <= view.shown;
}
function drawConfigs() {
  $("configs").replaceChildren(...view.runs.map(run => el("details", {}, el("summary", {}, view.runs.length > 1 ? `${run.name}: run.yaml` : "run.yaml"), el("pre", {}, run.config))));
}

function draw() {
  $("whole").hidden = !view.zoom;
  drawCharts();
  drawNumbers();
  drawTimes();
  drawSamples();
}
$("smooth").oninput = event => { view.smooth = +event.target.value; drawCharts(); };
$("metric").oninput = event => { view.metric = event.target.value.trim(); drawCharts(); };
$("whole").onclick = () => { view.zoom = null; draw(); };
for (const id of ["search", "steps", "kind", "reward"]) $(id).oninput = () => { view.shown = PAGE; drawSamples(); };
$("more").onclick = () => { view.shown += PAGE; drawSamples(); };
addEventListener("resize", () => { clearTimeout(view.timer); view.timer = setTimeout(drawCharts, 150); });
take(first);
drawRuns();
draw();
drawConfigs();
if (first.live) { $("live").textContent = "live"; setTimeout(ask, 1000); }
