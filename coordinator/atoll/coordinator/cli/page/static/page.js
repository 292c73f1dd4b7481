// Follows the run's stream and keeps the page true to it. Whatever comes from peers is set as text, never as markup.

import { map, plot, short, timeline } from "./drawing.js";

const LOST_SHOWN_SECONDS = 120, TIMELINE_MILLISECONDS = 3000, AGAIN_MILLISECONDS = 2000;
const run = { steps: 0, points: [], evaluations: [], happenings: [], status: null, ended: "", timelines: [], lost: new Map() };
const $ = (id) => document.getElementById(id);

const widthOf = (id) => $(id).clientWidth || 560;
const bytes = (number) => `${short(number)}B`;
const seconds = (number) => (number >= 1 ? `${number.toPrecision(3)} s` : `${(1000 * number).toPrecision(3)} ms`);
const clock = (time) => (time ? new Date(1000 * time).toLocaleTimeString() : "");

function take(news) {
  if (news.kind === "course") {
    Object.assign(run, { steps: news.steps, points: news.points, evaluations: news.evaluations, happenings: news.happenings });
    drawCurves();
    drawHappenings();
  } else if (news.kind === "step") {
    run.points = [...run.points.filter((one) => one.step < news.step.step), news.step];
    drawCurves();
    drawFigures();
  } else if (news.kind === "evaluation") {
    run.evaluations.push(news.evaluation);
    drawCurves();
    drawFigures();
  } else if (news.kind === "happening") {
    run.happenings = [...run.happenings, news.happening].slice(-200);
    drawHappenings();
  } else if (news.kind === "ended") {
    run.ended = news.words;
    $("state").textContent = run.ended;
    $("reason").textContent = "";
  } else if (news.kind === "status" && !run.ended) {
    noteLost(news.status);
    run.status = news.status;
    if (news.status.timelines) run.timelines = news.status.timelines;
    drawStatus();
  }
}

// A peer that is gone is not in the next plan's status for long; the page still shows it for a while.
function noteLost(status) {
  const now = Date.now() / 1000, here = new Set(status.peers.filter((peer) => peer.state !== "lost").map((peer) => peer.name));
  for (const peer of run.status?.peers ?? []) if (!here.has(peer.name) && peer.state !== "lost") run.lost.set(peer.name, now);
  for (const peer of status.peers) if (peer.state === "lost" && !run.lost.has(peer.name)) run.lost.set(peer.name, now);
  for (const [name, since] of run.lost) if (here.has(name) || now - since > LOST_SHOWN_SECONDS) run.lost.delete(name);
}

function figure(name, text, value) {
  const [block, title, data] = ["div", "dt", "dd"].map((one) => document.createElement(one));
  title.textContent = name;
  data.textContent = text;
  data.dataset.name = name;
  data.dataset.value = JSON.stringify(value);
  block.append(title, data);
  return block;
}

function drawFigures() {
  const last = run.points.at(-1), evaluation = run.evaluations.at(-1), status = run.status;
  const shown = [];
  if (last) {
    shown.push(figure("step", `${last.step} of ${run.steps}`, last.step), figure("loss", last.loss === null ? "-" : last.loss.toFixed(4), last.loss));
    shown.push(figure("tokens/s", short(last.tokens_per_second), last.tokens_per_second), figure("a step", seconds(last.seconds), last.seconds));
  }
  if (evaluation) shown.push(figure("validation loss", evaluation.loss === null ? "-" : evaluation.loss.toFixed(4), evaluation.loss));
  if (status?.predicted_step_seconds) shown.push(figure("predicted", seconds(status.predicted_step_seconds), status.predicted_step_seconds));
  if (status?.safe_snapshot) shown.push(figure("safe snapshot", `step ${status.safe_snapshot.step}`, status.safe_snapshot.step));
  $("figures").replaceChildren(...shown);
  $("progress").value = run.steps && last ? last.step / run.steps : 0;
}

function drawCurves() {
  const of = (name) => run.points.map((one) => [one.step, one[name] ?? NaN]);
  const validation = run.evaluations.map((one) => [one.step, one.loss ?? NaN]);
  $("loss").replaceChildren(plot([{ points: of("loss"), kind: "line" }, { points: validation, kind: "dots" }], "loss by step", widthOf("loss")));
  $("throughput").replaceChildren(plot([{ points: of("tokens_per_second"), kind: "line" }], "tokens per second by step", widthOf("throughput")));
  drawFigures();
}

function drawHappenings() {
  $("happenings").replaceChildren(...run.happenings.toReversed().map((one) => {
    const item = document.createElement("li"), time = document.createElement("time");
    time.textContent = clock(one.time);
    item.append(time, one.words);
    return item;
  }));
}

// A cell that shows a number of `owner` in words, and keeps it as exact as it came.
const number = (owner, name, show, none = "-") => ({ text: owner[name] ? show(owner[name]) : none, name, value: owner[name] });

