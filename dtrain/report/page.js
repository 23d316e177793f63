"use strict";
// What pages of runs and of sweeps share. Every value is put into the page as text, never as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");

// An element with attributes (text, class, on... for listeners, others as they are) and children.
function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") element.textContent = value;
    else if (key === "class") element.className = value;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== ""));
  return element;
}

function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en-US");
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  return size >= 1e4 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(4)));
}

// A number of a column: all have as many digits.
function digits(value) {
  return typeof value === "number" && Math.abs(value) >= 1e-3 && Math.abs(value) < 1e4
    ? value.toPrecision(4)
    : number(value);
}

// A value of a word, as one would type it.
function typed(value) {
  return typeof value === "number" ? String(value) : value === null ? "–" : value;
}

function percent(share) {
  return share < 0.005 ? "0%" : `${Math.round(100 * share)}%`;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

function moment(seconds, timeStyle = "short") {
  const date = new Date(1000 * seconds);
  return Number.isNaN(date.getTime()) ? "–" : date.toLocaleString("en-GB", { dateStyle: "medium", timeStyle });
}

function plural(count, noun) {
  return `${count.toLocaleString("en-US")} ${noun}${count === 1 ? "" : "s"}`;
}

// A word of a command, quoted for a shell where it has to be.
function quoted(word) {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}

function section(title, note, ...children) {
  const id = title.toLowerCase().replace(/\W+/g, "-");
  return h(
    "section",
    { "aria-labelledby": id },
    h("h2", { id, text: title }),
    note ? h("p", { class: "note", text: note }) : null,
    ...children,
  );
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select and copy it";
  }
  setTimeout(() => {
    button.textContent = "Copy";
  }, 2000);
}

function command(what, text) {
  const button = h("button", { type: "button", text: "Copy", "aria-label": `Copy the command: ${what}` });
  button.addEventListener("click", () => copy(text, button));
  return h("div", {}, h("span", { class: "what", text: what }), h("code", { text }), button);
}

function commands(rows) {
  return h(
    "div",
    { class: "rows" },
    rows.map(([what, text]) => command(what, text)),
  );
}

function pairs(rows) {
  return h(
    "dl",
    { class: "pairs" },
    rows.map(([key, value]) => h("div", {}, h("dt", { text: key }), h("dd", { text: value }))),
  );
}

function details(title, ...children) {
  return h("details", {}, h("summary", { text: title }), ...children);
}

function facts(rows) {
  return h(
    "div",
    { class: "facts" },
    rows
      .filter(Boolean)
      .map(([value, label, bad]) =>
        h("span", {}, value ? h("b", { class: bad ? "bad" : "", text: value }) : "", label ? ` ${label}` : ""),
      ),
  );
}

function planAndMachine() {
  if (!data.plan.length && !data.machine.length) return null;
  return section(
    "Plan and machine",
    data.kind === "sweep" ? "Of the best job; the others differ from it in the swept words." : "",
    pairs(data.machine),
    data.plan.length ? details(`Plan (${plural(data.plan.length, "value")})`, pairs(data.plan)) : null,
    data.words.length
      ? details(`Words ${data.kind === "sweep" ? "of all jobs " : ""}(${data.words.length})`, pairs(data.words))
      : null,
  );
}

function footer() {
  return h("footer", { text: `dtrain ${data.version} · ${data.place} · read on ${moment(data.made)}` });
}
