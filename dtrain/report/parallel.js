// Parallel coordinates: an axis for each swept word and one for the figure, a line for each job. A stroke along an
// axis keeps the jobs that cross it there; it is a word of the filter. And the leaderboard.

function parallel() {
  const PER_AXIS = 118;
  let axes = [],
    brush = null;
  const plot = new Plot({
    label: "Parallel coordinates: a line for each job through its words and its figure",
    height: 340,
    margin: [34, 60, 14, 44],
    width: PER_AXIS * (data.keys.length + 1),
    draw,
  });

  function prepare() {
    axes = data.keys.map((key, at) => ({
      name: key,
      of: (job) => job.values[at],
      places: placesOf(jobs.map((job) => job.values[at])),
    }));
    if (jobs.some((job) => measured(job) !== null)) {
      const of = scale(...shownRange());
      axes.push({
        name: figure().name,
        label: nameOf(figure()),
        of: measured,
        places: { order: null, scale: of, at: (value) => placeOf(of, value) },
        beyond: beyond(of),
      });
    }
  }

  // Values that the scale does not show lie at the end of the axis, outside of its ticks.
  function placeOf(of, value) {
    if (value > of.high) return 1;
    return value < of.low ? 0 : 0.04 + 0.92 * of.at(value);
  }

  // [place, text, outermost value] of the values above and below the scale.
  function beyond(of) {
    const values = jobs.map(measured).filter((value) => value !== null);
    const above = values.filter((value) => value > of.high),
      below = values.filter((value) => value < of.low);
    const [most, least] = [Math.max(...above), Math.min(...below)];
    return [
      ...(above.length ? [[1, `${above.length} up to ${digits(most)}`, most]] : []),
      ...(below.length ? [[0, `${below.length} down to ${digits(least)}`, least]] : []),
    ];
  }

  function x(at) {
    return plot.px(axes.length > 1 ? at / (axes.length - 1) : 0.5);
  }

  function draw() {
    const { context, colors, box } = plot,
      current = chosen();
    const line = (job) =>
      axes.map((axis, at) =>
        axis.of(job) === null || axis.of(job) === undefined
          ? null
          : [axes.length > 1 ? at / (axes.length - 1) : 0.5, axis.places.at(axis.of(job))],
      );
    const alpha = Math.max(0.12, Math.min(0.8, 60 / Math.max(1, state.kept.length)));
    for (const job of [...state.kept].reverse())
      if (job !== current) plot.path(line(job), shade(colors, job), 1.1, alpha);
    if (current) plot.path(line(current), colors.mark, 2.4);
    axes.forEach((axis, at) => {
      const left = Math.round(x(at)) + 0.5;
      plot.line(left, box.top, left, box.bottom, colors.quiet);
      plot.text(short(axis.label || axis.name, context), left, box.top - 18, {
        align: at === 0 ? "left" : at === axes.length - 1 ? "right" : "center",
        color: colors.ink,
      });
      for (const [share, text] of labels(axis)) plot.text(text, left + 7, plot.py(share), { halo: true });
      for (const [share, text] of axis.beyond ?? [])
        plot.text(text, left - 7, plot.py(share), { halo: true, align: "right" });
      const range = rangeOf(axis);
      if (range) {
        context.fillStyle = colors.mark;
        context.globalAlpha = 0.28;
        context.fillRect(left - 7, plot.py(range[1]), 14, plot.py(range[0]) - plot.py(range[1]));
        context.globalAlpha = 1;
      }
    });
  }

  function labels(axis) {
    const { order, scale: of } = axis.places;
    if (!order)
      return of
        .ticks(5)
        .filter((tick) => tick >= of.low && tick <= of.high)
        .map((tick) => [axis.places.at(tick), tickText(tick)]);
    const every = Math.ceil(order.length / 16);
    return order
      .filter((_, index) => index % every === 0)
      .map((value) => [axis.places.at(value), short(typed(value), plot.context)]);
  }

  // The part of an axis that the filter, or the stroke that is being made, keeps.
  function rangeOf(axis) {
    if (brush && axes[brush.axis] === axis) return [Math.min(brush.from, brush.to), Math.max(brush.from, brush.to)];
    const text = filtered(axis.name),
      range = text && /^(.+)\.\.(.+)$/.exec(text);
    if (range && !axis.places.order) return [axis.places.at(Number(range[1])), axis.places.at(Number(range[2]))];
    if (!text || !axis.places.order) return null;
    const half = 0.5 / axis.places.order.length;
    const kept = text
      .split(",")
      .map((each) => axis.places.order.find((value) => typed(value) === each))
      .filter((value) => value !== undefined)
      .map((value) => axis.places.at(value));
    return kept.length ? [Math.min(...kept) - half, Math.max(...kept) + half] : null;
  }

  function nearest([left]) {
    return axes.findIndex((_, at) => Math.abs(x(at) - left) < 22);
  }
  function share([, top]) {
    return Math.max(0, Math.min(1, (plot.box.bottom - top) / plot.box.height));
  }

  function apply({ axis: at, from, to }) {
    const axis = axes[at],
      [low, high] = [Math.min(from, to), Math.max(from, to)],
      { order, scale: of } = axis.places;
    if (high - low < 0.015) {
      filterBy(axis.name, "");
      return;
    }
    if (order) {
      filterBy(
        axis.name,
        order
          .filter((value) => axis.places.at(value) >= low && axis.places.at(value) <= high)
          .map(typed)
          .join(","),
      );
      return;
    }
    const ends = Object.fromEntries(axis.beyond?.map(([place, , value]) => [place, value]) ?? []);
    const [a, b] = [
      low < 0.02 ? (ends[0] ?? of.low) : of.value((low - 0.04) / 0.92),
      high > 0.98 ? (ends[1] ?? of.high) : of.value((high - 0.04) / 0.92),
    ].map((value) => Number(value.toPrecision(5)));
    filterBy(axis.name, `${a}..${b}`);
  }

  plot.canvas.addEventListener(
    "touchstart",
    (event) => {
      if (nearest(plot.where(event.touches[0])) >= 0) event.preventDefault();
    },
    { passive: false },
  );
  plot.canvas.addEventListener("pointerdown", (event) => {
    const at = nearest(plot.where(event));
    if (at < 0) return;
    brush = { axis: at, from: share(plot.where(event)), to: share(plot.where(event)) };
    plot.canvas.setPointerCapture(event.pointerId);
  });
  plot.canvas.addEventListener("pointermove", (event) => {
    plot.canvas.style.cursor = nearest(plot.where(event)) >= 0 ? "ns-resize" : "default";
    if (brush) {
      brush.to = share(plot.where(event));
      plot.redraw();
    }
  });
  plot.canvas.addEventListener("pointerup", () => {
    const done = brush;
    brush = null;
    if (done) apply(done);
  });
  plot.canvas.addEventListener("pointercancel", () => {
    brush = null;
    plot.redraw();
  });
  listeners.push((update) => {
    if ("figure" in update) prepare();
    plot.redraw();
  });
  return section(
    "Parallel coordinates",
    "Draw along an axis to keep the jobs that cross it there; click it to keep all. The filter above says the same in words, and takes them too.",
    plot.element,
  );
}

