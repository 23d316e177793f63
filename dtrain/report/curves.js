// Curves of the jobs of a sweep, coloured by rank, and how a figure depends on one word.

const SERIES = {
  loss: (job) => (job.loss.length ? points(job.loss) : []),
  heldout: (job, name) =>
    job.heldout[name] ? job.heldout[name][0].map((step, at) => [step, job.heldout[name][1][at]]) : [],
};

// [step, value] of a curve that is stored as first step, last step and the means of equal parts.
function points([first, last, means]) {
  const size = (last - first + 1) / means.length;
  return means.map((value, part) => [first + (part + 0.5) * size - 0.5, value]).filter(([, value]) => value !== null);
}

function shade(colors, job) {
  const count = Math.max(1, state.ranking.length - 1);
  return mix(colors.high, colors.low, Math.min(1, (job.place / count) ** 0.5));
}

function curves() {
  const log = h("input", { type: "checkbox" });
  listeners.push((update) => {
    if ("figure" in update) log.checked = isSkewed();
  });
  const loss = chartOf(
    "Training loss",
    (job) => SERIES.loss(job),
    log,
    () => "lowest",
  );
  const names = data.figures.map((each) => each.name).filter((name) => jobs.some((job) => job.heldout[name]));
  const held = names.length
    ? chartOf(
        "Held-out figure",
        (job) => SERIES.heldout(job, shownName()),
        log,
        () => data.figures.find((each) => each.name === shownName()).best,
      )
    : null;
  function shownName() {
    return names.includes(figure().name) ? figure().name : names[0];
  }
  listeners.push(() => {
    if (held) held.title.textContent = `Held-out ${shownName().replace("eval_", "")}`;
  });
  log.addEventListener("change", () => change({}));
  return section(
    "Curves",
    "Over steps. The stronger a line, the better its job; the coloured one is the job above. Point at a line, or use the arrow keys, to choose another.",
    h("div", { class: "more" }, h("label", {}, log, "Logarithmic scale")),
    h("div", { class: held ? "two" : "" }, loss.element, held ? held.element : null),
  );
}

// Whether losses are better told apart by their logarithms.
function isSkewed() {
  const [low, high] = bounds(
    jobs.map((job) => SERIES.loss(job).map(([, value]) => value)),
    "lowest",
  );
  return low > 0 && high / low > 20;
}

// The lowest and highest value that a chart of curves shows: what most jobs reach, so that those that diverge do not
// flatten the others.
function bounds(curves, best) {
  const known = curves.filter((curve) => curve.length);
  const lows = known.map((curve) => Math.min(...curve)).sort((a, b) => a - b);
  const highs = known.map((curve) => Math.max(...curve)).sort((a, b) => a - b);
  const low = lows[0],
    high = highs[highs.length - 1];
  if (best === "highest") return [Math.max(low, quantile(lows, 0.5) - 0.5 * (high - quantile(lows, 0.5))), high];
  return [low, Math.min(high, quantile(highs, 0.5) + 0.5 * (quantile(highs, 0.5) - low))];
}

// The part of a figure's values that charts of it show, from the best on.
function shownRange() {
  const values = jobs
      .map(measured)
      .filter((value) => value !== null)
      .sort((a, b) => a - b),
    middle = quantile(values, 0.5);
  if (figure().best === "highest")
    return [Math.max(values[0], middle - 1.5 * (values[values.length - 1] - middle)), values[values.length - 1]];
  return [values[0], Math.min(values[values.length - 1], middle + 1.5 * (middle - values[0]))];
}

// `series(job)`: its [step, value] pairs; `log`: the box that asks for a logarithmic scale; `best`: of the values.
function chartOf(name, series, log, best) {
  let lines = [],
    scales = null;
  const title = h("h3", { text: name }),
    value = h("span", { class: "value" });
  const plot = new Plot({
    label: `${name} over steps, a line for each job`,
    height: 300,
    margin: [10, 12, 26, 52],
    focusable: true,
    draw,
  });

  function prepare() {
    lines = state.kept.map((job) => ({ job, points: series(job) })).filter((line) => line.points.length);
    const steps = lines.flatMap((line) => [line.points[0][0], line.points[line.points.length - 1][0]]);
    if (!lines.length) {
      scales = null;
      return;
    }
    const all = lines.map((line) => line.points.map(([, y]) => y)),
      [low, high] = bounds(all, best());
    scales = { x: scale(Math.min(...steps), Math.max(...steps)), y: scale(low, high, log.checked && low > 0) };
    const above = all.some((values) => Math.max(...values) > high),
      below = all.some((values) => Math.min(...values) < low);
    value.textContent = above ? `Cut above ${number(high)}` : below ? `Cut below ${number(low)}` : "";
    for (const line of lines) line.points = line.points.map(([x, y]) => [scales.x.at(x), scales.y.at(y)]);
  }

  function draw() {
    if (!scales) {
      plot.text("No job has such a curve yet.", plot.box.left, plot.box.top + 20);
      return;
    }
    plot.axes(scales.x, scales.y);
    const alpha = Math.max(0.2, Math.min(0.9, 60 / lines.length)),
      current = chosen();
    for (const line of [...lines].reverse())
      if (line.job !== current)
        plot.path(line.points, shade(plot.colors, line.job), 1.1, alpha + (1 - alpha) * (line.job.place < 5 ? 0.7 : 0));
    const line = lines.find((each) => each.job === current);
    if (line) {
      plot.path(line.points, plot.colors.paper, 5);
      plot.path(line.points, plot.colors.mark, 2.2);
      const [x, y] = line.points[line.points.length - 1];
      if (y <= 1.02) plot.dot(plot.px(x), plot.py(y), plot.colors.mark, 3.5);
    }
  }

  function nearest(event) {
    const [x, y] = plot.where(event);
    let best = null,
      least = 20;
    for (const line of lines)
      for (const point of line.points) {
        const distance = Math.hypot(plot.px(point[0]) - x, plot.py(point[1]) - y);
        if (distance < least) [best, least] = [line.job, distance];
      }
    return best;
  }

  plot.canvas.addEventListener("click", (event) => {
    const job = nearest(event);
    if (job) change({ chosen: job });
  });
  plot.canvas.addEventListener("pointermove", (event) => {
    const job = nearest(event);
    plot.tell(
      job
        ? [
            `${nameOf(figure())} ${number(measured(job))}`,
            ...data.keys.map((key, at) => `${key}=${typed(job.values[at])}`),
          ]
        : [],
      event,
    );
  });
  walks(plot.canvas);
  listeners.push((update) => {
    if (!("chosen" in update)) prepare();
    plot.redraw();
  });
  return { element: h("div", {}, h("div", { class: "head" }, title, value), plot.element), title };
}

