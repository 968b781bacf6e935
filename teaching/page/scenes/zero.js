// The scene of ZeRO: what each rank holds of a model's layers, event by event of a step.

const STAGE_WORDS = {
  0: "Plain data parallelism: every rank has all parameters, gradients and optimizer's states.",
  1: "Stage 1 shards the optimizer's states: gradients are reduced to their owners, and updated parameters gathered.",
  2: "Stage 2 shards the gradients, too: each bucket of them goes to its owners as soon as it is whole.",
  3: "Stage 3 shards the parameters, too: a layer's are gathered before its passes, the next one's while it computes; two stay from pass to pass.",
};
const [SHARD, MOVING, WHOLE] = [1, 2, 3]; // 0 is nothing
const PARTS = ["parameters", "gradients", "optimizer's states"];

addScene({
  name: "zero",
  title: "ZeRO",
  first: { zero_stage: "3", ranks: "4", micro_batches: "1" },
  async open() {
    this.data = Object.fromEntries(await Promise.all(Object.keys(STAGE_WORDS).map(async (stage) => [stage, await unpack(`zero.${stage}`)])));
  },
  controls(choice) {
    const sizes = Object.keys(this.data[0]).map((key) => key.split("x"));
    const options = (index) => [...new Set(sizes.map((size) => size[index]))].map((value) => [value, value]);
    return [
      { name: "zero_stage", label: "ZeRO stage", options: Object.keys(STAGE_WORDS).map((stage) => [stage, stage === "0" ? "0 (none)" : stage]) },
      { name: "ranks", label: "Ranks", options: options(0) },
      { name: "micro_batches", label: "Micro-batches", options: options(1) },
    ];
  },
  async load(choice) {
    return new ZeroView(choice, this.data[choice.zero_stage][`${choice.ranks}x${choice.micro_batches}`]);
  },
});

class ZeroView {
  constructor(choice, events) {
    Object.assign(this, { choice, events, size: Number(choice.ranks), steps: events.length - 1 });
    this.numLayers = events[0][2][0].length;
    this.amounts = events.map(([, , held]) => this.amount(held));
  }

  /** Return what a rank holds, in layers of elements: of parameters, gradients, optimizer's states. */
  amount(held) {
    const share = [0, 1 / this.size, 1, 1];
    return held.map((layers) => layers.reduce((sum, state) => sum + share[state], 0));
  }

  status(step) {
    return `Event ${step} of ${this.steps}: ${this.words(step)}`;
  }

  words(step) {
    const [what, layer] = this.events[step];
    return layer < 0 ? what : `${what}, layer ${layer}`;
  }

  show(step, stage, side) {
    const board = html("div", { class: "scrolled", tabindex: "0", role: "region", "aria-label": "What each rank holds" });
    stage.replaceChildren(html("p", { class: "words" }, html("strong", {}, `${this.words(step)}. `), STAGE_WORDS[this.choice.zero_stage]), board, this.legend(), this.history(step, stage.clientWidth));
    board.append(this.draw(step, stage.clientWidth));
    side.replaceChildren(this.numbers(step), this.list(step));
    const now = side.querySelector("[aria-current]");
    now.parentElement.scrollTop = now.offsetTop - now.parentElement.offsetTop - 80;
  }

  /** Draw a row for each rank, and in it each layer's parameters, gradients and states, by the ranks' chunks. */
  draw(step, width) {
    const { size, numLayers } = this;
    const [, , held] = this.events[step];
    const narrow = width < 600;
    const left = narrow ? 24 : 70;
    const gap = 14;
    const group = Math.max(54, Math.min(240, (width - left - gap * 2) / 3));
    const cell = (group - 4 * (numLayers - 1)) / numLayers / size;
    const lane = Math.max(34, Math.min(80, 380 / size));
    const picture = svg("svg", { id: "zero", width: left + 3 * (group + gap), height: 44 + size * lane, role: "img", "aria-label": `${this.status(step)}` });
    const x = (part, layer, chunk) => left + part * (group + gap) + layer * (cell * size + 4) + chunk * cell;
    PARTS.forEach((name, part) => {
      picture.append(svg("text", { x: x(part, 0, 0), y: 14, "font-size": narrow ? 11 : 14 }, narrow && part === 2 ? "states" : name));
      for (const layer of range(numLayers)) picture.append(svg("text", { class: "soft", x: x(part, layer, 0), y: 32, "font-size": 11 }, narrow ? String(layer) : `layer ${layer}`));
    });
    for (const rank of range(size)) {
      const y = 40 + rank * lane;
      picture.append(svg("text", { x: 0, y: y + lane / 2, "font-size": 14 }, narrow ? String(rank) : `rank ${rank}`));
      held.forEach((layers, part) => layers.forEach((state, layer) => picture.append(...this.chunks(rank, state, part, layer, x, y, cell, lane - 10))));
    }
    return picture;
  }