function short(text, context) {
  let cut = text;
  while (cut.length > 3 && context.measureText(cut).width > 104) cut = `${cut.slice(0, -2)}…`;
  return cut;
}

function leaderboard() {
  const columns = [
    { name: "rank", text: "#", of: (job) => job.place + 1, numeric: true },
    ...data.figures.map((each, at) => ({
      name: each.name,
      text: nameOf(each),
      of: (job) => job.figures[at],
      numeric: true,
      show: digits,
    })),
    ...data.keys.map((key, at) => ({
      name: key,
      text: key,
      of: (job) => job.values[at],
      numeric: data.values[at].every((value) => value === null || typeof value === "number"),
      word: true,
    })),
    { name: "step", text: "step", of: (job) => job.step, numeric: true },
    { name: "seconds", text: "time", of: (job) => job.seconds, numeric: true, show: duration },
    { name: "state", text: "status", of: (job) => job.state },
  ];
  const head = h("tr"),
    body = h("tbody"),
    more = h("div", { class: "more" });

  function sorted() {
    const column = columns.find((each) => each.name === state.sort);
    if (!column) return state.kept;
    const sign = state.down ? -1 : 1;
    return [...state.kept].sort((a, b) => {
      const [x, y] = [column.of(a), column.of(b)];
      if (x === null || y === null) return (x === null) - (y === null);
      return sign * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y)));
    });
  }

  function row(job) {
    return h(
      "tr",
      { class: job === chosen() ? "chosen" : "", onclick: () => change({ chosen: job }) },
      columns.map((column, at) => {
        const text = (column.show || (column.word ? typed : number))(column.of(job));
        const kind = `${column.numeric ? "number" : ""} ${column.word ? "mono" : ""} ${column.name === "state" && job.status === "failed" ? "bad" : ""}`;
        if (at) return h("td", { class: kind, text });
        return h(
          "td",
          { class: kind },
          h("button", {
            class: "plain",
            type: "button",
            text,
            "aria-label": `Choose job ${text}`,
            "aria-pressed": String(job === chosen()),
          }),
        );
      }),
    );
  }

  function show() {
    head.replaceChildren(
      ...columns.map((column) =>
        h(
          "th",
          {
            class: column.numeric ? "number" : "",
            scope: "col",
            "aria-sort": state.sort === column.name ? (state.down ? "descending" : "ascending") : null,
          },
          h("button", {
            class: "plain",
            type: "button",
            text: `${column.text}${state.sort === column.name ? (state.down ? " ↓" : " ↑") : ""}`,
            onclick: () => change({ sort: column.name, down: state.sort === column.name && !state.down }),
          }),
        ),
      ),
    );
    const all = sorted();
    body.replaceChildren(...all.slice(0, state.rows).map(row));
    more.replaceChildren(
      ...(all.length > state.rows
        ? [
            h("button", { type: "button", text: "Show 200 more", onclick: () => change({ rows: state.rows + 200 }) }),
            h("span", {
              class: "quiet",
              text: `${state.rows.toLocaleString("en-US")} of ${plural(all.length, "job")}`,
            }),
          ]
        : []),
    );
  }

  listeners.push(show);
  return section(
    "Leaderboard",
    "",
    h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "Leaderboard" },
      h("table", {}, h("thead", {}, head), body),
    ),
    more,
  );
}