// The arrow keys choose the next better or worse job.
function walks(element) {
  element.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
    if (!by || !state.kept.length) return;
    event.preventDefault();
    const at = state.kept.indexOf(chosen());
    change({ chosen: state.kept[Math.max(0, Math.min(state.kept.length - 1, at + by))] });
  });
}

// The values of a key as places from 0 to 1: each value has its own if there are few, else numbers have a scale.
function placesOf(values) {
  const present = values.filter((value) => value !== null),
    distinct = [...new Set(present)];
  const numeric = distinct.every((value) => typeof value === "number");
  if (distinct.length <= 12 || !numeric) {
    const order = numeric ? distinct.sort((a, b) => a - b) : distinct.sort();
    const at = new Map(order.map((value, index) => [value, (index + 0.5) / order.length]));
    return { order, at: (value) => at.get(value) };
  }
  const sorted = present.sort((a, b) => a - b);
  return {
    order: null,
    scale: scale(sorted[0], sorted[sorted.length - 1], isWide(sorted)),
    at(value) {
      return 0.04 + 0.92 * this.scale.at(value);
    },
  };
}

// The figure over the values of one key: a dot for each job, and a line through the medians.
function strip(key) {
  const places = placesOf(jobs.map((job) => job.values[key]));
  const known = jobs.filter((job) => job.values[key] !== null && measured(job) !== null);
  const y = scale(...shownRange()),
    groups = new Map();
  for (const job of known) {
    const at = places.order
      ? places.at(job.values[key])
      : (Math.floor(places.at(job.values[key]) * 8 - 1e-9) + 0.5) / 8;
    groups.set(at, [...(groups.get(at) || []), measured(job)]);
  }
  const medians = [...groups]
    .sort(([a], [b]) => a - b)
    .map(([at, each]) => [
      at,
      quantile(
        each.sort((a, b) => a - b),
        0.5,
      ),
    ]);
  const best = medians.reduce(
    (one, other) => ((figure().best === "highest") === other[1] > one[1] ? other : one),
    medians[0],
  );
  const plot = new Plot({
    label: `${nameOf(figure())} over ${data.keys[key]}`,
    height: 76,
    margin: [6, 6, 18, 6],
    draw() {
      const { box, colors, context } = plot;
      plot.line(box.left, box.bottom + 0.5, box.right, box.bottom + 0.5, colors.rule);
      context.globalAlpha = Math.max(0.15, Math.min(0.7, 40 / known.length));
      for (const job of known) {
        const share = y.at(measured(job));
        if (share >= -0.01 && share <= 1.01)
          plot.dot(plot.px(places.at(job.values[key])), plot.py(share), colors.quiet, 1.6);
      }
      context.globalAlpha = 1;
      plot.path(
        medians.map(([at, value]) => [at, Math.max(0, Math.min(1.04, y.at(value)))]),
        colors.high,
        2,
      );
      for (const [at, value] of medians)
        if (y.at(value) <= 1.04)
          plot.dot(plot.px(at), plot.py(Math.max(0, y.at(value))), colors.high, best && at === best[0] ? 4 : 2.2);
      const labels = places.order
        ? places.order.map((value) => [places.at(value), typed(value)])
        : [places.scale.low, places.scale.high].map((value) => [places.at(value), tickText(value)]);
      let free = -Infinity;
      for (const [at, text] of labels) {
        const width = context.measureText(text).width,
          x = Math.min(box.right - width / 2, Math.max(box.left + width / 2, plot.px(at)));
        if (x - width / 2 < free) continue;
        plot.text(text, x, box.bottom + 5, { align: "center", baseline: "top" });
        free = x + width / 2 + 8;
      }
    },
  });
  plot.ofShares = true;
  return plot.element;
}
