// The page of a sweep: one state (the figure, the filter, the chosen job) that every part of the page shows.

const jobs = data.jobs.map((job, index) => ({ ...job, index, values: data.values.map((column) => column[index]) }));
data.causes.forEach((cause, number) =>
  cause.jobs.forEach((index) => {
    jobs[index].cause = number + 1;
  }),
);
const state = { figure: 0, filter: "", chosen: null, sort: null, down: false, rows: 25 };
const listeners = [];

function figure() {
  return data.figures[state.figure];
}
function nameOf(each) {
  return each.name === "loss" ? "training loss" : each.name;
}
function measured(job) {
  return job.figures[state.figure];
}

// Jobs from the best to the worst by the figure; those without one come last.
function ranked() {
  const sign = figure().best === "highest" ? -1 : 1;
  return [...jobs].sort((a, b) => {
    const [x, y] = [measured(a), measured(b)];
    if (x === null || y === null) return (x === null) - (y === null) || a.index - b.index;
    return sign * (x - y) || a.index - b.index;
  });
}

function change(update) {
  Object.assign(state, update);
  if ("figure" in update || "filter" in update) rank();
  for (const listener of listeners) listener(update);
}

function rank() {
  const accepts = reads(state.filter);
  state.ranking = ranked();
  state.ranking.forEach((job, place) => {
    job.place = place;
    job.kept = accepts(job);
  });
  state.kept = state.ranking.filter((job) => job.kept);
}

function chosen() {
  return state.chosen ?? state.kept[0] ?? state.ranking[0];
}

