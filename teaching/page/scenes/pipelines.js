// The scene of pipelines: who computes when, the memory that takes, and what slower stages change.

let words = null;
const times = { stages: [], message: 0 };
const KIND_WORDS = { F: "forward", B: "backward", I: "backward, for inputs", W: "backward, for weights" };
const COLORS = { F: "--forward", B: "--backward", I: "--inputs", W: "--weights" };
const [LEFT, LANE] = [70, 44];

addScene({
  name: "pipelines",
  title: "Pipelines",
  first: { schedule: "1f1b", ranks: "4", micro_batches: "6" },
  async open() {
    words = await unpack("pipelines.catalog");
    this.orders = Object.fromEntries(await Promise.all(Object.keys(words).map(async (name) => [name, await unpack(`pipelines.${name}`)])));
  },
  controls(choice) {
    const sizes = Object.keys(Object.values(this.orders)[0]).map((key) => key.split("x"));
    const options = (index) => [...new Set(sizes.map((size) => size[index]))].map((value) => [value, value]);
    return [
      { name: "schedule", label: "Schedule", options: Object.keys(words).map((name) => [name, name]) },
      { name: "ranks", label: "Ranks", options: options(0) },
      { name: "micro_batches", label: "Micro-batches", options: options(1) },
    ];
  },
  async load(choice) {
    const orders = this.orders[choice.schedule][`${choice.ranks}x${choice.micro_batches}`].map(parseOrder);
    return new PipelineView(choice, orders);
  },
});

function parseOrder(text) {
  return text.split(" ").map((word) => {
    const [, stage, kind, microBatch] = /^(\d+)([FBIW])(\d+)$/.exec(word);
    return { stage: Number(stage), kind, microBatch: Number(microBatch) };
  });
}

/** Return when each action begins and ends: once its rank is free, and what it needs of another stage has come. */
function simulate(orders, stageTimes, message) {
  const home = new Map(orders.flatMap((order, rank) => order.map(({ stage }) => [stage, rank])));
  const key = (kind, stage, microBatch) => `${kind}${stage}:${microBatch}`;
  const came = new Map(); // when the result of a stage's pass is where it is needed
  const next = orders.map(() => 0);
  const free = orders.map(() => 0);
  const spans = orders.map(() => []);
  for (let moved = true; moved; ) {
    moved = false;
    orders.forEach((order, rank) => {
      while (next[rank] < order.length) {
        const { stage, kind, microBatch } = order[next[rank]];
        const from = stage + (kind === "F" ? -1 : 1);
        const isAwaited = kind !== "W" && home.has(from);
        const arrival = isAwaited ? came.get(key(kind === "F" ? "F" : "I", from, microBatch)) : 0;
        if (arrival === undefined) return;
        const begin = Math.max(free[rank], arrival);
        const end = begin + stageTimes[stage] * (kind === "B" ? 2 : 1);
        spans[rank].push({ begin, end, ...order[next[rank]] });
        const to = stage + (kind === "F" ? 1 : -1);
        const travels = home.has(to) && home.get(to) !== rank ? message : 0;
        if (kind !== "W") came.set(key(kind === "F" ? "F" : "I", stage, microBatch), end + travels);
        free[rank] = end;
        next[rank] += 1;
        moved = true;
      }
    });
  }
  return spans;
}

/** Return the share of all ranks' time in which they have nothing to do. */
function bubbleOf(spans) {
  const span = Math.max(...spans.flat().map(({ end }) => end));
  const busy = spans.flat().reduce((sum, { begin, end }) => sum + end - begin, 0);
  return span ? 1 - busy / (spans.length * span) : 0;
}

/** Return how many activations a rank keeps, as [time, number]: from a forward pass to the end of the backward one. */
function aliveOf(spans) {
  let alive = 0;
  const curve = [[0, 0]];
  for (const { kind, begin, end } of spans) {
    if (kind === "F") curve.push([begin, (alive += 1)]);
    if (kind === "B" || kind === "W") curve.push([end, (alive -= 1)]);
  }
  return curve;
}

class PipelineView {
  constructor(choice, orders) {
    Object.assign(this, { choice, orders, numStages: 1 + Math.max(...orders.flat().map(({ stage }) => stage)) });
    if (times.stages.length !== this.numStages) times.stages = range(this.numStages).map(() => 1);
    this.price();
  }

