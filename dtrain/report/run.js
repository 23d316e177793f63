// The page of a run: charts below each other on one axis of steps or of time, with what happened on it.

const KINDS = {
  committed: ["saves", "high"],
  started: ["starts", "second"],
  restarted: ["restarts", "mark"],
  spike: ["spikes", "mark"],
  save_failed: ["failed saves", "mark"],
  damaged: ["damaged checkpoints", "mark"],
  caveat: ["caveats", "quiet"],
};
const TITLES = { rate: "Learning rate", norm: "Gradient norm", memory: "Peak memory in", speed: "Speed" };
const MOST_CHARTS = 16;
const TIMED = data.times.length > 1 && data.times.every((time) => time !== null);
const state = { timed: false, at: null };
const charts = [];

// The axis: the step of a part of the steps, or its time since the first event, in a unit that suits the whole run.
const parts = data.columns.length ? data.columns[0].means.length : 0;
const stepOf = (part) => data.first + ((part + 0.5) * (data.last - data.first + 1)) / parts - 0.5;
const [UNIT, UNIT_NAME] = [
  [3600, "h"],
  [60, "min"],
  [1, "s"],
].find(([unit]) => (data.times[parts - 1] ?? 0) >= 2 * unit) || [1, "s"];
const unitsOf = (seconds) => seconds / UNIT;
const STARTS = data.marks
  .filter((mark) => mark.kind === "started" && mark.time !== null)
  .map((mark) => mark.time - data.origin);

function placeOf(part) {
  return state.timed ? unitsOf(data.times[part]) : stepOf(part);
}
function placeOfMark(mark) {
  return state.timed ? (mark.time === null ? null : unitsOf(mark.time - data.origin)) : mark.step;
}

function timeOfStep(step) {
  const part = Math.max(
    0,
    Math.min(parts - 1, Math.round((step - stepOf(0)) / ((data.last - data.first + 1) / parts))),
  );
  return unitsOf(data.times[part]);
}

function axis() {
  const marks = data.marks.map(placeOfMark).filter((place) => place !== null);
  const ends = parts ? [placeOf(0), placeOf(parts - 1)] : [];
  return scale(Math.min(...ends, ...marks), Math.max(...ends, ...marks));
}

function axisText(value) {
  return state.timed ? `${tickText(value)} ${UNIT_NAME}` : tickText(value);
}

// Whether the run was started again between a part and the one before it: on the axis of time it did nothing there.
function isApart(part) {
  return state.timed && STARTS.some((time) => time > data.times[part - 1] && time < data.times[part]);
}

function heading() {
  const total = Number(data.steps),
    seen = data.steps && data.step < total ? `${number(data.step)} of ${number(total)}` : number(data.step);
  return h(
    "header",
    {},
    h("h1", { text: data.name || data.place }),
    facts([
      [data.status, "", ["failed", "spiked", "died"].includes(data.status)],
      [seen, "steps"],
      data.seconds !== null && [duration(data.seconds), ""],
      ...Object.entries(data.figures).map(([name, value]) => [digits(value), name]),
      ...Object.entries(data.best).map(([name, [value, step]]) => [digits(value), `best ${name}, step ${number(step)}`]),
      data.began !== null && [moment(data.began), ""],
      data.place !== data.name && ["", data.place],
    ]),
    data.cause
      ? h(
          "div",
          { class: "card" },
          h("h3", { text: "Why it ended" }),
          h("p", { text: data.cause }),
          data.trace ? details("Traceback", h("pre", { tabindex: "0", text: data.trace })) : null,
        )
      : null,
  );
}

// Peak memory in the unit that its largest value has.
const LARGE = data.columns.some((column) => column.group === "memory" && column.highs.some((high) => high >= 2 ** 32));
function inUnits(column) {
  const divided = (values) => values.map((value) => (value === null ? null : value / 2 ** (LARGE ? 30 : 20)));
  return { ...column, means: divided(column.means), lows: divided(column.lows), highs: divided(column.highs) };
}

function grouped() {
  const groups = new Map();
  for (const column of data.columns)
    if (!["step_seconds"].includes(column.name))
      groups.set(column.group, [...(groups.get(column.group) || []), column]);
  const speed = groups.get("speed");
  if (speed)
    groups.set(
      "speed",
      speed.filter(
        (each) =>
          each.name ===
          (speed.some((one) => one.name === "tokens_per_second") ? "tokens_per_second" : "samples_per_second"),
      ),
    );
  if (groups.has("memory")) groups.set("memory", groups.get("memory").map(inUnits));
  const asked = Object.keys(data.best).map(groupOf);
  for (const name of [...asked, ...Object.keys(data.heldout).map(groupOf)])
    if (!groups.has(name) && data.heldout[`eval_${name}`] && groups.size < MOST_CHARTS) groups.set(name, []);
  const order = [
    "loss",
    ...asked,
    ...[...groups.keys()].filter((name) => ![...asked, "loss", "rate", "norm", "speed", "memory"].includes(name)),
    "rate",
    "norm",
    "speed",
    "memory",
  ];
  return [...new Set(order)]
    .filter((name) => groups.get(name)?.length || data.heldout[`eval_${name}`])
    .map((name) => [name, groups.get(name) || []]);
}

