// The explorer: a grid of thumbnails; the chosen one's neighbors, similarities and classes, for one run or two.

// exp(s/τ′)/exp(1/τ′), in (0, 1].
const normalizedSimilarity = (cosine, temperature) => Math.exp((Math.min(cosine, 1) - 1) / temperature);

// How many neighbors each class has, and kNN's vote: [[label, count, weight], …], the strongest first.
function tally(neighbors, labels, temperature) {
  const classes = new Map();
  for (const [place, cosine] of neighbors) {
    const entry = classes.get(labels[place]) ?? [labels[place], 0, 0];
    entry[1] += 1;
    entry[2] += Math.exp((cosine - neighbors[0][1]) / temperature);
    classes.set(labels[place], entry);
  }
  return [...classes.values()].sort((a, b) => b[2] - a[2] || a[0] - b[0]);
}

function startExplorer(root, data) {
  const counts = data.most < 5 ? [data.most] : [5, 10, 20].filter((k) => k <= data.most);
  const state = { query: -1, k: counts[Math.min(1, counts.length - 1)], runs: [0, data.runs.length > 1 ? 1 : -1], text: "", label: "" };
  // The k nearest images of a query, itself left out: [[position, cosine], …].
  const nearest = ({ neighbors, cosines }, query, k) => neighbors[query].slice(0, k).map((place, rank) => [place, cosines[query][rank]]);
  const className = (i) => (data.labels ? data.classes[data.labels[i]] ?? `class ${data.labels[i]}` : "");
  const title = (i) => (data.labels ? `${className(i)}, ${data.keys[i]}` : data.keys[i]);
  const image = (i) => make("img", { src: `data:image/webp;base64,${data.thumbs[i]}`, alt: "", loading: "lazy", decoding: "async" });

  // ------------------------------------------------------------------------------------------------ the grid
  const buttons = data.keys.map((_, i) => make("button", {
    type: "button", tabindex: -1, "aria-pressed": "false", "aria-label": title(i), title: title(i), "data-image": i, onclick: () => choose(i),
  }, image(i)));
  const grid = make("div", { class: "thumbs", role: "group", "aria-label": "Images; arrow keys move, Enter chooses", onkeydown: (event) => walk(event) }, ...buttons);
  const matches = make("p", { class: "note", role: "status" });

  function filter() {
    const wanted = state.text.trim().toLowerCase();
    let count = 0;
    buttons.forEach((button, i) => {
      button.hidden = (state.label !== "" && String(data.labels[i]) !== state.label) || !title(i).toLowerCase().includes(wanted);
      count += !button.hidden;
    });
    matches.textContent = `${count.toLocaleString("en")} of ${buttons.length.toLocaleString("en")} images`;
    enter(buttons.find((button) => !button.hidden && button.tabIndex === 0) ?? buttons.find((button) => !button.hidden));
  }

  function enter(target) {  // one thumbnail is in the tab order: the one last visited
    if (target) buttons.forEach((button) => { button.tabIndex = button === target ? 0 : -1; });
  }

  function walk(event) {
    const shownOnes = buttons.filter((button) => !button.hidden);
    const here = shownOnes.indexOf(document.activeElement);
    if (here < 0) return;
    const top = shownOnes[0].offsetTop;
    const columns = Math.max(1, shownOnes.filter((button) => button.offsetTop === top).length);
    const to = { ArrowRight: here + 1, ArrowLeft: here - 1, ArrowDown: here + columns, ArrowUp: here - columns, Home: 0, End: shownOnes.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const target = shownOnes[Math.min(shownOnes.length - 1, Math.max(0, to))];
    enter(target);
    target.focus();
  }

  // ------------------------------------------------------------------------------------------------ the answer
  const head = make("div", { class: "query" });
  const results = make("div");
  const status = make("p", { class: "note", role: "status" });

  function choose(i, { focus = false } = {}) {
    buttons[state.query]?.setAttribute("aria-pressed", "false");
    state.query = i;
    buttons[i].setAttribute("aria-pressed", "true");
    enter(buttons[i]);
    if (focus && !buttons[i].hidden) buttons[i].scrollIntoView({ block: "nearest" });
    show();
  }

  function show() {
    const i = state.query;
    head.replaceChildren(image(i), make("p", {}, make("strong", {}, className(i) || "query"), make("br"), make("span", { class: "soft" }, data.keys[i])));
    const chosen = state.runs.filter((run, place) => run >= 0 && state.runs.indexOf(run) === place);
    const answers = chosen.map((run) => [run, nearest(data.runs[run], i, state.k)]);
    results.replaceChildren(...answers.map(([run, neighbors]) => answer(run, neighbors)));
    status.textContent = `${state.k} nearest of ${title(i)}. ` + answers.map(([run, neighbors]) => summary(run, neighbors)).join(" ") + common(answers);
  }

  const summary = (run, neighbors) => (data.labels
    ? `${data.runs[run].name}: ${neighbors.filter(([place]) => data.labels[place] === data.labels[state.query]).length} of its class.`
    : `${data.runs[run].name}: cosine ${neighbors[0][1].toFixed(3)} to ${neighbors.at(-1)[1].toFixed(3)}.`);

  function common(answers) {
    if (answers.length < 2) return "";
    const second = new Set(answers[1][1].map(([place]) => place));
    return ` The runs agree on ${answers[0][1].filter(([place]) => second.has(place)).length} of ${state.k}.`;
  }

  function answer(run, neighbors) {
    const same = (place) => !data.labels || data.labels[place] === data.labels[state.query];
    const tiles = neighbors.map(([place, cosine], rank) => make("li", {}, make("button", {
      type: "button", class: data.labels ? (same(place) ? "same" : "other") : "", "data-image": place, title: title(place),
      "aria-label": `${rank + 1}: ${title(place)}, cosine ${cosine.toFixed(3)}${data.labels ? (same(place) ? ", same class" : ", another class") : ""}`,
      onclick: () => choose(place, { focus: true }),
    }, image(place), make("span", {}, `${data.labels ? (same(place) ? "✓ " : "✗ ") : ""}${cosine.toFixed(3)}`), make("span", {}, className(place)))));
    const charts = [make("div", {}, make("h4", { title: `exp(s/τ′)/exp(1/τ′), τ′ = ${data.temperature}` }, "normalized similarity"), bars(neighbors, same))];
    if (data.labels) charts.push(make("div", {}, make("h4", {}, `classes of the ${neighbors.length}`), histogram(neighbors)));
    charts.push(make("div", {}, make("h4", {}, data.labels ? "map (blue: its class)" : "map"), atlas(run, neighbors)));
    return make("section", { class: "result", "data-run": run, "aria-label": `Neighbors by ${data.runs[run].name}` },
      make("h3", {}, make("span", { class: `swatch fill-${run % 8}` }), data.runs[run].name),
      make("ol", { class: "neighbors" }, ...tiles), make("div", { class: "charts" }, ...charts));
  }

  function bars(neighbors, same) {
    const width = 300, height = 96, step = (width - 24) / neighbors.length;
    const heights = neighbors.map(([, cosine]) => normalizedSimilarity(cosine, data.temperature));
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height + 16}`, role: "img", "aria-label": `similarities ${heights.map((value) => value.toFixed(2)).join(", ")}` });
    for (const level of [0, 0.5, 1]) {
      const y = height - level * (height - 8);
      svg.append(draw("line", { class: "grid-line", x1: 24, x2: width, y1: y, y2: y }), draw("text", { class: "tick", x: 20, y: y + 4, "text-anchor": "end" }, String(level)));
    }
    heights.forEach((value, i) => {
      const tall = value * (height - 8), x = 24 + i * step;
      svg.append(draw("rect", { class: same(neighbors[i][0]) ? "bar-same" : "bar-other", x: x + step * 0.12, y: height - tall, width: step * 0.76, height: tall },
        draw("title", {}, `${i + 1}: ${value.toFixed(3)}`)));
      if (neighbors.length <= 12 || i % 2 === 0) svg.append(draw("text", { class: "tick", x: x + step / 2, y: height + 13, "text-anchor": "middle" }, String(i + 1)));
    });
    return svg;
  }

  // All images at their first two principal components: the query, its neighbors and its class stand out; a click chooses.
  function atlas(run, neighbors) {
    const width = 300, height = 190, places = data.runs[run].map;
    const at = (i) => [6 + places[2 * i] * (width - 12), height - 6 - places[2 * i + 1] * (height - 12)];
    const dot = (i, kind, r) => draw("circle", { class: kind, cx: at(i)[0].toFixed(1), cy: at(i)[1].toFixed(1), r });
    const own = data.labels ? data.keys.map((_, i) => i).filter((i) => data.labels[i] === data.labels[state.query]) : [];
    return draw("svg", {
      class: "atlas", viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `map of all images by ${data.runs[run].name}: first two principal components, the query and its neighbors marked`,
      onclick: (event) => {
        const pixel = new DOMPoint(event.clientX + 0.5, event.clientY + 0.5); // its middle: events have whole numbers
        const { x, y } = pixel.matrixTransform(event.currentTarget.getScreenCTM().inverse());
        const away = data.keys.map((_, i) => Math.hypot(at(i)[0] - x, at(i)[1] - y));
        choose(away.indexOf(Math.min(...away)), { focus: true });
      },
    }, ...data.keys.map((_, i) => dot(i, "dot", 1.4)), ...own.map((i) => dot(i, "dot-class", 1.8)),
    ...neighbors.map(([i]) => dot(i, "dot-near", 3)), dot(state.query, "dot-query", 4.5));
  }

  function histogram(neighbors) {
    return make("ul", { class: "histogram" }, ...tally(neighbors, data.labels, data.temperature).map(([label, count], place) => {
      const bar = make("i");
      bar.style.width = `${100 * count / neighbors.length}%`;
      const name = data.classes[label] ?? `class ${label}`;
      return make("li", { class: label === data.labels[state.query] ? "own" : "" }, make("span", { title: name }, name + (place === 0 ? " ← vote" : "")), make("span", { class: "track" }, bar), make("span", {}, String(count)));
    }));
  }

  // ------------------------------------------------------------------------------------------------ controls
  const search = make("input", { type: "search", placeholder: "class or file name", "aria-label": "Search by class or file name" });
  search.addEventListener("input", () => { state.text = search.value; filter(); });
  const runs = data.runs.map((run, i) => [String(i), run.name]);
  const again = () => { if (state.query >= 0) show(); };
  const controls = make("div", { class: "controls" }, make("label", {}, "search", search));
  if (data.labels) controls.append(choice("class", [["", "all"], ...data.classes.map((name, i) => [String(i), name])], "", (value) => { state.label = value; filter(); }));
  if (runs.length > 1) {
    controls.append(choice("run", runs, "0", (value) => { state.runs[0] = Number(value); again(); }),
      choice("beside", [["-1", "none"], ...runs], "1", (value) => { state.runs[1] = Number(value); again(); }));
  }
  controls.append(choice("neighbors", counts.map((k) => [String(k), String(k)]), String(state.k), (value) => { state.k = Number(value); again(); }));
  root.append(controls, make("div", { class: "explorer" }, make("div", { class: "screen-only" }, matches, grid), make("div", { "aria-label": "Chosen image", role: "region" }, head, status, results)));
  filter();
  choose(0);
}