function rows(table, heads, values) {
  const row = (cells, kind, className = "") => {
    const made = document.createElement("tr");
    made.className = className;
    made.append(...cells.map((cell) => {
      const shown = Object.assign(document.createElement(kind), { textContent: cell.text ?? cell });
      if (cell.name) Object.assign(shown.dataset, { name: cell.name, value: JSON.stringify(cell.value) });
      return shown;
    }));
    return made;
  };
  $(table).replaceChildren(row(heads, "th"), ...values.map(([cells, className]) => row(cells, "td", className)));
}

function drawStatus() {
  const status = run.status;
  document.title = `${status.run}: step ${status.step}`;
  $("run").textContent = status.run;
  $("state").textContent = `${status.state}, plan ${status.generation}`;
  $("state").className = "";
  $("reason").textContent = status.reason ? `the run ${status.reason}` : "";
  const lost = [...run.lost.keys()].map((name) => ({ name, words: "gone" }));
  $("map").replaceChildren(map({ ...status, peers: status.peers.filter((peer) => !run.lost.has(peer.name)) }, lost));
  const step = status.measured_step_seconds || status.predicted_step_seconds;
  const percent = (digits) => (part) => `${(100 * part).toPrecision(digits)}%`;
  const share = (busy) => (step ? `${((100 * busy) / step).toFixed(0)}%` : "-");
  const bits = (rate) => `${short(8 * rate)}bit/s`;
  rows("peers", ["peer", "state", "layers", "memory", "predicted", "computes", "predicted", "doing", "silent"], status.peers.map((peer) => [[
    peer.name, peer.state, peer.layers || "-", number(peer, "resident_bytes", bytes), number(peer, "predicted_memory_bytes", bytes),
    number(peer, "measured_compute_seconds", seconds), number(peer, "predicted_compute_seconds", seconds),
    (peer.phase || peer.state) + (peer.waiting_for ? ` from ${peer.waiting_for}` : ""),
    number(peer, "silent_seconds", (silent) => `${silent.toFixed(0)} s`),
  ], run.lost.has(peer.name) || peer.state === "lost" ? "lost" : ""]));
  rows("links", ["from", "to", "direction", "codec", "busy", "rate", "planned with", "sent", "without a codec", "error", "costs of the loss"], status.links.map((link) => [[
    link.source, link.target, link.direction, link.codec, number(link, "measured_seconds", share),
    number(link, "measured_bytes_per_second", bits), number(link, "predicted_bytes_per_second", bits),
    number(link, "bytes", bytes), number(link, "raw_bytes", bytes), number(link, "relative_error", percent(2), "none"),
    number(link, "damage", (damage) => (link.relative_error && damage >= 0 ? percent(2)(damage) : "-")),
  ], ""]));
  drawTimeline();
  drawFigures();
}

function drawTimeline() {
  const order = run.status.peers.map((peer) => peer.name);
  const shown = run.timelines.filter((one) => one.spans.length).sort((one, other) => order.indexOf(one.peer) - order.indexOf(other.peer));
  if (!shown.length) return;
  const end = Math.max(...shown.flatMap((one) => one.spans.map((span) => span.begin_seconds + span.seconds)));
  const key = document.createElement("p");
  key.className = "key quiet";
  for (const what of ["forward", "backward", "accumulate", "waiting"]) {
    const spot = document.createElement("span");
    spot.style.background = `var(--${what})`;
    key.append(spot, what === "accumulate" ? "gradients of weights" : what);
  }
  $("timeline").replaceChildren(timeline(shown, end, widthOf("timeline")), key);
}

async function refreshTimelines() {
  try {
    const answer = await fetch("api/status");
    if (answer.ok && run.status) {
      run.timelines = (await answer.json()).timelines ?? [];
      drawTimeline();
    }
  } catch { /* the stream says that the coordinator is gone */ }
}

function follow() {
  const stream = new EventSource("api/stream");
  stream.onmessage = (message) => take(JSON.parse(message.data));
  stream.onerror = () => {
    stream.close();
    if (run.ended) return;
    $("state").textContent = "the coordinator does not answer; trying again";
    $("state").className = "lost";
    setTimeout(follow, AGAIN_MILLISECONDS);
  };
}

document.querySelectorAll("button[data-action]").forEach((button) => button.addEventListener("click", async () => {
  const answer = await fetch(`api/${button.dataset.action}`, { method: "POST", headers: { Authorization: `Bearer ${$("token").value}` } });
  const text = await answer.text();
  $("answer").textContent = answer.ok ? (JSON.parse(text).reason ?? "the run is ending") : text;
}));

window.addEventListener("resize", () => run.status && (drawCurves(), drawTimeline()));
follow();
setInterval(() => document.hidden || run.ended || refreshTimelines(), TIMELINE_MILLISECONDS);
