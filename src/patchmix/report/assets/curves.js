// Curves of all runs: hover or arrow keys read values, dragging zooms, the legend's buttons hide runs.

const WIDTH = 420, HEIGHT = 230, LEFT = 52, RIGHT = 10, TOP = 8, BOTTOM = 26;

function startCurves(root, data) {
  const state = { axis: data.axes[0][0], smoothing: 0, bounds: true, hidden: new Set(), range: null };
  const panels = data.panels.map((panel) => new Panel(panel, data, state, () => refresh()));
  const refresh = () => panels.forEach((panel) => panel.render());
  const change = (key, value) => { state[key] = value; refresh(); };

  const drawn = new Set(data.panels.flatMap((panel) => panel.series.map((series) => series.run)));
  const legend = data.runs.map((name, run) => !drawn.has(run) ? null : make("button", {
    type: "button", "aria-pressed": "true", onclick: (event) => {
      state.hidden.has(run) ? state.hidden.delete(run) : state.hidden.add(run);
      event.currentTarget.setAttribute("aria-pressed", String(!state.hidden.has(run)));
      refresh();
    },
  }, make("span", { class: `swatch fill-${run % 8}` }), name));
  const smoothing = make("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: 0 });
  smoothing.addEventListener("input", () => change("smoothing", Number(smoothing.value)));
  const bounds = make("input", { type: "checkbox", checked: true });
  bounds.addEventListener("change", () => change("bounds", bounds.checked));
  root.append(
    make("div", { class: "controls legend", role: "group", "aria-label": "Runs shown" }, ...legend),
    make("div", { class: "controls" },
      choice("axis", data.axes, state.axis, (value) => { state.range = null; change("axis", value); }),
      make("label", {}, "smoothing", smoothing),
      make("label", {}, bounds, "chance (dashed) and floor (dotted)"),
      make("button", { type: "button", onclick: () => change("range", null) }, "whole range")),
    make("p", { class: "note screen-only" }, "Hover or use ← → to read values; drag, or press + and −, to zoom; Esc shows the whole range."),
    make("div", { class: "panels" }, ...panels.map((panel) => panel.root)));
  refresh();
}

// The moving average Σ weight^age · value, divided by the sum of its weights, so that it starts at the first value.
function smoothed(values, weight) {
  let total = 0, norm = 0;
  return values.map((value) => { total = weight * total + value; norm = weight * norm + 1; return total / norm; });
}

class Panel {
  constructor(panel, data, state, refreshAll) {
    Object.assign(this, { panel, data, state, refreshAll, cursor: null, drag: null });
    this.svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, tabindex: 0, role: "img" });
    this.readout = make("p", { class: "readout", "aria-live": "polite" });
    this.root = make("figure", { class: "panel", "data-panel": panel.key }, make("h3", {}, panel.title), this.svg, this.readout);
    this.svg.addEventListener("pointermove", (event) => this.move(event));
    this.svg.addEventListener("pointerleave", () => { if (this.drag === null) this.point(null); });
    this.svg.addEventListener("pointerdown", (event) => { this.drag = this.toData(event); this.svg.setPointerCapture(event.pointerId); });
    this.svg.addEventListener("pointerup", (event) => this.drop(event));
    this.svg.addEventListener("dblclick", () => this.zoom(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("blur", () => this.point(null));
  }

  get visible() { return this.panel.series.filter((series) => !this.state.hidden.has(series.run) && series.x[this.state.axis]); }

  render() {
    const { axis, smoothing, range, bounds } = this.state;
    const all = this.visible.map((series) => series.x[axis]).flat();
    const [low, high] = range ?? [Math.min(...all), Math.max(...all)];
    const inside = (x) => x >= low && x <= high;
    const lines = [...this.visible].sort((a, b) => b.y.length - a.y.length).map((series) => ({
      run: series.run, x: series.x[axis], raw: series.y, y: this.panel.noisy ? smoothed(series.y, smoothing) : series.y,
      bounds: bounds ? Object.entries(series.bounds) : [],
    }));
    const values = lines.flatMap((line) => [line.raw, ...line.bounds.map(([, y]) => y)].flatMap((y) => y.filter((_, i) => inside(line.x[i]))));
    let bottom = Math.min(...values), top = Math.max(...values);
    const slack = (top - bottom) * 0.05 || Math.abs(top) * 0.1 || 1;
    this.scale = { low, high, bottom: bottom - slack, top: top + slack, lines };
    this.svg.replaceChildren();
    this.svg.setAttribute("aria-label", this.describe(lines));
    if (!all.length) { this.readout.textContent = "no values"; return; }
    for (const y of ticks(this.scale.bottom, this.scale.top, 4)) {
      this.svg.append(draw("line", { class: "grid-line", x1: LEFT, x2: WIDTH - RIGHT, y1: this.y(y), y2: this.y(y) }),
        draw("text", { class: "tick", x: LEFT - 5, y: this.y(y) + 4, "text-anchor": "end" }, formatted(y)));
    }
    for (const x of ticks(low, high, 5)) this.svg.append(draw("text", { class: "tick", x: this.x(x), y: HEIGHT - 8, "text-anchor": "middle" }, formatted(x)));
    const drawn = new Set(); // runs of one batch size share their bounds
    for (const line of lines) {
      const keep = line.x.map((x, i) => i).filter((i) => inside(line.x[i]));
      const path = (y) => keep.map((i, n) => `${n ? "L" : "M"}${this.x(line.x[i]).toFixed(1)} ${this.y(y[i]).toFixed(1)}`).join("");
      for (const [name, y] of line.bounds) {
        const level = `${name} ${y[0]} ${y.at(-1)}`;
        if (!drawn.has(level)) this.svg.append(draw("path", { class: `bound ${name}`, d: path(y) }));
        drawn.add(level);
      }
      if (this.panel.noisy && smoothing) this.svg.append(draw("path", { class: `curve faint series-${line.run % 8}`, d: path(line.raw) }));
      this.svg.append(draw("path", { class: `curve series-${line.run % 8}`, d: path(line.y) }));
      if (keep.length <= 30) for (const i of keep) this.svg.append(draw("circle", { class: `fill-${line.run % 8}`, cx: this.x(line.x[i]), cy: this.y(line.y[i]), r: 2.4 }));
    }
    this.marks = draw("g");
    this.svg.append(this.marks);
    this.point(null);
  }

  describe(lines) {
    const parts = lines.filter((line) => line.y.length).map((line) => `${this.data.runs[line.run]}: from ${formatted(line.raw[0])} to ${formatted(line.raw.at(-1))}`);
    return `${this.panel.title} over ${this.label}. ${parts.join("; ")}`;
  }

  get label() { return this.data.axes.find(([kind]) => kind === this.state.axis)[1]; }
  x(value) { return LEFT + (value - this.scale.low) / (this.scale.high - this.scale.low || 1) * (WIDTH - LEFT - RIGHT); }
  y(value) { return HEIGHT - BOTTOM - (value - this.scale.bottom) / (this.scale.top - this.scale.bottom) * (HEIGHT - TOP - BOTTOM); }

  toData(event) {
    const box = this.svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT);
    return this.scale.low + Math.min(1, Math.max(0, at)) * (this.scale.high - this.scale.low);
  }

  move(event) {
    const at = this.toData(event);
    this.point(at);
    if (this.drag !== null) {
      const [a, b] = [this.drag, at].map((value) => this.x(value)).sort((p, q) => p - q);
      this.marks.append(draw("rect", { class: "selected-range", x: a, y: TOP, width: b - a, height: HEIGHT - TOP - BOTTOM }));
    }
  }

  drop(event) {
    const [a, b] = [this.drag, this.toData(event)].sort((p, q) => p - q);
    this.drag = null;
    if (this.x(b) - this.x(a) > 8) this.zoom([a, b]);
  }

  zoom(range) { this.state.range = range; this.refreshAll(); }

  key(event) {
    const places = this.scale.lines[0]?.x.filter((x) => x >= this.scale.low && x <= this.scale.high) ?? [];
    const here = this.cursor === null ? -1 : nearestIndex(places, this.cursor);
    const half = (this.scale.high - this.scale.low) / 4, center = this.cursor ?? (this.scale.low + this.scale.high) / 2;
    const to = { ArrowRight: Math.min(here + 1, places.length - 1), ArrowLeft: Math.max(here - 1, 0), Home: 0, End: places.length - 1 }[event.key];
    if (to !== undefined) this.point(places[to]);
    else if (event.key === "+") this.zoom([center - half, center + half]);
    else if (["-", "0", "Escape"].includes(event.key)) this.zoom(null);
    else return;
    event.preventDefault();
  }

  // Shows the values nearest to a place on the axis; null clears them.
  point(at) {
    this.cursor = at;
    this.marks?.replaceChildren();
    if (at === null || at === undefined || !this.scale.lines.length) { this.readout.textContent = ""; return; }
    const texts = [];
    let place = at;
    for (const line of this.scale.lines) {
      const i = nearestIndex(line.x, at), slack = (this.scale.high - this.scale.low) / 40;
      if (i < 0 || at > line.x.at(-1) + slack || at < line.x[0] - slack) continue; // this run has nothing here
      place = line.x[i];
      const bounds = line.bounds.map(([name, y]) => `${name} ${formatted(y[i])}`).join(", ");
      texts.push(`${this.data.runs[line.run]} ${formatted(line.y[i])}${bounds ? ` (${bounds})` : ""}`);
      this.marks.append(draw("circle", { class: `fill-${line.run % 8}`, cx: this.x(place), cy: this.y(line.y[i]), r: 4 }));
    }
    this.marks.prepend(draw("line", { class: "cursor", x1: this.x(place), x2: this.x(place), y1: TOP, y2: HEIGHT - BOTTOM }));
    this.readout.textContent = `${this.label} ${formatted(place)}: ${texts.join("; ")}`;
  }
}

function nearestIndex(places, at) {
  let best = -1;
  places.forEach((place, i) => { if (best < 0 || Math.abs(place - at) < Math.abs(places[best] - at)) best = i; });
  return best;
}
