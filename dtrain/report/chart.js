// Canvas charts: scales with round ticks, axes, and a plot that is drawn again when its size or the colours change.

function theme() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(
    ["paper", "surface", "ink", "quiet", "rule", "grid", "low", "high", "mark", "second"].map((name) => [
      name,
      style.getPropertyValue(`--${name}`).trim(),
    ]),
  );
}

function mix(from, to, share) {
  const parts = [1, 3, 5].map((at) => {
    const [a, b] = [from, to].map((color) => parseInt(color.slice(at, at + 2), 16));
    return Math.round(a + (b - a) * share)
      .toString(16)
      .padStart(2, "0");
  });
  return `#${parts.join("")}`;
}

function quantile(sorted, share) {
  return sorted[Math.min(sorted.length - 1, Math.max(0, Math.round(share * (sorted.length - 1))))];
}

// A scale from [low, high] to [0, 1]: `at(value)`, its inverse `value(share)`, and `ticks(count)`.
function scale(low, high, log = false) {
  if (!(high > low))
    [low, high] = [low - (Math.abs(low) / 2 || 1) * (log ? 0 : 1) || low / 2, high + (Math.abs(high) / 2 || 1)];
  const [f, g] = log ? [Math.log10, (x) => 10 ** x] : [(x) => x, (x) => x];
  const [a, b] = [f(low), f(high)];
  return {
    low,
    high,
    log,
    at: (value) => (f(value) - a) / (b - a),
    value: (share) => g(a + share * (b - a)),
    ticks: (count) => (log && b - a >= 1 ? decades(a, b, count) : round(low, high, count)),
  };
}

function round(low, high, count) {
  const rough = (high - low) / count,
    power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((by) => by * power).find((by) => by >= rough) || power;
  const ticks = [];
  for (let tick = Math.ceil(low / step - 1e-9); tick * step <= high + step * 1e-9 && ticks.length < 50; tick += 1) {
    ticks.push(Number((tick * step).toPrecision(12)));
  }
  return ticks;
}

function decades(a, b, count) {
  const every = Math.max(1, Math.ceil((b - a) / count)),
    ticks = [];
  for (let power = Math.ceil(a - 1e-9); power <= b + 1e-9 && ticks.length < 50; power += every) ticks.push(10 ** power);
  return ticks;
}

