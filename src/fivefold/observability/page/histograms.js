// Histograms of rewards and lengths.

const BARS = 190;
// The steps of a run that charts show, as [first, last]; null if all are shown.
function shownSteps(run) {
  if (!view.zoom) return null;
  if (view.axis === "step") return view.zoom;
  const steps = run.rows.filter(row => isRowShown(run, row)).map(row => row.step);
  return [least(steps), most(steps)];
}
// Of one run its first and its last quarter, of several the last quarter of each.
function portions(run, stretches) {
  const shown = shownSteps(run), found = stretches.filter(each => each.counts.some(Boolean) && (!shown || (each.to >= shown[0] && each.from <= shown[1])));
  const size = Math.max(1, Math.round(found.length / 4)), parts = several() || found.length < 2 ? [found.slice(-size)] : [found.slice(0, size), found.slice(-size)];
  return parts.filter(part => part.length).map((part, at) => {
    const counts = part[0].counts.map((_, bin) => part.reduce((sum, each) => sum + each.counts[bin], 0));
    const total = counts.reduce((a, b) => a + b, 0), from = part[0].from, to = part[part.length - 1].to;
    const steps = from === to ? `step ${from}` : `steps ${from} to ${to}`, line = several() ? style(run, 0, 1) : {color: parts.length - 1 - at, dash: parts.length - 1 - at};
    return {label: several() ? `${run.name} · ${steps}` : steps, shares: counts.map(each => each / total), total, ...line};
  });
}
function drawHistogram(kind, title, word, width) {
  const data = view.histograms[kind];
  if (!data) return null;
  const parts = visible().flatMap(run => portions(run, data.runs[run.place] || []));
  if (!parts.length) return null;
  const high = Math.min(1, Math.ceil(most(parts.flatMap(part => part.shares)) * 10) / 10), bins = data.bins, band = (width - LEFT - RIGHT) / bins.length, isDistinct = bins[0][0] === bins[0][1];
  const y = share => TOP + (1 - share / high) * (BARS - TOP - BOTTOM);
  const picture = svg("svg", {viewBox: `0 0 ${width} ${BARS}`, role: "img", "aria-label": `${title}: share of samples`});
  const text = (content, place) => picture.append(svg("text", place, content));
  for (const tick of ticks(0, high)) {
    picture.append(svg("line", {class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick)}));
    text(`${number(tick * 100)} %`, {x: LEFT - 7, y: y(tick) + 4, "text-anchor": "end"});
  }
  const every = Math.ceil(bins.length * 46 / (width - LEFT - RIGHT));
  bins.forEach(([from], at) => { if (at % every === 0) text(number(from), {x: LEFT + band * (at + (isDistinct ? 0.5 : 0)), y: BARS - 22, "text-anchor": "middle"}); });
  text(word, {class: "axis", x: (LEFT + width - RIGHT) / 2, y: BARS - 5, "text-anchor": "middle"});
  for (const {shares, color, dash} of parts) {
    const inset = isDistinct ? band * 0.15 : 0, base = y(0);
    const corners = shares.map((share, at) => [LEFT + band * at + inset, LEFT + band * (at + 1) - inset, y(share)]);
    const outline = isDistinct ? corners.map(([a, b, top]) => `M${a} ${base}V${top}H${b}V${base}`).join("") : `M${LEFT} ${base}${corners.map(([a, b, top]) => `L${a} ${top}H${b}`).join("")}V${base}`;
    picture.append(svg("path", {d: outline, class: `line filled c${color}`, "stroke-dasharray": DASHES[dash]}));
  }
  parts.forEach(({shares, label}) => shares.forEach((share, at) => {
    if (!share) return;
    const [from, to] = bins[at], zone = svg("rect", {x: LEFT + band * at, width: band, y: TOP, height: BARS - TOP - BOTTOM, fill: "transparent"});
    zone.append(svg("title", {}, `${number(from)}${from === to ? "" : ` to ${number(to)}`}: ${parts.map(part => `${part.label} ${number(part.shares[at] * 100)} %`).join(", ")}`));
    picture.append(zone);
  }));
  return el("figure", {class: "histogram"}, el("figcaption", {}, title), picture, legend(parts.map(part => ({...part, value: count(part.total, "sample")}))));
}
function drawHistograms() {
  const width = columnWidth(), figures = [drawHistogram("reward", "Rewards of samples", "reward", width), drawHistogram("length", "Lengths of responses", "tokens", width)].filter(Boolean);
  $("distributions").hidden = !figures.length;
  $("histograms").replaceChildren(...figures);
}
