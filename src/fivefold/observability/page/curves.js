// Curves.

const HEIGHT = 220, LEFT = 56, RIGHT = 12, TOP = 10, BOTTOM = 38, MOST_LINES = 12;
function matches(pattern, names) {
  const form = new RegExp(`^${pattern.replace(/[.+?^${}()|[\]\\]/g, "\\$&").replace(/\*/g, ".*")}$`);
  return names.filter(name => form.test(name));
}
// [section, [[title, names], ...]] of what there is to draw.
function sections() {
  const names = [...new Set(visible().flatMap(run => [...run.names]))].sort();
  if (view.metric) {
    const words = view.metric.toLowerCase().split(/\s+/).filter(Boolean);
    return [["", names.filter(name => words.every(word => name.toLowerCase().includes(word))).map(name => [name, [name]])]];
  }
  return first.charts.map(([section, charts]) => [section, charts.flatMap(([title, patterns]) => {
    const found = [...new Set(patterns.flatMap(pattern => matches(pattern, names)))];
    // Metrics that would be too many lines to follow have a chart each.
    if (several() && found.length > 1 && found.length * view.runs.length > MOST_LINES) return found.map(name => [`${title}: ${name}`, [name]]);
    return found.length ? [[title, found]] : [];
  })]);
}
function smoothed(points) {
  if (!view.smooth) return points;
  let sum = 0, weight = 0;
  return points.map(([at, value]) => {
    sum = view.smooth * sum + (1 - view.smooth) * value;
    weight = view.smooth * weight + (1 - view.smooth);
    return [at, sum / weight];
  });
}
// Of several runs a color is a run, and a pattern a metric; else each line has its own color and pattern. No two lines of a
// chart have both in common.
function style(run, at, metrics) {
  if (!several()) return {color: at % COLORS, dash: at % DASHES.length};
  const place = metrics === 1 ? run.place : at + metrics * Math.floor(run.place / COLORS);
  return {color: run.color, dash: place % DASHES.length};
}
function seriesOf(names) {
  const found = [];
  names.forEach((name, at) => visible().forEach(run => {
    const points = run.rows.filter(row => row[name] != null).map(row => [position(run, row), row[name]]).filter(([x]) => isShown(x));
    const label = !several() ? name : names.length === 1 ? run.name : `${run.name} · ${name}`;
    if (points.length) found.push({name, run, label, points, line: smoothed(points), ...style(run, at, names.length)});
  }));
  return found;
}
function ticks(low, high, wanted = 5) {
  const raw = (high - low) / wanted, size = 10 ** Math.floor(Math.log10(raw));
  const gap = [1, 2, 5, 10].map(factor => factor * size).find(each => each >= raw * (1 - 1e-9)), found = [];
  for (let i = Math.ceil(low / gap - 1e-9); i * gap <= high + gap * 1e-9; i++) found.push(+(i * gap).toPrecision(12));
  return found;
}
function legend(entries) {
  return el("ul", {class: "legend"}, ...entries.map(({label, title, value, ...line}) =>
    el("li", {title}, key(line), el("span", {}, label), value == null ? null : el("b", {}, value))));
}
function drawChart(title, names, width) {
  const series = seriesOf(names);
  if (!series.length) return null;
  const all = series.flatMap(each => view.smooth ? each.line : each.points), places = all.map(point => point[0]);
  let low = least(all.map(point => point[1])), high = most(all.map(point => point[1]));
  if (high - low < 1e-12 * Math.max(1, Math.abs(high))) [low, high] = [low - 0.5 * (Math.abs(low) || 1), high + 0.5 * (Math.abs(high) || 1)];
  const from = least(places), to = Math.max(most(places), from + (view.axis === "step" ? 1 : 1e-3));
  const x = at => LEFT + (at - from) / (to - from) * (width - LEFT - RIGHT);
  const y = value => TOP + (high - Math.min(high, Math.max(low, value))) / (high - low) * (HEIGHT - TOP - BOTTOM);
  const picture = svg("svg", {viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", tabindex: 0, "aria-label": `${title}: left and right arrow keys show values`});
  const text = (content, place) => picture.append(svg("text", place, content));
  for (const tick of ticks(low, high)) {
    picture.append(svg("line", {class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick)}));
    text(number(tick), {x: LEFT - 7, y: y(tick) + 4, "text-anchor": "end"});
  }
  for (const tick of ticks(from, to, width > 380 ? 6 : 4))
    if (view.axis === "time" || Number.isInteger(tick)) text(number(tick), {x: x(tick), y: HEIGHT - 22, "text-anchor": "middle"});
  text(view.axis === "step" ? "step" : `${view.unit.name} since the start`, {class: "axis", x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 5, "text-anchor": "middle"});
  const path = points => points.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  for (const {points, line, color, dash} of series) {
    if (view.smooth) picture.append(svg("polyline", {points: path(points), class: `line faint c${color}`}));
    picture.append(svg("polyline", {points: path(line), class: `line c${color}`, "stroke-dasharray": DASHES[dash]}));
    if (line.length === 1) picture.append(svg("circle", {cx: x(line[0][0]), cy: y(line[0][1]), r: 3, class: `dot c${color}`}));
  }
  const figure = el("figure", {class: "chart"}, el("figcaption", {title: names.map(meaning).join(" ")}, title), picture,
    legend(series.map(each => ({...each, title: meaning(each.name), value: number(each.points[each.points.length - 1][1])}))));
  pointTo(figure, picture, series, {x, from, to, width});
  return figure;
}
function pointTo(figure, picture, series, {x, from, to, width}) {
  const tip = el("div", {class: "tip", hidden: "", role: "status"}), cross = svg("line", {class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden"});
  const brush = svg("rect", {class: "brush", y: TOP, height: HEIGHT - TOP - BOTTOM, width: 0});
  const places = [...new Set(series.flatMap(each => each.points.map(point => point[0])))].sort((a, b) => a - b);
  picture.append(cross, brush);
  figure.append(tip);
  let start = null, current = null;
  const under = event => {
    const box = picture.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * width;
    return Math.min(to, Math.max(from, from + (at - LEFT) / (width - LEFT - RIGHT) * (to - from)));
  };
  const nearest = (found, at) => found.reduce((best, each) => Math.abs(each - at) < Math.abs(best - at) ? each : best, Infinity);
  const show = near => {
    current = near;
    cross.setAttribute("visibility", "visible");
    cross.setAttribute("x1", x(near));
    cross.setAttribute("x2", x(near));
    // Steps of runs are the same numbers, moments are not.
    const reach = view.axis === "step" ? 0 : (to - from) * 0.02;
    const lines = series.flatMap(({label, points, color, dash}) => {
      const at = nearest(points.map(point => point[0]), near), point = points.find(each => each[0] === at);
      return Math.abs(at - near) <= reach ? [el("div", {}, key({color, dash}), el("span", {}, label), el("b", {}, number(point[1])))] : [];
    });
    tip.replaceChildren(el("div", {class: "soft"}, view.axis === "step" ? `step ${near}` : `${number(near)} ${view.unit.name}`), ...lines);
    tip.hidden = false;
    const scale = picture.getBoundingClientRect().width / width, left = picture.offsetLeft ?? 0, at = left + x(near) * scale + 22;
    tip.style.left = at + tip.offsetWidth > figure.clientWidth - 6 ? `${Math.max(4, x(near) * scale - tip.offsetWidth)}px` : `${at}px`;
  };
  const hide = () => { cross.setAttribute("visibility", "hidden"); tip.hidden = true; current = null; };
  picture.onpointermove = event => {
    const at = under(event);
    if (start != null) {
      const ends = [x(start), x(at)].sort((a, b) => a - b);
      brush.setAttribute("x", ends[0]);
      brush.setAttribute("width", ends[1] - ends[0]);
    }
    show(nearest(places, at));
  };
  picture.onpointerleave = hide;
  picture.onblur = hide;
  picture.onkeydown = event => {
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (event.key === "Escape") hide();
    if (!move) return;
    event.preventDefault();
    const at = current == null ? (move > 0 ? 0 : places.length - 1) : places.indexOf(current) + move * (event.shiftKey ? 10 : 1);
    show(places[Math.min(places.length - 1, Math.max(0, at))]);
  };
  picture.onpointerdown = event => { start = under(event); picture.setPointerCapture(event.pointerId); };
  picture.onpointerup = event => {
    if (start == null) return;
    const ends = [start, under(event)].sort((a, b) => a - b);
    start = null;
    brush.setAttribute("width", 0);
    if (x(ends[1]) - x(ends[0]) > 8) zoomTo(view.axis === "step" ? [Math.floor(ends[0]), Math.ceil(ends[1])] : ends);
  };
  picture.onpointercancel = () => { start = null; brush.setAttribute("width", 0); };
  picture.ondblclick = () => zoomTo(null);
}
// Why a chart says nothing: each of its lines is constant by construction in every run. Undefined if one is not.
function whyConstant(names) {
  const reasons = visible().flatMap(run => names.filter(name => run.names.has(name)).map(name => run.constant[name]));
  return reasons.every(Boolean) ? [...new Set(reasons)].join("; ") : undefined;
}
function columnWidth() {
  const gap = 12, room = $("charts").clientWidth, columns = Math.max(1, Math.floor((room + gap) / (380 + gap)));
  return Math.max(260, Math.floor((room - gap * (columns - 1)) / columns) - 26);
}
function drawCharts() {
  const width = columnWidth(), folded = new Map(), open = new Set([...document.querySelectorAll("#folded details[open]")].map(each => each.dataset.why));
  const parts = sections().flatMap(([section, charts]) => {
    const figures = [];
    for (const [title, names] of charts) {
      // A folded chart is drawn within a box.
      const why = view.metric ? undefined : whyConstant(names), figure = drawChart(title, names, why ? width - 34 : width);
      if (figure && why) folded.set(why, [...(folded.get(why) || []), [title, figure]]);
      else if (figure) figures.push(figure);
    }
    return figures.length ? [section ? el("h3", {}, section) : null, el("div", {class: "charts"}, ...figures)].filter(Boolean) : [];
  });
  $("charts").replaceChildren(...(parts.length ? parts : [el("p", {class: "soft"}, view.metric ? "No metric has this name." : view.zoom ? "No metrics in this range." : "No metrics yet.")]));
  $("folded").replaceChildren(...(folded.size ? [el("h3", {}, "Constant by construction"), el("div", {class: "box"}, ...[...folded].map(([why, charts]) =>
    el("details", {"data-why": why, open: open.has(why) ? "" : null}, el("summary", {}, el("b", {}, charts.map(([title]) => title).join(", ")), el("span", {class: "soft"}, `: ${why}`)),
      el("div", {class: "charts"}, ...charts.map(([, figure]) => figure)))))] : []));
}
