// The scene of ring attention: keys and values go round, and each rank attends to what it holds.

const ORDER_WORDS = {
  zigzag: "zigzag: each rank has a chunk from the beginning and one from the end; all have as much to do",
  striped: "striped: each rank has every p-th token",
  contiguous: "contiguous: each rank has one chunk; the last has most to do",
};
const STEP_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz";

addScene({
  name: "attention",
  title: "Ring attention",
  first: { order: "zigzag", ranks: "4" },
  async open() {
    this.data = Object.fromEntries(await Promise.all(Object.keys(ORDER_WORDS).map(async (order) => [order, await unpack(`attention.${order}`)])));
  },
  controls(choice) {
    return [
      { name: "order", label: "Order of tokens", options: Object.keys(ORDER_WORDS).map((order) => [order, order]) },
      { name: "ranks", label: "Ranks", options: Object.keys(this.data.zigzag).map((size) => [size, size]) },
    ];
  },
  async load(choice) {
    return new AttentionView(choice, this.data[choice.order][choice.ranks]);
  },
});

class AttentionView {
  constructor(choice, { owners, sources, steps }) {
    Object.assign(this, { choice, owners, sources, size: sources.length, steps: sources.length });
    this.attended = steps.map((row) => [...row].map((digit) => STEP_DIGITS.indexOf(digit)));
  }

  status(step) {
    return step === this.steps ? "All done: every query has met the keys up to its own place" : `Step ${step} of ${this.steps} under way`;
  }

  show(step, stage, side) {
    const board = html("div", { class: "scrolled", tabindex: "0", role: "region", "aria-label": "Queries and keys" });
    stage.replaceChildren(html("p", { class: "words" }, html("strong", {}, "Ring attention. "), `${ORDER_WORDS[this.choice.order]}.`), board, this.legend());
    board.append(this.matrix(step, stage.clientWidth));
    side.replaceChildren(this.ring(step), this.work(step));
  }

  /** Draw which queries meet which keys: those of this step, those before, and those to come. */
  matrix(step, width) {
    const { attended, owners, size } = this;
    const count = owners.length;
    const left = 46;
    const cell = Math.max(5, Math.min(34, (Math.min(width, Math.max(420, window.innerHeight - 280)) - left - 8) / count));
    const picture = svg("svg", { id: "matrix", width: left + count * cell + 4, height: left + count * cell + 4, role: "img", "aria-label": `${this.status(step)}: ${count} queries by ${count} keys` });
    const offset = (index) => left + index * cell;
    const text = (x, y, words, turn) => svg("text", { class: "soft", x, y, "font-size": 13, transform: turn ? `rotate(-90 ${x} ${y})` : false }, words);
    picture.append(text(offset(0), 14, "keys, by their positions in the sequence"), text(14, offset(count) - 4, "queries", true));
    owners.forEach((owner, token) => {
      const mark = { fill: colorOf(owner, size), width: cell - 1, height: 12 };
      picture.append(svg("rect", { ...mark, x: offset(token), y: left - 16 }), svg("rect", { ...mark, x: left - 16, y: offset(token), width: 12, height: cell - 1 }));
    });
    attended.forEach((row, query) =>
      row.forEach((when, key) => {
        if (when < 0) return;
        const state = when < step ? "over" : when === step ? "now" : "ahead";
        const fill = state === "ahead" ? "var(--cell)" : colorOf(owners[query], size);
        picture.append(
          svg("rect", { x: offset(key), y: offset(query), width: cell - 1, height: cell - 1, fill, opacity: state === "over" ? 0.4 : 1, stroke: state === "now" ? "var(--ink)" : "none", "stroke-width": cell > 8 ? 1.5 : 0.7, "data-state": state }),
        );
      }),
    );
    return picture;
  }

  legend() {
    const item = (style, words) => html("li", {}, html("i", { style }), words);
    const color = colorOf(0, this.size);
    return html(
      "ul",
      { class: "legend" },
      html("li", {}, "The color is that of the rank of the query, which computes"),
      item(`background: ${color}; box-shadow: 0 0 0 2px var(--ink)`, "now"),
      item(`background: ${color}; opacity: 0.4`, "done"),
      item("background: var(--cell)", "to come"),
    );
  }

  /** Show whose keys and values each rank holds. */
  ring(step) {
    const { size, sources } = this;
    const here = Math.min(step, size - 1);
    const block = (rank) => html("span", { class: "block" }, html("i", { style: `background: ${colorOf(rank, size)}` }), `rank ${rank}`);
    const rows = range(size).map((rank) =>
      html(
        "tr",
        { "data-rank": rank, "data-source": sources[rank][here] },
        html("th", { scope: "row" }, block(rank)),
        html("td", {}, block(sources[rank][here])),
        html("td", {}, step < size - 1 ? `to rank ${(rank + 1) % size}` : ""),
      ),
    );
    const head = html("tr", {}, ...["queries of", "keys, values of", "under way"].map((words) => html("th", { scope: "col" }, words)));
    return html("section", {}, html("h2", {}, "What each rank holds"), html("table", {}, head, ...rows));
  }

  /** Show how many pairs each rank attends to in this step. */
  work(step) {
    const { size, attended, owners } = this;
    const counts = range(size).map(() => 0);
    attended.forEach((row, query) => row.forEach((when) => (counts[owners[query]] += when === step)));
    const most = (owners.length / size) ** 2; // if all of its queries attend to all keys of another rank
    const bars = counts.map((count, rank) =>
      html(
        "tr",
        {},
        html("th", { scope: "row" }, `rank ${rank}`),
        html("td", {}, html("div", { class: "amount", style: `width: ${(100 * count) / most}%; background: ${colorOf(rank, size)}` })),
        html("td", { "data-work": rank }, String(count)),
      ),
    );
    return html("section", {}, html("h2", {}, "Pairs of a query and a key in this step"), html("table", { class: "amounts" }, ...bars));
  }
}
