// Where the time goes.

function stageSeconds(run) {
  const found = {}, thinned = run.thinned || {rows: 0, seconds: []};
  // For a stretch of steps whose curves are thinned, the sums are sent too.
  for (const row of [...thinned.seconds, ...run.rows.slice(thinned.rows)]) if (isRowShown(run, row))
    for (const name of run.names) if (name.startsWith("time/") && name !== "time/step") found[name.slice(5)] = (found[name.slice(5)] || 0) + (row[name] || 0);
  return Object.entries(found).filter(([, seconds]) => seconds > 0).sort((a, b) => b[1] - a[1]);
}
const swatch = (run, name) => el("i", {class: "chip", style: `background:${run.stage_colors[name]}`, "aria-hidden": "true"});
function drawTimes() {
  $("times").replaceChildren(...visible().map(run => {
    const stages = stageSeconds(run), whole = stages.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
    const stack = el("div", {class: "stack", "aria-hidden": "true"}, ...stages.map(([name, seconds]) => el("i", {style: `width:${100 * seconds / whole}%;background:${run.stage_colors[name]}`, title: `${name} ${duration(seconds)}`})));
    const list = el("ul", {class: "stages"}, ...stages.map(([name, seconds]) => el("li", {}, swatch(run, name), el("span", {}, name),
      el("b", {}, seconds / whole < 5e-4 ? "< 0.1 %" : `${(100 * seconds / whole).toFixed(1)} %`), el("span", {class: "n soft"}, duration(seconds)))));
    return el("div", {class: "box"}, el("b", {}, several() ? run.name : view.zoom ? "Stages of the steps shown" : "Stages of all steps"), stack, list, drawTimeline(run));
  }));
}
function drawTimeline(run) {
  const found = run.timeline;
  if (!found || !found.stages.length) return null;
  const width = Math.max(280, Math.min(1560, $("times").clientWidth - 34)), lane = 24, load = 56, gap = 22, left = 4, span = found.seconds || 1e-9;
  const x = moment => left + moment / span * (width - 2 * left), hasLoad = found.in_flight.length > 0, height = gap + lane + (hasLoad ? gap + load : 0);
  const picture = svg("svg", {viewBox: `0 0 ${width} ${height + 24}`, role: "img", "aria-label": "timeline of the last steps"});
  const text = (content, place) => picture.append(svg("text", place, content));
  text("trainer", {x: left, y: 14});
  for (const [name, start, seconds] of found.stages) {
    if (name === "step") picture.append(svg("line", {class: "grid", x1: x(start), x2: x(start), y1: gap, y2: height}));
    else picture.append(svg("rect", {x: x(start), width: Math.max(0.5, x(start + seconds) - x(start)), y: gap, height: lane, fill: run.stage_colors[name] || "#94a3b8"},
      svg("title", {}, `${name} ${duration(seconds)}`)));
  }
  if (hasLoad) {
    const highest = most(found.in_flight.map(point => point[1])) || 1, base = height, top = value => base - value / highest * load;
    text(`requests in flight on the first rank, at most ${number(highest)}`, {x: left, y: gap + lane + 15});
    const path = found.in_flight.map(([moment, value], at) => `L${x(moment)} ${top(value)}H${x(found.in_flight[at + 1]?.[0] ?? span)}`).join("");
    picture.append(svg("path", {d: `M${x(found.in_flight[0][0])} ${base}${path}V${base}Z`, class: "area"}));
  }
  const [, size, , short] = UNITS.find(each => span < each[2]);
  for (const tick of ticks(0, span / size, width > 500 ? 6 : 3)) {
    const at = x(tick * size);
    text(`${number(tick)} ${short}`, {x: at, y: height + 17, "text-anchor": at < 30 ? "start" : at > width - 30 ? "end" : "middle"});
  }
  const [from, to] = found.steps, names = [...new Set(found.stages.map(stage => stage[0]))].filter(name => name !== "step").sort();
  return el("figure", {class: "timeline"}, el("figcaption", {}, `Timeline of ${from === to ? `step ${from}` : `steps ${from} to ${to}`}`), picture,
    el("ul", {class: "legend"}, ...names.map(name => el("li", {}, swatch(run, name), el("span", {}, name === "rollout" ? "rollout (waits for the engine)" : name)))));
}