  chunks(rank, state, part, layer, x, y, width, height) {
    return range(this.size).map((chunk) => {
      const has = state === WHOLE || state === MOVING || (state === SHARD && chunk === rank);
      const isMoving = state === MOVING;
      return svg("rect", {
        x: x(part, layer, chunk) + 0.5, y, width: width - 1, height, rx: 1.5, class: has ? "" : "cell empty",
        fill: has ? colorOf(chunk, this.size) : "none", opacity: isMoving ? 0.55 : 1,
        stroke: isMoving ? "var(--new)" : false, "stroke-width": isMoving ? 2 : false,
        "data-rank": rank, "data-part": part, "data-layer": layer, "data-chunk": chunk, "data-held": has ? (isMoving ? "moving" : "yes") : "no",
      });
    });
  }

  legend() {
    const item = (style, words) => html("li", {}, html("i", { style }), words);
    return html(
      "ul",
      { class: "legend" },
      html("li", {}, "A chunk has the color of the rank that owns it"),
      item(`background: ${colorOf(0, this.size)}; opacity: 0.55; box-shadow: 0 0 0 2px var(--new)`, "under way"),
      item("border: 1px dashed var(--line)", "not held"),
    );
  }

  /** Draw what a rank holds over the step. */
  history(step, width) {
    const [left, height] = [10, 120];
    const most = Math.max(...this.amounts.map((parts) => parts.reduce((a, b) => a + b)));
    const unit = (Math.min(width, 1100) - 2 * left - 34) / this.events.length;
    const bars = this.amounts.flatMap((parts, index) => {
      let y = height;
      return parts.map((amount, part) => {
        const tall = (amount / most) * (height - 8);
        y -= tall;
        return svg("rect", { x: left + index * unit, y, width: Math.max(1, unit - 1), height: tall, fill: `var(${["--forward", "--backward", "--weights"][part]})`, opacity: index === step ? 1 : 0.45 });
      });
    });
    const picture = svg("svg", { width: left * 2 + unit * this.events.length, height: height + 6, role: "img", "aria-label": "What a rank holds, event by event" }, ...bars);
    const item = (name, part) => html("li", {}, html("i", { style: `background: var(${["--forward", "--backward", "--weights"][part]})` }), name);
    return html("section", {}, html("h2", {}, "What a rank holds, event by event"), picture, html("ul", { class: "legend" }, ...PARTS.map(item)));
  }

  numbers(step) {
    const [, , , sent] = this.events[step];
    const total = this.events[this.steps][3];
    const elements = this.elements();
    const row = (name, value, id) => html("tr", {}, html("th", { scope: "row" }, name), html("td", { id }, value));
    const layers = (amount) => `${Number(amount.toFixed(2))} of ${this.numLayers} layers`;
    return html(
      "section",
      {},
      html("h2", {}, "What a rank holds"),
      html("table", {}, ...PARTS.map((name, part) => row(name, layers(this.amounts[step][part]), `held-${part}`)), row("sent so far", `${Number((sent / elements).toFixed(2))} of ${Number((total / elements).toFixed(2))} × the model`, "sent")),
    );
  }

  /** Return the elements of the model, of which a ring's all-gather sends all but the rank's own chunk. */
  elements() {
    const begins = this.events.filter(([what]) => what.endsWith("begins"));
    const each = begins.length ? begins[0][3] / (begins[0][0].startsWith("all-reduce") ? 2 : 1) : 1;
    return ((each * this.size) / (this.size - 1)) * this.numLayers;
  }

  list(step) {
    const item = (_, index) => html("li", { "aria-current": index === step ? "step" : false }, html("button", { type: "button", tabindex: "-1", click: () => goTo(index) }, this.words(index)));
    return html("section", {}, html("h2", {}, "Events of a step"), html("ol", { class: "events", start: "0" }, ...this.events.map(item)));
  }
}
