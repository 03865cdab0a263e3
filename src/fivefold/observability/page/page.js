// Runs, numbers, configuration, data.

const STATES = {running: "running", finished: "finished", ended: "ended when asked to", failed: "failed", dead: "gone without a word", over: "over"};
function drawRuns() {
  const focused = document.activeElement?.dataset?.run;
  $("runs").replaceChildren(...view.runs.map((run, place) => {
    const facts = [["step", run.total ? `${run.step} of ${run.total}` : run.step], ["a step", duration(run.seconds_per_step)]];
    if (run.seconds_left != null) facts.push(["left", duration(run.seconds_left)]);
    for (const [label, name] of [["reward", "reward/mean"], ["loss", "policy/loss"], ["tokens/s", "throughput/tokens_per_second"]])
      if (last(run, name) != null) facts.push([label, number(last(run, name))]);
    const accuracy = [...run.names].filter(name => /^val\/.*accuracy$/.test(name)).sort()[0];
    if (accuracy) facts.push(["accuracy", number(last(run, accuracy))]);
    const isOff = view.hidden.has(place), title = [chip(run), el("b", {}, run.name)];
    const toggle = () => { isOff ? view.hidden.delete(place) : view.hidden.add(place); drawRuns(); draw(); };
    const top = el("div", {class: "top"}, several() ? el("button", {type: "button", class: "name", "data-run": place, "aria-pressed": String(!isOff), title: isOff ? "Show this run" : "Hide this run", onclick: toggle}, ...title) : el("span", {class: "name"}, ...title),
      isOff ? el("span", {class: "badge soft"}, "hidden") : null, el("span", {class: `badge ${run.state}`}, STATES[run.state]));
    const share = run.total ? Math.min(100, 100 * run.step / run.total) : 0;
    return el("section", {class: `run${isOff ? " off" : ""}`}, top, el("div", {class: "path"}, run.path),
      run.total ? el("div", {class: "bar"}, el("i", {class: `c${run.color}`, style: `width:${share}%`})) : null,
      el("dl", {class: "facts"}, ...facts.map(([label, value]) => el("div", {}, el("dt", {}, label), el("dd", {}, String(value))))),
      ...run.warnings.map(text => el("div", {class: "warning"}, text)),
      run.reason && run.state !== "running" ? el("div", {class: "reason"}, run.reason) : null);
  }));
  if (focused != null) document.querySelector(`[data-run="${focused}"]`)?.focus();
}
function drawDifferences() {
  $("compare").hidden = !several();
  if (!several()) return;
  const shown = visible(), rows = view.differences.map(([name, values]) => [el("code", {}, ...name.split(/(?<=[._/])/).flatMap(part => [part, el("wbr")])), ...shown.map(run => values[run.place] ?? "not set")]);
  const head = shown.map(run => el("span", {}, chip(run), run.name));
  $("differences").replaceChildren(rows.length ? table(["key", ...head], rows) : el("p", {class: "soft"}, "All settings of these runs are the same."));
}
function drawNumbers() {
  const runs = visible(), names = [...new Set(runs.flatMap(run => [...run.names]))].sort();
  const shown = [...new Set(first.numbers.flatMap(pattern => matches(pattern, names)))];
  const name = text => el("span", {title: meaning(text)}, text);
  const rows = several() ? shown.map(each => [name(each), ...runs.map(run => number(last(run, each)))]) : shown.flatMap(each => {
    const values = runs.flatMap(run => run.rows.filter(row => isRowShown(run, row)).map(row => row[each])).filter(value => value != null);
    return values.length ? [[name(each), ...[values[0], values[values.length - 1], least(values), most(values)].map(number)]] : [];
  });
  const titles = several() ? ["last value", ...runs.map(run => el("span", {}, chip(run), run.name))] : ["metric", "first", "last", "least", "greatest"];
  $("numbers").replaceChildren(rows.length ? table(titles, rows, true) : el("p", {class: "soft"}, "No metrics yet."));
}
function drawConfigs() {
  $("configs").replaceChildren(...view.runs.map(run => el("details", {}, el("summary", {}, several() ? `${run.name}: run.yaml` : "run.yaml"), el("pre", {}, run.config))));
}
// A served page links to the whole files; a page in a file has what is in it.
function save(run, name, text) {
  const address = URL.createObjectURL(new Blob([text], {type: "text/plain"})), link = el("a", {href: address, download: `${run.name.replace(/[^\w.-]+/g, "_")}-${name}`});
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}
function drawData() {
  const lines = rows => rows.map(row => JSON.stringify(row) + "\n").join("");
  $("files").replaceChildren(table(several() ? ["run", "metrics", "samples", "settings"] : ["file", "metrics", "samples", "settings"], view.runs.map((run, place) => {
    const files = [["metrics.jsonl", () => lines(run.rows), run.rows.length, run.rows_end, "row"], ["samples.jsonl", () => lines(run.samples), run.samples.length, run.samples_end, "sample"], ["run.yaml", () => run.config, 0, 0, ""]];
    return [run.name, ...files.map(([name, text, here, all, word]) => {
      const note = !word ? null : first.live || here >= all ? count(all, word) : `${here.toLocaleString("en-US")} of ${count(all, word)}`;
      const control = first.live ? el("a", {class: "button", href: `raw/${place}/${name}`, download: ""}, name) : el("button", {type: "button", onclick: () => save(run, name, text())}, name);
      return el("span", {class: "file"}, control, note ? el("span", {class: "soft"}, note) : null);
    })];
  })));
  const isPart = !first.live && view.runs.some(run => run.rows.length < run.rows_end || run.samples.length < run.samples_end);
  $("part").textContent = isPart ? "This page has a part of the rows: thinned curves and the latest samples. The run's directory has all of them." : "";
}