  price() {
    this.spans = simulate(this.orders, times.stages, times.message);
    this.end = Math.max(...this.spans.flat().map(({ end }) => end));
    this.moments = [...new Set([0, ...this.spans.flat().map(({ end }) => end)])].sort((a, b) => a - b);
    this.steps = this.moments.length - 1;
  }

  status(step) {
    return `${inWords(this.moments[step])} of ${inWords(this.end)} time units`;
  }

  show(step, stage, side) {
    Object.assign(this, { step, stage, side });
    const now = this.moments[step];
    const board = html("div", { class: "scrolled", tabindex: "0", role: "region", "aria-label": "Passes over time" });
    stage.replaceChildren(
      html("p", { class: "words" }, html("strong", {}, `${this.choice.schedule}. `), words[this.choice.schedule]),
      board,
      this.legend(),
    );
    board.append(this.draw(now, stage.clientWidth));
    if (!side.querySelector("#stage-times") || side.dataset.of !== String(this.numStages)) side.replaceChildren(this.sliders());
    side.dataset.of = this.numStages;
    const numbers = this.numbers(now);
    const old = side.querySelector("#numbers");
    if (old) old.replaceWith(numbers);
    else side.prepend(numbers);
  }

  detach() {
    this.side.dataset.of = "";
  }

  draw(now, width) {
    const unit = Math.max(this.end ? (width - LEFT - 20) / this.end : 0, 9);
    const ranks = this.spans.length;
    const lane = Math.max(LANE, Math.min(66, 420 / ranks));
    const memoryTop = 16 + ranks * lane + 46;
    const most = Math.max(...this.spans.flatMap((spans) => aliveOf(spans).map(([, alive]) => alive)));
    const height = Math.max(26, Math.min(44, 260 / ranks));
    const bottom = memoryTop + ranks * (height + 8) + 10;
    const x = (time) => LEFT + time * unit;
    const soft = (y, text, at = LEFT) => svg("text", { class: "soft", x: at, y, "font-size": 13 }, text);
    const picture = svg("svg", { id: "grid", width: x(this.end) + 20, height: bottom, role: "img", "aria-label": `${this.status(this.step)}, bubble ${percent(bubbleOf(this.spans))}` });
    this.spans.forEach((spans, rank) => {
      const y = 16 + rank * lane;
      picture.append(
        svg("text", { x: 0, y: y + lane / 2 + 1, "font-size": 14 }, `rank ${rank}`),
        svg("rect", { x: LEFT, y, width: x(this.end) - LEFT, height: lane - 6, fill: "var(--idle)" }),
        ...spans.map((span) => this.bar(span, now, x, y, lane - 6)),
      );
    });
    picture.append(soft(memoryTop - 14, `Activations kept, at most ${most}`));
    this.spans.forEach((spans, rank) => picture.append(...this.curve(spans, rank, now, x, memoryTop + rank * (height + 8), height, most)));
    picture.append(svg("path", { d: `M${x(now)} 6V${bottom}`, stroke: "var(--new)", "stroke-width": 2, fill: "none" }));
    return picture;
  }

  bar({ begin, end, kind, stage, microBatch }, now, x, y, height) {
    const state = end <= now ? "over" : begin <= now ? "running" : "ahead";
    const width = x(end) - x(begin);
    const attributes = { x: x(begin) + 0.5, y, width: Math.max(1, width - 1), height, rx: 2, fill: `var(${COLORS[kind]})` };
    const label = `${stage}${kind}${microBatch}`;
    const title = `stage ${stage}, ${KIND_WORDS[kind]}, of micro-batch ${microBatch}: ${inWords(begin)} to ${inWords(end)}`;
    const rect = svg("rect", { ...attributes, opacity: state === "ahead" ? 0.3 : 1 });
    const group = svg("g", { "data-action": label, "data-state": state }, svg("title", {}, title), rect);
    if (state === "running") group.append(svg("rect", { ...attributes, fill: "none", stroke: "var(--new)", "stroke-width": 3 }));
    const short = this.numStages > this.spans.length ? label : `${kind}${microBatch}`;
    const text = { class: state === "ahead" ? "" : "on-bar", x: x(begin) + width / 2, y: y + height / 2 + 5, "font-size": 13, "text-anchor": "middle" };
    if (width > short.length * 8 + 2) group.append(svg("text", text, short));
    return group;
  }