function groupOf(figure) {
  return figure.replace("eval_", "");
}

function chart([group, columns], index) {
  const held = data.heldout[`eval_${group}`],
    best = data.best[`eval_${group}`];
  const [first] = columns,
    isSpeed = group === "speed";
  const value = h("span", { class: "value" });
  const title = isSpeed
    ? first.name === "tokens_per_second"
      ? "Tokens per second"
      : "Samples per second"
    : TITLES[group] || group.charAt(0).toUpperCase() + group.slice(1);
  const unit = group === "memory" ? (LARGE ? " GiB" : " MiB") : "";
  const plot = new Plot({
    label: `${title} over steps`,
    height: index ? 150 : 260,
    margin: [8, 12, 24, 64],
    focusable: true,
    draw,
  });

  function range() {
    const all = columns.flatMap((column) => column.lows.concat(column.highs)).filter((each) => each !== null);
    const sorted = all.concat(held ? held[1] : []).sort((a, b) => a - b),
      means = columns
        .flatMap((column) => column.means)
        .filter((each) => each !== null)
        .sort((a, b) => a - b);
    if (!means.length) return [sorted[0], sorted[sorted.length - 1]];
    const middle = quantile(means, 0.5),
      top = sorted[sorted.length - 1];
    const high = Math.min(
      top,
      Math.max(
        means[means.length - 1] > 8 * quantile(means, 0.98)
          ? quantile(means, 0.98) * 2
          : means[means.length - 1] * 1.05,
        middle,
      ),
    );
    const low = ["rate", "memory", "speed"].includes(group) ? 0 : sorted[0];
    return [low, Math.max(high, low)];
  }

  function draw() {
    const x = axis(),
      y = scale(...range()),
      { colors, context, box } = plot;
    plot.axes(x, y, { xText: axisText, yCount: index ? 4 : 6 });
    for (const mark of data.marks.filter((each) => each.kind === "restarted" || each.kind === "spike")) {
      const place = placeOfMark(mark);
      if (place !== null)
        plot.line(plot.px(x.at(place)), box.top, plot.px(x.at(place)), box.bottom, colors.mark, 1, [3, 3]);
    }
    for (const column of columns) {
      band(column, x, y);
      plot.path(
        column.means.flatMap((mean, part) => [
          ...(isApart(part) ? [null] : []),
          mean === null ? null : [x.at(placeOf(part)), y.at(mean)],
        ]),
        colors.high,
        1.8,
      );
    }
    if (held) {
      const places = held[0].map((step) => (state.timed ? timeOfStep(step) : step));
      plot.path(
        places.map((place, at) => [x.at(place), y.at(held[1][at])]),
        colors.mark,
        1.8,
      );
      if (places.length < 60)
        places.forEach((place, at) => {
          if (y.at(held[1][at]) <= 1.02) plot.dot(plot.px(x.at(place)), plot.py(y.at(held[1][at])), colors.mark, 3);
        });
    }
    if (best) plot.dot(plot.px(x.at(state.timed ? timeOfStep(best[1]) : best[1])), plot.py(y.at(best[0])), colors.mark, 5);
    if (state.at !== null) {
      const at = plot.px(x.at(placeOf(state.at)));
      plot.line(at, box.top, at, box.bottom, colors.quiet);
      context.globalAlpha = 1;
    }
    read();
  }

  // From the lowest to the highest value of each part.
  function band(column, x, y) {
    if (column.lows.every((low, part) => low === column.highs[part])) return;
    const { context, box, colors } = plot;
    context.save();
    context.beginPath();
    context.rect(box.left, box.top, box.width, box.height);
    context.clip();
    Object.assign(context, { fillStyle: colors.high, globalAlpha: 0.18 });
    context.beginPath();
    const known = column.means.map((_, part) => part).filter((part) => column.means[part] !== null);
    for (const part of known)
      context.lineTo(plot.px(x.at(placeOf(part))), plot.py(Math.min(3, y.at(column.highs[part]))));
    for (const part of known.reverse())
      context.lineTo(plot.px(x.at(placeOf(part))), plot.py(Math.max(-2, y.at(column.lows[part]))));
    context.fill();
    context.restore();
  }

  function read() {
    const at = state.at ?? parts - 1,
      texted = columns.map((column) => {
        const [mean, low, high] = [column.means[at], column.lows[at], column.highs[at]];
        return `${columns.length > 1 ? `${column.name} ` : ""}${number(mean)}${low !== null && low !== high ? ` (${number(low)} to ${number(high)})` : ""}`;
      });
    const near = held ? held[0].reduce((best, step, each) => (step <= stepOf(at) + 0.5 ? each : best), -1) : -1;
    const told = [texted.join(", "), near >= 0 ? `held-out ${number(held[1][near])}` : ""].filter(Boolean);
    value.textContent = `step ${number(Math.round(stepOf(at)))}: ${told.join(" · ") || "–"}`;
  }

  plot.canvas.addEventListener("pointermove", (event) => point(plot.where(event)[0]));
  plot.canvas.addEventListener("pointerleave", () => {
    state.at = null;
    redrawAll();
  });
  plot.canvas.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    state.at = Math.max(0, Math.min(parts - 1, (state.at ?? parts - 1) + by * Math.max(1, Math.round(parts / 100))));
    redrawAll();
  });

  function point(left) {
    const wanted = axis().value((left - plot.box.left) / plot.box.width);
    let best = 0;
    for (let part = 1; part < parts; part += 1)
      if (Math.abs(placeOf(part) - wanted) < Math.abs(placeOf(best) - wanted)) best = part;
    state.at = best;
    redrawAll();
  }

  charts.push(plot);
  return h("div", { class: "lane" }, h("div", { class: "head" }, h("h3", { text: title + unit }), value), plot.element);
}