function tickText(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6))
    return value.toExponential(Number.isInteger(Math.log10(size)) ? 0 : 1).replace("e+", "e");
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(4))}k`;
  return String(Number(value.toPrecision(6)));
}

// Whether values are better told apart by their logarithms.
function isWide(values) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  return sorted.length > 1 && sorted[0] > 0 && sorted[sorted.length - 1] / sorted[0] >= 50;
}

const plots = new Set();

class Plot {
  // `draw(plot)` draws into `plot.context`, inside `plot.box`; `width`: the least, beyond which its frame scrolls.
  constructor({ label, height, margin, draw, width = 0, focusable = false }) {
    Object.assign(this, { height, margin, draw, width });
    this.canvas = h("canvas", { role: "img", "aria-label": label, tabindex: focusable ? "0" : null });
    this.tip = h("div", { class: "tip", hidden: true });
    this.element = h("div", { class: width ? "plot wide" : "plot" }, this.canvas, this.tip);
    this.canvas.addEventListener("pointerleave", () => {
      this.tip.hidden = true;
    });
    this.context = this.canvas.getContext("2d");
    plots.add(this);
    new ResizeObserver(() => this.redraw()).observe(this.element);
  }

  redraw() {
    const wide = Math.max(this.width, this.element.clientWidth),
      ratio = window.devicePixelRatio || 1;
    if (!wide) return;
    this.canvas.style.width = `${wide}px`;
    this.canvas.style.height = `${this.height}px`;
    if (this.canvas.width !== Math.round(wide * ratio) || this.canvas.height !== Math.round(this.height * ratio)) {
      this.canvas.width = Math.round(wide * ratio);
      this.canvas.height = Math.round(this.height * ratio);
    }
    const [top, right, bottom, left] = this.margin;
    this.box = {
      left,
      top,
      right: wide - right,
      bottom: this.height - bottom,
      width: wide - left - right,
      height: this.height - top - bottom,
    };
    this.colors = theme();
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.clearRect(0, 0, wide, this.height);
    this.context.font = '12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
    this.context.lineJoin = "round";
    this.draw(this);
  }

  px(share) {
    return this.box.left + share * this.box.width;
  }
  py(share) {
    return this.box.bottom - share * this.box.height;
  }

  text(text, x, y, { align = "left", baseline = "middle", color = this.colors.quiet, halo = false } = {}) {
    Object.assign(this.context, { textAlign: align, textBaseline: baseline, fillStyle: color });
    if (halo) {
      Object.assign(this.context, { strokeStyle: this.colors.paper, lineWidth: 4 });
      this.context.strokeText(text, x, y);
    }
    this.context.fillText(text, x, y);
  }

  line(x1, y1, x2, y2, color, width = 1, dash = []) {
    Object.assign(this.context, { strokeStyle: color, lineWidth: width });
    this.context.setLineDash(dash);
    this.context.beginPath();
    this.context.moveTo(x1, y1);
    this.context.lineTo(x2, y2);
    this.context.stroke();
    this.context.setLineDash([]);
  }

  // Grid and labels. `x`: scale or null; `xText`, `yText`: tick -> label.
  axes(x, y, { xText = tickText, yText = tickText, yCount = 6 } = {}) {
    const { left, right, bottom } = this.box;
    for (const tick of y.ticks(yCount)) {
      const at = Math.round(this.py(y.at(tick))) + 0.5;
      this.line(left, at, right, at, this.colors.grid);
      this.text(yText(tick), left - 8, at, { align: "right" });
    }
    this.line(left, bottom + 0.5, right, bottom + 0.5, this.colors.rule);
    for (const tick of x ? x.ticks(Math.max(2, Math.floor(this.box.width / 90))) : []) {
      const at = this.px(x.at(tick)),
        edge = at > right - 16 ? "right" : "center";
      this.text(xText(tick), at, bottom + 9, { align: at < left + 8 ? "left" : edge, baseline: "top" });
    }
  }

  // A line through points in shares of the box, cut at its edges; null interrupts it. A point alone is a dot.
  path(points, color, width = 1, alpha = 1) {
    const { context, box } = this;
    context.save();
    context.beginPath();
    context.rect(box.left, box.top - 2, box.width + 2, box.height + 4);
    context.clip();
    Object.assign(context, { strokeStyle: color, lineWidth: width, globalAlpha: alpha });
    context.beginPath();
    const alone = [];
    let down = false;
    points.forEach((point, index) => {
      if (point === null) {
        down = false;
        return;
      }
      const x = this.px(point[0]),
        y = this.py(Math.max(-1, Math.min(2, point[1])));
      if (down) context.lineTo(x, y);
      else context.moveTo(x, y);
      if (!down && (points[index + 1] ?? null) === null) alone.push([x, y]);
      down = true;
    });
    context.stroke();
    for (const [x, y] of alone) this.dot(x, y, color, width + 1);
    context.restore();
  }

  dot(x, y, color, radius = 3) {
    this.context.fillStyle = color;
    this.context.beginPath();
    this.context.arc(x, y, radius, 0, 2 * Math.PI);
    this.context.fill();
  }

  // Lines of text beside the pointer; none hide it.
  tell(lines, event) {
    this.tip.hidden = !lines.length;
    if (!lines.length) return;
    const [x, y] = this.where(event),
      right = x > this.element.clientWidth / 2;
    this.tip.textContent = lines.join("\n");
    this.tip.style.top = `${Math.max(0, y - 12)}px`;
    this.tip.style.left = right ? "auto" : `${x + 16}px`;
    this.tip.style.right = right ? `${this.element.clientWidth - x + 16}px` : "auto";
  }

  // The place of an event of the pointer, in pixels of the plot.
  where(event) {
    const bounds = this.canvas.getBoundingClientRect();
    return [event.clientX - bounds.left, event.clientY - bounds.top];
  }
}

function redrawAll() {
  for (const plot of plots) plot.redraw();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
