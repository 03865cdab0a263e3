// Transcripts: trajectories of several turns.

// Shades of sampled tokens: the less likely a token was, the darker; the line below it is the sign of its advantage.
const SURPRISE = [[-0.1, ""], [-1, "p1"], [-3, "p2"], [-Infinity, "p3"]];
function token(sequence, at) {
  const text = sequence.texts[at];
  if (!sequence.mask[at]) return el("span", {class: "observed"}, text);
  const logprob = sequence.logprobs[at], advantage = sequence.advantages?.[at];
  const shade = logprob == null ? "" : SURPRISE.find(([least]) => logprob >= least)[1], sign = advantage > 0 ? "up" : advantage < 0 ? "down" : "";
  const title = [`log-prob ${number(logprob)}`, advantage == null ? null : `advantage ${signed(+advantage.toPrecision(3))}`].filter(part => part).join(", ");
  return el("span", {class: ["sampled", shade, sign].filter(part => part).join(" "), title}, text);
}
const tokens = (sequence, begin, end) => el("pre", {}, ...Array.from({length: end - begin}, (_, at) => token(sequence, begin + at)));
function turnOf(sequence, turn) {
  const facts = [count(turn.end - turn.begin, "token"), turn.reward ? `reward ${signed(turn.reward)}` : null, turn.finish === "stop" ? null : turn.finish,
    duration(turn.seconds), turn.calls.length ? turn.calls.map(call => call.error ? "malformed call" : call.name).join(", ") : null];
  return el("details", {class: "turn"}, el("summary", {}, el("b", {}, `Turn ${turn.number + 1}`), " ", el("span", {class: "soft"}, facts.filter(fact => fact).join(" · "))), tokens(sequence, turn.begin, turn.end));
}
// What lies between the turns of a sequence is what the model read.
function sequenceParts(sequence) {
  const parts = [], read = (begin, end) => { if (end > begin) parts.push(el("details", {class: "turn"}, el("summary", {class: "soft"}, `Read ${count(end - begin, "token")}`), tokens(sequence, begin, end))); };
  let at = 0;
  for (const turn of sequence.turns) {
    read(at, turn.begin);
    parts.push(turnOf(sequence, turn));
    at = turn.end;
  }
  read(at, sequence.tokens.length);
  return parts;
}
function sequenceOf(sequence) {
  const broken = sequence.break && el("div", {class: "warning"}, `A new sequence begins (${sequence.break.cause ?? "no cause given"}): token ${sequence.break.at} is ${JSON.stringify(sequence.break.now)} where ${JSON.stringify(sequence.break.held)} was.`);
  const context = el("details", {class: "turn"}, el("summary", {class: "soft"}, `Context, ${count(sequence.context.length, "token")}`), el("pre", {class: "observed"}, sequence.context_text));
  return [broken, context, ...sequenceParts(sequence)];
}
function trajectoryCard(run, row) {
  const reward = isNumber(row.reward) && !row.failed ? el("b", {class: row.reward > 0 ? "good" : "bad"}, `reward ${number(row.reward)}`) : el("span", {class: "soft"}, "no reward");
  const turns = row.sequences.reduce((sum, sequence) => sum + sequence.turns.length, 0);
  const facts = [row.kind, `step ${row.step}`, row.source, `end: ${row.end}`, count(turns, "turn"), row.sequences.length > 1 ? count(row.sequences.length, "sequence") : null].filter(fact => fact);
  return el("article", {class: "box trajectory"}, el("header", {}, several() ? chip(run) : null, ...facts.map(fact => el("span", {class: "tag"}, fact)), reward), ...row.sequences.flatMap(sequenceOf));
}
function drawTranscripts() {
  // An open turn would close under the reader.
  if ($("trajectories").querySelector("details[open]")) return;
  const rows = visible().flatMap(run => run.transcripts.map(row => [run, row])).sort((a, b) => b[1].step - a[1].step);
  $("transcripts").hidden = !rows.length;
  $("trajectories").replaceChildren(...rows.slice(0, PAGE).map(([run, row]) => trajectoryCard(run, row)));
}