  curve(spans, rank, now, x, y, height, most) {
    const curve = aliveOf(spans);
    const level = (alive) => y + height - (alive / Math.max(1, most)) * (height - 2);
    let path = `M${x(0)} ${level(0)}`;
    for (const [time, alive] of curve) path += `H${x(time)}V${level(alive)}`;
    const here = curve.filter(([time]) => time <= now).pop()[1];
    const peak = Math.max(...curve.map(([, alive]) => alive));
    return [
      svg("text", { x: 0, y: y + height - 4, "font-size": 14 }, `rank ${rank}`),
      svg("path", { d: `${path}H${x(this.end)}V${level(0)}Z`, fill: colorOf(rank, this.spans.length), opacity: 0.65, "data-peak": peak }),
      svg("path", { d: `M${x(0)} ${y + height}H${x(this.end)}`, stroke: "var(--line)" }),
      svg("text", { x: x(now) + 5, y: y + height - 4, "font-size": 13, "data-alive": here }, String(here)),
    ];
  }

  legend() {
    const kinds = Object.keys(KIND_WORDS).filter((kind) => this.orders.flat().some((action) => action.kind === kind));
    const item = (kind) => html("li", {}, html("i", { style: `background: var(${COLORS[kind]})` }), `${kind}: ${KIND_WORDS[kind]}`);
    return html("ul", { class: "legend" }, ...kinds.map(item), html("li", {}, html("i", { style: "background: var(--idle)" }), "bubble: nothing to do"));
  }

  numbers(now) {
    const row = (name, value, id) => html("tr", {}, html("th", { scope: "row" }, name), html("td", { id }, value));
    return html(
      "section",
      { id: "numbers" },
      html("h2", {}, "Cost"),
      html(
        "table",
        {},
        row("time", `${inWords(now)} of ${inWords(this.end)}`, "span"),
        row("bubble", percent(bubbleOf(this.spans)), "bubble"),
        row("activations kept at most, by rank", this.spans.map((spans) => Math.max(...aliveOf(spans).map(([, alive]) => alive))).join(" "), "peaks"),
      ),
    );
  }

  sliders() {
    const changed = () => {
      const now = this.moments[this.step];
      this.price();
      const step = this.moments.filter((moment) => moment <= now).length - 1;
      byId("position").max = this.steps;
      goTo(step === -1 ? 0 : step);
    };
    const slider = (name, least, most, value, change) => {
      const shown = html("output", {}, inWords(value));
      const input = html("input", {
        type: "range", min: least, max: most, step: 0.25, value, "aria-label": name,
        input: (event) => {
          shown.textContent = inWords(Number(event.target.value));
          change(Number(event.target.value));
          current.view.changed();
        },
      });
      return html("label", {}, html("span", {}, name), input, shown);
    };
    this.changed = changed;
    const reset = () => {
      times.stages = times.stages.map(() => 1);
      times.message = 0;
      this.side.replaceChildren();
      current.view.changed();
    };
    return html(
      "section",
      { id: "stage-times", class: "sliders" },
      html("h2", {}, "Times, to drag"),
      html("p", { class: "file", style: "margin: 0" }, "A stage's forward pass, and each half of its backward pass."),
      ...times.stages.map((value, stage) => slider(`stage ${stage}`, 0.25, 4, value, (time) => (times.stages[stage] = time))),
      slider("message", 0, 2, times.message, (time) => (times.message = time)),
      html("button", { type: "button", click: reset }, "All equal"),
    );
  }
}

const percent = (share) => `${(100 * share).toFixed(1)}%`;
const inWords = (time) => String(Number(time.toFixed(2)));

// For tests: the bubbles and spans that the page computes.
globalThis.pipelineTimes = async (schedule, size, stageTimes, message) => {
  const spans = simulate((await unpack(`pipelines.${schedule}`))[size].map(parseOrder), stageTimes, message);
  return { bubble: bubbleOf(spans), spans: spans.map((of) => of.map(({ begin, end }) => [begin, end])), alive: spans.map(aliveOf) };
};
