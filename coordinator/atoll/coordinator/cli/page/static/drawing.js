// Pictures as SVG: plots, the swarm as a map, a step as a timeline. Each function returns an element and keeps nothing.

const NAMESPACE = "http://www.w3.org/2000/svg";

export function element(name, attributes = {}, ...children) {
  const made = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function picture(width, height, label) {
  return element("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
}

export function short(number) {
  if (!Number.isFinite(number)) return "-";
  const size = Math.abs(number);
  if (size >= 1e9) return `${(number / 1e9).toPrecision(3)} G`;
  if (size >= 1e6) return `${(number / 1e6).toPrecision(3)} M`;
  if (size >= 1e4) return `${(number / 1e3).toPrecision(3)} K`;
  return size >= 100 ? number.toFixed(0) : String(Number(number.toPrecision(3)));
}

// series: [{points: [[x, y]], kind: "line" | "second" | "dots"}]
export function plot(series, label, width) {
  const [height, left, bottom, top] = [240, 56, 28, 10];
  const drawn = picture(width, height, label);
  const all = series.flatMap((one) => one.points).filter(([, y]) => Number.isFinite(y));
  if (!all.length) return drawn;
  const xs = all.map(([x]) => x), ys = all.map(([, y]) => y);
  const low = { x: xs.reduce((a, b) => Math.min(a, b)), y: ys.reduce((a, b) => Math.min(a, b)) };
  const high = { x: xs.reduce((a, b) => Math.max(a, b)), y: ys.reduce((a, b) => Math.max(a, b)) };
  const spread = { x: high.x - low.x || 1, y: high.y - low.y || Math.abs(high.y) || 1 };
  const at = (x, y) => [
    left + ((x - low.x) / spread.x) * (width - left - 12),
    height - bottom - ((y - low.y) / spread.y) * (height - bottom - top),
  ];
  for (let tick = 0; tick <= 4; tick += 1) {
    const value = low.y + (spread.y * tick) / 4, [, y] = at(low.x, value);
    drawn.append(element("line", { class: "grid", x1: left, x2: width - 12, y1: y, y2: y }));
    drawn.append(element("text", { class: "quiet", x: left - 6, y: y + 4, "text-anchor": "end" }, short(value)));
  }
  for (const part of [0, 0.5, 1]) {
    const [x] = at(low.x + spread.x * part, low.y), step = Math.round(low.x + spread.x * part);
    drawn.append(element("text", { class: "quiet", x, y: height - 8, "text-anchor": ["start", "middle", "end"][part * 2] }, String(step)));
  }
  for (const { points, kind } of series) {
    const places = points.filter(([, y]) => Number.isFinite(y)).map(([x, y]) => at(x, y));
    if (kind === "dots") for (const [x, y] of places) drawn.append(element("circle", { class: "dot", cx: x, cy: y, r: 3 }));
    else if (places.length) drawn.append(element("polyline", { class: `line ${kind}`, points: places.map((one) => one.join()).join(" ") }));
  }
  return drawn;
}

// Stages from left to right, their peers below one another, spares and lost peers in a row of their own.
export function map(status, lost) {
  const holders = status.peers.filter((peer) => peer.stage >= 0), rest = status.peers.filter((peer) => peer.stage < 0);
  const stages = [...new Set(holders.map((peer) => peer.stage))].sort((a, b) => a - b);
  const [boxWidth, boxHeight, gap, rowGap] = [168, 66, 92, 14];
  const rows = Math.max(1, ...stages.map((stage) => holders.filter((peer) => peer.stage === stage).length));
  const others = [...rest.map((peer) => [peer.name, peer.phase || peer.state, ""]), ...lost.map((one) => [one.name, one.words, "lost"])];
  const width = Math.max(stages.length * (boxWidth + gap) - gap, others.length * (boxWidth + 16) - 16, boxWidth) + 8;
  const height = rows * (boxHeight + rowGap) + (others.length ? boxHeight + 40 : 0) + 8;
  const drawn = picture(width, height, "the swarm");
  const place = new Map();
  stages.forEach((stage, column) => holders.filter((peer) => peer.stage === stage).forEach((peer, row) =>
    place.set(peer.name, [4 + column * (boxWidth + gap), 4 + row * (boxHeight + rowGap)])));
  for (const link of status.links) {
    const from = place.get(link.source), to = place.get(link.target);
    if (!from || !to) continue;
    const seconds = link.measured_seconds || link.predicted_seconds, step = status.measured_step_seconds || status.predicted_step_seconds;
    const load = step ? Math.min(1, seconds / step) : 0, ahead = from[0] < to[0], down = link.direction === "backward" ? 14 : -8;
    const [x1, x2] = ahead ? [from[0] + boxWidth, to[0]] : [from[0], to[0] + boxWidth];
    const [y1, y2] = [from[1] + boxHeight / 2 + down, to[1] + boxHeight / 2 + down];
    const line = element("line", { class: `link ${link.direction}`, x1, x2, y1, y2, "stroke-width": 1.5 + 7 * load });
    line.append(element("title", {}, `${link.source} > ${link.target}, ${link.direction}, ${link.codec}: busy for ${(100 * load).toFixed(0)}% of a step`));
    drawn.append(line);
    const label = `${link.codec} ${(100 * load).toFixed(0)}%`;
    drawn.append(element("text", { class: "quiet", x: (x1 + x2) / 2, y: (y1 + y2) / 2 + (down > 0 ? 16 : -7), "text-anchor": "middle" }, label));
  }
  for (const peer of holders) drawn.append(...box(place.get(peer.name), boxWidth, boxHeight, peer.name, `stage ${peer.stage}`, peer.phase || peer.state, ""));
  others.forEach(([name, words, kind], index) =>
    drawn.append(...box([4 + index * (boxWidth + 16), rows * (boxHeight + rowGap) + 30], boxWidth, boxHeight, name, kind || "spare", words, kind)));
  return drawn;
}

function box([x, y], width, height, name, heading, words, kind) {
  const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
  const title = element("title", {}, `${name}: ${heading}, ${words}`);
  return [
    element("rect", { class: `box ${kind}`, x, y, width, height }, title),
    element("text", { x: x + 10, y: y + 20, "font-weight": 600 }, cut(name, 22)),
    element("text", { class: "quiet", x: x + 10, y: y + 38 }, heading),
    element("text", { class: "quiet", x: x + 10, y: y + 55 }, cut(words, 26)),
  ];
}

const COLOURS = { forward: "var(--forward)", backward: "var(--backward)", accumulate: "var(--accumulate)" };

export function colour(what) {
  return what.startsWith("waiting") ? "var(--waiting)" : COLOURS[what] || "var(--other)";
}

// A row a peer: what it computed, and in grey what it waited for.
export function timeline(rows, seconds, width) {
  const [left, rowHeight] = [Math.min(120, width / 4), 30], height = rows.length * rowHeight + 24;
  const drawn = picture(width, height, "the last step");
  const at = (time) => left + (time / (seconds || 1)) * (width - left - 10);
  rows.forEach((row, index) => {
    const y = index * rowHeight + 4;
    drawn.append(element("text", { x: left - 8, y: y + 16, "text-anchor": "end" }, row.peer));
    for (const span of row.spans) {
      const rect = element("rect", {
        x: at(span.begin_seconds), y, height: rowHeight - 8, width: Math.max(0.5, at(span.begin_seconds + span.seconds) - at(span.begin_seconds)),
        style: `fill: ${colour(span.what)}`,
      });
      const whom = span.peer ? ` from ${span.peer}` : "", which = span.microbatch >= 0 ? ` ${span.microbatch}` : "";
      rect.append(element("title", {}, `${span.what}${which}${whom}: ${(1000 * span.seconds).toFixed(1)} ms`));
      drawn.append(rect);
    }
  });
  const steps = [...new Set(rows.map((row) => row.step))].sort((a, b) => a - b);
  drawn.append(element("text", { class: "quiet", x: left, y: height - 4 }, "0"));
  drawn.append(element("text", { class: "quiet", x: (left + width) / 2, y: height - 4, "text-anchor": "middle" }, `step ${steps.join(", ")}`));
  drawn.append(element("text", { class: "quiet", x: width - 10, y: height - 4, "text-anchor": "end" }, `${seconds.toPrecision(3)} s`));
  return drawn;
}