// The filter: words that are all to be met, each `key=value`, `key=1..2`, `key=a,b`, `key<1`, or a piece of text.
function reads(filter) {
  const tests = (filter.match(/(?:[^\s"]|"[^"]*")+/g) || []).map(test);
  return (job) => tests.every((accepts) => accepts(job));
}

const COLUMNS = {
  status: (job) => job.status,
  state: (job) => job.state,
  step: (job) => job.step,
  seconds: (job) => job.seconds,
  cause: (job) => job.cause ?? null,
  rank: (job) => job.place + 1,
};

function column(name) {
  const key = data.keys.indexOf(name),
    figureNumber = data.figures.findIndex((each) => each.name === name);
  if (key >= 0) return (job) => job.values[key];
  if (figureNumber >= 0) return (job) => job.figures[figureNumber];
  return Object.hasOwn(COLUMNS, name) ? COLUMNS[name] : null;
}

function test(word) {
  const [, name, relation, rest] = /^([^=<>]+)(<=|>=|=|<|>)(.*)$/.exec(word) || [];
  const value = name && column(name),
    text = (rest || "").replaceAll('"', "");
  if (!value) {
    const piece = word.replaceAll('"', "").toLowerCase();
    return (job) => `${job.name} ${job.status} ${job.values.join(" ")}`.toLowerCase().includes(piece);
  }
  const range = /^(.+)\.\.(.+)$/.exec(text);
  if (relation === "=" && range)
    return (job) => value(job) !== null && value(job) >= Number(range[1]) && value(job) <= Number(range[2]);
  if (relation === "=") {
    const wanted = new Set(text.split(","));
    return (job) => wanted.has(typed(value(job))) || wanted.has(String(value(job)));
  }
  const limit = Number(text);
  const compare = { "<": (x) => x < limit, ">": (x) => x > limit, "<=": (x) => x <= limit, ">=": (x) => x >= limit }[
    relation
  ];
  return (job) => value(job) !== null && compare(value(job));
}

// Replace the words of the filter about one key; without `rest` take them out.
function filterBy(name, rest) {
  const words = (state.filter.match(/(?:[^\s"]|"[^"]*")+/g) || []).filter((word) => !word.startsWith(`${name}=`));
  const text = [...words, ...(rest ? [`${name}=${/\s/.test(rest) ? `"${rest}"` : rest}`] : [])].join(" ");
  change({ filter: text, rows: 25 });
}

function filtered(name) {
  const word = (state.filter.match(/(?:[^\s"]|"[^"]*")+/g) || []).find((each) => each.startsWith(`${name}=`));
  return word ? word.slice(name.length + 1).replaceAll('"', "") : null;
}

// parts of the page

function heading() {
  const count = (status) => jobs.filter((job) => job.status === status).length;
  const [failed, running, stopped] = ["failed", "running", "stopped"].map(count);
  const times = jobs.map((job) => job.seconds).filter((seconds) => seconds !== null);
  const all =
    data.asked && data.asked > jobs.length
      ? `${jobs.length.toLocaleString("en-US")} of ${data.asked.toLocaleString("en-US")}`
      : jobs.length.toLocaleString("en-US");
  return h(
    "header",
    {},
    h("h1", { text: data.name || data.place }),
    facts([
      [all, "jobs"],
      [count("finished").toLocaleString("en-US"), "finished"],
      failed && [failed.toLocaleString("en-US"), "failed", true],
      running && [running.toLocaleString("en-US"), "running"],
      stopped && [stopped.toLocaleString("en-US"), "stopped"],
      times.length && [duration(times.reduce((sum, each) => sum + each, 0)), "of training"],
      data.place !== data.name && ["", data.place],
    ]),
  );
}

function bar() {
  const select = h(
    "select",
    { onchange: () => change({ figure: select.selectedIndex, sort: null }) },
    data.figures.map((each) => h("option", { text: nameOf(each) })),
  );
  const input = h("input", {
    type: "search",
    spellcheck: "false",
    autocomplete: "off",
    placeholder: hint(),
    "aria-label": "Filter jobs",
    oninput: () => change({ filter: input.value, rows: 25 }),
  });
  const count = h("span", { class: "quiet", role: "status" });
  listeners.push(() => {
    if (input.value !== state.filter) input.value = state.filter;
    count.textContent =
      state.kept.length === jobs.length
        ? ""
        : `${state.kept.length.toLocaleString("en-US")} of ${plural(jobs.length, "job")}`;
  });
  return h("div", { class: "bar" }, h("label", {}, "Compare", select), h("div", { class: "grow" }, input), count);
}

function hint() {
  const key = data.keys[0],
    value = data.values[0]?.find((each) => each !== null);
  return key ? `Filter, such as ${key}=${typed(value)} or status=failed` : "Filter, such as status=failed";
}

function card() {
  const element = h("div", { class: "card" }),
    live = h("div", { class: "hidden", "aria-live": "polite" });
  listeners.push(() => {
    const job = chosen(),
      value = measured(job);
    const name = nameOf(figure());
    const title =
      job.place === 0
        ? `Best of ${plural(jobs.length, "job")}`
        : `Job ${job.place + 1} of ${jobs.length.toLocaleString("en-US")}`;
    const back =
      state.chosen &&
      h("button", {
        class: "plain quiet",
        type: "button",
        text: "Back to the best",
        onclick: () => change({ chosen: null }),
      });
    element.replaceChildren(
      h("header", {}, h("h3", { class: "quiet", text: title }), back || ""),
      h("div", { class: "figure", text: value === null ? job.status : `${name} ${digits(value)}` }),
      h(
        "ul",
        { class: "chips" },
        data.keys.map((key, at) => h("li", {}, `${key}=`, h("b", { text: typed(job.values[at]) }))),
      ),
      facts([
        [job.state, ""],
        [number(job.step), "steps"],
        [duration(job.seconds), ""],
        ...data.figures.map(
          (each, at) => at !== state.figure && job.figures[at] !== null && [digits(job.figures[at]), nameOf(each)],
        ),
      ]),
      job.cause ? h("p", { class: "bad", text: data.causes[job.cause - 1].text }) : "",
      commands([
        [
          "run it again",
          `python -m dtrain recipe=${quoted(`${data.place}/${job.name}/config.yaml`)} out='<another place>'`,
        ],
      ]),
    );
    if (state.chosen) live.textContent = `${title}, ${name} ${number(value)}`;
  });
  return h("section", { "aria-label": "The best or the chosen job" }, element, live);
}

function mattered() {
  const grid = h("div", { class: "shares" }),
    note = h("p", { class: "note" });
  listeners.push((update) => {
    if (!("figure" in update)) return;
    const shares = data.shares[state.figure],
      name = nameOf(figure());
    note.textContent = shares.length
      ? `The share of the variance of the jobs’ ranks by ${name} that each word explains by itself (epsilon squared of Kruskal and Wallis’s test). What words do only together is in nobody’s share. Each strip has ${name} over the word’s values; its line joins the medians.`
      : "Too few jobs have a figure to tell.";
    for (const plot of [...plots]) if (plot.ofShares) plots.delete(plot);
    grid.replaceChildren(
      ...shares.flatMap(([key, share]) => {
        const fill = h("i");
        fill.style.width = `calc((100% - 4.5em) * ${share})`;
        return [
          h("div", { class: "name", text: data.keys[key] }),
          h("div", { class: "meter" }, fill, h("span", { text: percent(share) })),
          strip(key),
        ];
      }),
    );
  });
  return section("What mattered", "", note, grid);
}

function failures() {
  if (!data.causes.length) return null;
  const failed = data.causes.reduce((sum, cause) => sum + cause.jobs.length, 0);
  return section(
    "Failures",
    `${plural(failed, "job")} failed, of ${plural(data.causes.length, "cause")}. Causes that differ in numbers alone are one.`,
    h(
      "ul",
      { class: "causes" },
      data.causes.map((cause, at) =>
        h(
          "li",
          {},
          h("span", { class: "count", text: `${cause.jobs.length} ×` }),
          h(
            "div",
            {},
            h("div", { text: cause.text }),
            h("button", {
              class: "plain quiet",
              type: "button",
              text: "Show these jobs",
              onclick: () => {
                filterBy("cause", String(at + 1));
              },
            }),
            cause.trace ? details("Traceback", h("pre", { tabindex: "0", text: cause.trace })) : null,
          ),
        ),
      ),
    ),
  );
}

rank();
page.append(
  ...[
    heading(),
    bar(),
    card(),
    curves(),
    data.keys.length ? mattered() : null,
    data.keys.length ? parallel() : null,
    leaderboard(),
    failures(),
    section("Commands", "", commands(data.commands)),
    planAndMachine(),
    footer(),
  ].filter(Boolean),
);
change({ figure: 0, filter: "" });