function draw() {
  view.unit = unit();
  $("whole").hidden = !view.zoom;
  $("range-unit").textContent = view.axis === "step" ? "Steps" : view.unit.name[0].toUpperCase() + view.unit.name.slice(1);
  drawDifferences();
  drawCharts();
  drawHistograms();
  drawNumbers();
  drawTimes();
  drawSamples();
  drawTranscripts();
  drawData();
}
// Draw what is new without disturbing who is reading: the chart in focus stays in focus, samples in focus stay as they are.
function redraw() {
  const titleOf = chart => chart.querySelector("figcaption").textContent, focused = document.activeElement?.closest(".chart");
  view.isReading = $("rows").contains(document.activeElement);
  draw();
  view.isReading = false;
  if (focused) [...document.querySelectorAll(".chart")].find(chart => titleOf(chart) === titleOf(focused))?.querySelector("svg").focus({preventScroll: true});
}
$("smooth").oninput = event => { view.smooth = +event.target.value; drawCharts(); };
$("metric").oninput = event => { view.metric = event.target.value.trim(); drawCharts(); };
$("whole").onclick = () => { zoomTo(null); $("range").focus(); };
$("range").onchange = event => zoomTo(range(event.target.value));
for (const input of document.querySelectorAll("input[name=axis]")) input.onchange = () => { view.axis = input.value; zoomTo(null); };
for (const id of ["search", "steps", "kind", "reward"]) $(id).oninput = () => { view.shown = PAGE; drawSamples(); };
$("more").onclick = () => { view.shown += PAGE; drawSamples(); };
addEventListener("resize", () => { clearTimeout(view.timer); view.timer = setTimeout(() => { drawCharts(); drawHistograms(); drawTimes(); }, 150); });
take(first);
for (const input of document.querySelectorAll("input[name=axis]")) input.disabled = input.value === "time" && view.runs.every(run => run.begin == null) && !first.live;
drawRuns();
draw();
drawConfigs();
if (first.live) { $("live").textContent = "live"; setTimeout(ask, 1000); }