// Saves, starts, restarts and what else happened, as ticks on the same axis.
function events() {
  const kinds = [...new Set(data.marks.map((mark) => mark.kind))].filter((kind) => KINDS[kind]);
  if (!kinds.length || !parts) return null;
  const plot = new Plot({
    label: `When there were ${kinds.map((kind) => KINDS[kind][0]).join(", ")}`,
    height: 24 + 20 * kinds.length,
    margin: [4, 12, 20, 64],
    draw() {
      const x = axis();
      kinds.forEach((kind, row) => {
        const top = plot.box.top + 20 * row,
          [name, color] = KINDS[kind];
        plot.line(plot.box.left, top + 10.5, plot.box.right, top + 10.5, plot.colors.grid);
        plot.text(name.length > 9 ? `${name.slice(0, 8)}…` : name, plot.box.left - 8, top + 10, { align: "right" });
        for (const mark of data.marks) {
          const place = mark.kind === kind ? placeOfMark(mark) : null,
            share = place === null ? -1 : x.at(place);
          if (share >= -0.001 && share <= 1.001) plot.dot(plot.px(share), top + 10, plot.colors[color], 4);
        }
      });
    },
  });
  return h("div", { class: "lane" }, h("div", { class: "head" }, h("h3", { text: "Events" })), plot.element);
}

function curves() {
  if (!parts) return section("Curves", "There are no rows in metrics.jsonl yet.");
  const box = h("input", {
    type: "checkbox",
    onchange: () => {
      state.timed = box.checked;
      redrawAll();
    },
  });
  return section(
    "Curves",
    `Lines are means${parts < data.last - data.first + 1 ? ` over ${number(Math.round((data.last - data.first + 1) / parts))} steps, bands go from the lowest to the highest value` : " of a step"}; the coloured line is the held-out figure, its large dot the best, dashed lines are restarts and spikes. Point at a chart, or use the arrow keys.`,
    TIMED ? h("div", { class: "more" }, h("label", {}, box, "Over time instead of steps")) : null,
    events(),
    grouped().map(chart),
  );
}

function log() {
  if (!data.marks.length) return null;
  return section(
    "What happened",
    "",
    h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "Events" },
      h(
        "table",
        {},
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            ["time", "step", "event", ""].map((text) => h("th", { scope: "col", text })),
          ),
        ),
        h(
          "tbody",
          {},
          data.marks.map((mark) =>
            h(
              "tr",
              {},
              h("td", { text: mark.time === null ? "–" : moment(mark.time, "medium") }),
              h("td", { class: "number", text: number(mark.step) }),
              h("td", { text: mark.kind.replace("_", " ") }),
              h("td", { text: mark.text }),
            ),
          ),
        ),
      ),
    ),
  );
}

page.append(
  ...[heading(), curves(), log(), section("Commands", "", commands(data.commands)), planAndMachine(), footer()].filter(
    Boolean,
  ),
);
