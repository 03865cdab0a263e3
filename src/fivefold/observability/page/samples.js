// Samples, by prompt.

const LONG = 700, HEAD = 360, TAIL = 240, MOST_ANSWERS = 4;
function wanted() {
  const words = $("search").value.toLowerCase(), kind = $("kind").value, reward = $("reward").value, steps = range($("steps").value);
  return sample => (!steps || (sample.step >= steps[0] && sample.step <= steps[1])) && (!kind || sample.kind === kind)
    && (!reward || (reward === "none" ? sample.reward == null : sample.reward != null && (sample.reward > 0) === (reward === "above")))
    && (!words || [sample.prompt, sample.question, sample.response, sample.ground_truth].some(text => String(text ?? "").toLowerCase().includes(words)));
}
const groupOf = sample => [sample.step, sample.kind, sample.group ?? sample.prompt].join("\n");
// Rewards and lengths of a sample's whole group: from the row of its first sample, else from the rows that there are.
function groupNumbers(run) {
  const found = new Map();
  for (const sample of run.samples) {
    const name = groupOf(sample), group = found.get(name) || {rewards: [], lengths: [], isWhole: false};
    if (Array.isArray(sample.group_rewards) && Array.isArray(sample.group_lengths))
      Object.assign(group, {rewards: sample.group_rewards.filter(isNumber), lengths: sample.group_lengths.filter(isNumber), isWhole: true});
    else if (!group.isWhole) {
      if (isNumber(sample.reward)) group.rewards.push(sample.reward);
      if (isNumber(sample.response_tokens)) group.lengths.push(sample.response_tokens);
    }
    found.set(name, group);
  }
  return found;
}
// Long texts show their beginning and their end, where the answer is, and all of it on request.
function longText(content) {
  const text = String(content ?? "");
  if (text.length <= LONG) return el("pre", {}, text);
  const body = el("pre"), more = el("button", {type: "button", class: "plain", onclick: () => show(more.getAttribute("aria-expanded") === "false")});
  const show = isWhole => {
    body.replaceChildren(...(isWhole ? [text] : [text.slice(0, HEAD), el("span", {class: "soft"}, `\n[… ${count(text.length - HEAD - TAIL, "character")} …]\n`), text.slice(-TAIL)]));
    more.textContent = isWhole ? "Show less" : "Show all";
    more.setAttribute("aria-expanded", String(isWhole));
  };
  show(false);
  return el("div", {}, body, more);
}
// One bar for each reward of a group, in order; bars are drawn from the group's least to its greatest reward.
function strip(rewards) {
  const sorted = [...rewards].sort((a, b) => a - b), low = sorted[0], high = sorted[sorted.length - 1], wide = Math.max(1.5, Math.min(5, 96 / sorted.length));
  const picture = svg("svg", {class: "strip", viewBox: `0 0 ${sorted.length * (wide + 1)} 16`, width: sorted.length * (wide + 1), height: 16, role: "img", "aria-label": `rewards of the group: ${sorted.map(number).join(", ")}`});
  sorted.forEach((value, at) => {
    const tall = high > low ? 2 + 14 * (value - low) / (high - low) : 2;
    picture.append(svg("rect", {x: at * (wide + 1), width: wide, y: 16 - tall, height: tall, class: high > low && value === high ? "best" : "bar"}));
  });
  picture.append(svg("title", {}, sorted.map(number).join("  ")));
  return picture;
}
function answerCells(run, sample, group) {
  const parts = Object.entries(sample.reward_parts || {}).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  const rewards = group.rewards, average = rewards.length > 1 ? mean(rewards) : null, isEqual = average != null && least(rewards) === most(rewards);
  const reward = isNumber(sample.reward) ? el("b", {class: sample.reward > 0 ? "good" : "bad", title: parts || null}, number(sample.reward)) : el("span", {class: "soft"}, sample.failed ? "failed" : "none");
  const against = average == null || !isNumber(sample.reward) ? null : isEqual ? el("span", {class: "soft"}, `all ${rewards.length} equal`) : el("span", {class: "group"},
    el("b", {}, signed(+(sample.reward - average).toPrecision(3))), el("span", {class: "soft"}, `mean ${number(+average.toPrecision(3))} of ${rewards.length}`), strip(rewards));
  const length = group.lengths.length > 1 && isNumber(sample.response_tokens) ? signed(Math.round(sample.response_tokens - mean(group.lengths))) : null;
  const tokens = el("span", {class: "group"}, el("b", {}, String(sample.response_tokens ?? "–")), length == null ? null : el("span", {class: "soft", title: "difference to the mean of the group"}, `(${length})`),
    sample.finished === false ? el("span", {class: "bad"}, "cut off") : null);
  const where = el("span", {class: "where"}, several() ? chip(run) : null, several() ? el("span", {class: "soft"}, `${run.name} `) : null, `step ${sample.step}`);
  return {where, reward, against, tokens, response: longText(sample.response)};
}
// The latest responses, at least one of each run.
function latest(entries) {
  const seen = new Set(), isFirst = ([run]) => !seen.has(run) && seen.add(run), firsts = new Set(entries.filter(isFirst));
  let room = Math.max(0, MOST_ANSWERS - firsts.size);
  return entries.filter(entry => firsts.has(entry) || room-- > 0);
}
function promptCard(entries) {
  const sample = entries[0][1], name = promptOf(sample), prompt = String(sample.prompt ?? ""), question = String(sample.question ?? prompt);
  const shown = view.opened.has(name) ? entries : latest(entries), answers = shown.map(([run, each, groups]) => answerCells(run, each, groups.get(groupOf(each))));
  const more = entries.length > shown.length ? el("button", {type: "button", class: "plain", onclick: () => { view.opened.add(name); drawSamples(); }}, `Show all ${entries.length} responses`) : null;
  const facts = [sample.kind, sample.source, sample.prompt_id == null ? null : `prompt ${sample.prompt_id}`].filter(fact => fact != null && fact !== "").map(fact => el("span", {class: "tag"}, String(fact)));
  const whole = question.trim() !== prompt.trim() ? el("details", {}, el("summary", {}, "Whole prompt, as the model reads it"), el("pre", {}, prompt)) : null;
  const truth = sample.ground_truth == null || sample.ground_truth === "" ? null : el("div", {class: "truth"}, el("span", {class: "soft"}, "ground truth "), el("code", {}, String(sample.ground_truth)));
  const columns = [["sampled at", "where"], ["reward", "reward"], ...(answers.some(answer => answer.against) ? [["against its group", "against"]] : []), ["tokens", "tokens"], ["response", "response"]];
  const cells = table(columns.map(([title]) => title), answers.map(answer => columns.map(([, column]) => answer[column] ?? "–")));
  [...cells.rows].forEach(row => [...row.cells].forEach((cell, at) => cell.classList.add(columns[at][1])));
  return el("article", {class: "box sample"}, el("header", {}, ...facts), el("div", {class: "question"}, longText(question)), truth, whole, cells, more);
}
const promptOf = sample => JSON.stringify([sample.kind, sample.prompt]);
function drawSamples() {
  if (view.isReading) return;
  const keep = wanted(), cards = new Map();
  let total = 0;
  for (const run of visible()) {
    const groups = groupNumbers(run);
    for (const sample of run.samples) {
      if (!keep(sample)) continue;
      total++;
      const name = promptOf(sample);
      if (!cards.has(name)) cards.set(name, []);
      cards.get(name).push([run, sample, groups]);
    }
  }
  const lastStep = entries => entries[0][1].step, shown = [...cards.values()].map(entries => entries.reverse().sort((a, b) => b[1].step - a[1].step || (a[1].sample ?? 0) - (b[1].sample ?? 0)));
  shown.sort((a, b) => lastStep(b) - lastStep(a));
  $("rows").replaceChildren(...(shown.length ? shown.slice(0, view.shown).map(promptCard) : [el("p", {class: "soft"}, view.runs.some(run => run.samples.length) ? "No sample matches." : "No samples.")]));
  $("count").textContent = `${count(total, "sample")} of ${count(shown.length, "prompt")}`;
  $("more").hidden = shown.length <= view.shown;
}
