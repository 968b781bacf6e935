// The scene of the collectives: all ranks' vectors, round by round, as the prover computed them.

const VALUE_BITS = 16; // of a value, below the chunk: the ranks in it
const NOTHING = -1;
const REACHES = ["Get", "Put", "GetReduce"];

let catalog = null;
const priceChoice = { network: "default", length: 2 };

addScene({
  name: "collectives",
  title: "Collectives",
  first: { collective: "all_reduce", algorithm: "ring", ranks: "4", hosts: "1" },
  async open() {
    catalog = await unpack("collectives.catalog");
  },
  controls(choice) {
    const rows = catalog.collectives[choice.collective] || Object.values(catalog.collectives)[0];
    const row = rows[choice.algorithm] || Object.values(rows)[0];
    const hosts = row.hosts[choice.ranks] || [1];
    return [
      { name: "collective", label: "Collective", options: Object.keys(catalog.collectives).map((name) => [name, name]) },
      { name: "algorithm", label: "Algorithm", options: Object.keys(rows).map((name) => [name, name]) },
      { name: "ranks", label: "Ranks", options: Object.keys(row.hosts).map((size) => [size, size]) },
      { name: "hosts", label: "Hosts", options: hosts.map((count) => [String(count), String(count)]) },
    ];
  },
  async load(choice) {
    const row = catalog.collectives[choice.collective][choice.algorithm];
    const data = await unpack(`collectives.${choice.collective}.${choice.algorithm}`);
    const prices = await unpack(`collectives.prices.${choice.collective}`);
    const run = decodeRun(data.runs[`${choice.ranks}x${row.overHosts ? choice.hosts : 1}`]);
    return new CollectiveView(choice, row, run, data.lines, prices[`${choice.ranks}x${choice.hosts}`]);
  },
});

/** Return a run: the vectors before each round and at last, as arrays of values by chunk, and the moves of each round. */
function decodeRun(data) {
  const size = data.start.length;
  const states = [data.start.map((pairs, rank) => decodeVector(pairs, rank, size))];
  const rounds = [];
  const exceptions = new Map(data.values.map(([transfer, ...values]) => [transfer, values]));
  let transfer = 0;
  for (let entry = 0; entry < data.lines.length; entry += size) {
    const round = range(size).map((rank) => {
      const transfers = range(data.counts[entry + rank]).map(() => decodeTransfer(data, transfer++, rank, size, exceptions));
      const barrier = data.barriers[entry + rank] || [];
      return { line: data.lines[entry + rank], transfers, barrier: barrier.map((other) => (other + rank) % size) };
    });
    rounds.push(round);
    states.push(afterRound(states[states.length - 1], round.flatMap(({ transfers }) => transfers)));
  }
  return { size, states, rounds, costs: data.costs, goal: data.goal.map((pairs, rank) => decodeVector(pairs, rank, size)) };
}

function decodeVector(pairs, rank, size) {
  const vector = [];
  for (let index = 0; index < pairs.length; index += 2) {
    const chunk = fromRank(pairs[index], rank, size);
    vector[chunk] = decodeValue(pairs[index + 1], chunk, rank, size);
  }
  return vector;
}

/** Return the chunk that is `number` when it is counted from `rank`, round the p chunks. */
function fromRank(number, rank, size) {
  return number - (number % size) + ((number + rank) % size);
}

function decodeValue(number, chunk, rank, size) {
  const turned = number & ((1 << VALUE_BITS) - 1);
  const mask = ((turned << rank) | (turned >> (size - rank))) & ((1 << size) - 1);
  return ((((number >> VALUE_BITS) + chunk) % size) << VALUE_BITS) | mask;
}

function decodeTransfer(data, index, rank, size, exceptions) {
  const dest = (data.dests[index] + rank) % size;
  const here = fromRank(data.here[index], rank, size);
  const values = exceptions.get(index);
  return {
    kind: catalog.kinds[data.kinds[index]],
    sources: [data.sources[index]].flat().map((source) => (source + rank) % size),
    dest,
    theirs: fromRank(data.theirs[index], rank, size),
    here,
    length: data.lengths[index],
    values: values && values.map((value, nth) => decodeValue(value, here + nth, dest, size)),
  };
}

/** Return the vectors after a round.  Missing values are those of the sources, or their sum with the old value. */
function afterRound(before, transfers) {
  const vectors = before.map((vector) => vector.slice());
  for (const { kind, sources, dest, theirs, here, length, values } of transfers) {
    for (let nth = 0; nth < length; nth += 1) {
      const terms = sources.map((source) => before[source][theirs + nth]);
      if (kind === "RecvReduce") terms.push(before[dest][here + nth]);
      vectors[dest][here + nth] = values ? values[nth] : terms.reduce((sum, term) => sum | term);
    }
  }
  return vectors;
}

const chunkOf = (value) => value >> VALUE_BITS;
const ranksOf = (value, size) => range(size).filter((rank) => (value >> rank) & 1);

/** Return a value in words: the chunk of the input, and the ranks whose contributions it is. */
function valueInWords(value, size) {
  return value === undefined ? "nothing" : `chunk ${chunkOf(value)} of ${ranksOf(value, size).map((rank) => `r${rank}`).join(" + ")}`;
}

function runInWords(first, length) {
  return length > 1 ? `[${first}-${first + length - 1}]` : length ? `[${first}]` : "[]";
}

function ranksInWords(ranks) {
  const whole = ranks.length > 1 && ranks.every((rank, index) => rank === ranks[0] + index);
  return whole ? `${ranks[0]}-${ranks[ranks.length - 1]}` : ranks.join(",");
}

/** Return a round as `render` of the schedules draws it: source->dest [chunk], + where it is reduced. */
function roundInWords(round) {
  const signs = { Recv: "->", RecvReduce: "->", Get: "=>", GetReduce: "=>", Put: "~>" };
  const words = round.flatMap(({ transfers, barrier }) => [
    ...transfers.filter((each) => !isOwn(each)).map(({ kind, sources, dest, theirs, here, length }) => {
      const [there, own] = [runInWords(theirs, length), runInWords(here, length)];
      if (kind === "Copy") return `${dest}: ${there}>${own}`;
      return `${ranksInWords(sources)}${signs[kind]}${dest} ${there === own ? own : `${there}>${own}`}${kind.endsWith("Reduce") ? "+" : ""}`;
    }),
    ...(barrier.length ? [`(${ranksInWords(barrier)})`] : []),
  ]);
  return [...new Set(words)];
}

/** Return whether a transfer only describes the effect of a barrier. */
const isOwn = ({ kind, theirs, here }) => kind === "Copy" && theirs === here;

class CollectiveView {
  constructor(choice, row, run, lines, prices) {
    Object.assign(this, { choice, row, run, lines, prices, shownRank: null });
    this.steps = run.rounds.length;
    const chunks = [...run.states.flat(), ...run.goal].map((vector) => vector.length);
    this.numChunks = Math.max(1, ...chunks);
    this.reduces = run.states.some((ranks) => ranks.some((vector) => vector.some((value) => value & (value - 1) & 0xffff)));
    const isMoved = (vector) => vector.some((value, chunk) => chunkOf(value) !== chunk % run.size);
    this.moves = run.states.some((ranks) => ranks.some(isMoved)); // chunks to positions of other chunks
    this.apart = run.goal.some((vector) => vector.length > run.size);
    this.hosts = hostsOf(run.size, Number(choice.hosts));
  }

  status(step) {
    const { steps } = this;
    return step === steps ? `All ${steps} rounds done` : `${step} of ${steps} rounds done`;
  }

  show(step, stage, side) {
    Object.assign(this, { step, stage, side });
    const scroll = stage.querySelector(".scrolled") ? stage.querySelector(".scrolled").scrollLeft : 0;
    const board = html("div", { class: "scrolled", tabindex: "0", role: "region", "aria-label": "Vectors" });
    stage.replaceChildren(this.words(), board, this.legend(), this.priceList());
    board.append(new Board(this, stage.clientWidth, window.innerHeight).draw());
    board.scrollLeft = scroll;
    const open = [...side.querySelectorAll("details")].filter((each) => each.open).map((each) => each.dataset.name);
    side.replaceChildren(this.costs(), this.source(open));
  }

  again() {
    this.show(this.step, this.stage, this.side);
  }

  words() {
    const needs = this.row.needs ? ` Needs ${this.row.needs}.` : "";
    return html("p", { class: "words" }, html("strong", {}, `${this.choice.collective}, ${this.choice.algorithm}. `), `${this.row.words}${needs}`);
  }

  legend() {
    const item = (mark, text) => html("li", {}, mark, text);
    const line = (attributes) =>
      svg("svg", { width: 28, height: 10, "aria-hidden": "true" }, svg("path", { class: "arrow", "stroke-width": 2, d: "M1 5H27", stroke: "currentColor", pathLength: 1, ...attributes }));
    const cell = (name) =>
      svg("svg", { width: 16, height: 14, "aria-hidden": "true" }, svg("rect", { class: name, x: 2, y: 1, width: 12, height: 12 }));
    const kinds = new Set(this.run.rounds.flat().flatMap(({ transfers }) => transfers.map(({ kind }) => kind)));
    const barrier = this.run.rounds.flat().some((each) => each.barrier.length);
    return html(
      "ul",
      { class: "legend" },
      item("", this.reduces ? "A stripe for each rank whose contribution is in a chunk" : "A chunk has the color of the rank that it is from"),
      this.moves ? item("", "numbers: the chunk of that rank's vector") : "",
      item(cell("cell empty"), "nothing there"),
      item(cell("cell new"), "written in the last round"),
      kinds.has("Recv") || kinds.has("RecvReduce") ? item(line({}), "message under way, + where it is reduced") : "",
      REACHES.some((kind) => kinds.has(kind)) ? item(line({ class: "arrow get", pathLength: false }), "read or written in another rank's memory") : "",
      barrier ? item(html("i", { style: "background: var(--accent)" }), "barrier") : "",
      item("", "Press a rank's name to see its moves only"),
    );
  }

  costs() {
    const { run, step } = this;
    const [sent, reached, reduced] = step ? run.costs[step - 1] : [0, 0, 0];
    const [allSent, allReached, allReduced] = run.costs.length ? run.costs[run.costs.length - 1] : [0, 0, 0];
    const bytes = (chunks) => bytesInWords((chunks * catalog.lengths[priceChoice.length]) / run.size);
    const row = (name, now, all, unit) =>
      html("tr", {}, html("th", { scope: "row" }, name), html("td", { "data-cost": name }, `${now} of ${all}`), html("td", {}, unit));
    const round = step < this.steps ? run.rounds[step] : null;
    return html(
      "section",
      {},
      html("h2", {}, round ? `Round ${step}, under way` : "The end"),
      html("pre", { class: "moves", tabindex: "0", "aria-label": "Moves of this round" }, round ? roundInWords(round).join("   ") || "nothing moves" : this.ending()),
      html("h2", { style: "margin-top: 0.75rem" }, "Cost so far"),
      html(
        "table",
        {},
        row("rounds", step, this.steps, ""),
        row("chunks sent", sent, allSent, allSent ? bytes(sent) : ""),
        allReached ? row("chunks of others' memory", reached, allReached, bytes(reached)) : "",
        row("chunks reduced", reduced, allReduced, allReduced ? bytes(reduced) : ""),
      ),
      html("p", { class: "file", style: "margin: 0.3rem 0 0" }, `Chunks of the busiest rank; a chunk is 1/${run.size} of the vector.`),
    );
  }

  ending() {
    return `Every rank holds what ${this.choice.collective} promises: proved for ${this.run.size} rank${this.run.size > 1 ? "s" : ""}.`;
  }

  /** List the predicted time of each algorithm on a network. */
  priceList() {
    const network = Object.keys(catalog.networks).indexOf(priceChoice.network);
    const ofBarrier = this.choice.collective === "barrier";
    const times = Object.entries(this.prices).map(([name, table]) => [name, table[network][ofBarrier ? 0 : priceChoice.length]]);
    times.sort((a, b) => a[1] - b[1]);
    const most = Math.max(...times.map(([, us]) => us)) || 1;
    const change = (name) => (value) => {
      priceChoice[name] = name === "length" ? Number(value) : value;
      this.again();
      this.stage.querySelector(`select[name=${name}]`).focus();
    };
    const networks = Object.entries(catalog.networks).map(([name, words]) => [name, `${name}: ${words}`]);
    const lengths = catalog.lengths.map((length, index) => [String(index), bytesInWords(length)]);
    return html(
      "section",
      {},
      html("h2", {}, "Predicted time"),
      html(
        "div",
        { class: "choices" },
        labelledSelect("network", "Network", networks, priceChoice.network, change("network")),
        ofBarrier ? "" : labelledSelect("length", "Vector", lengths, String(priceChoice.length), change("length")),
      ),
      html(
        "ol",
        { class: "prices" },
        ...times.map(([name, us]) =>
          html(
            "li",
            {},
            html(
              "button",
              {
                type: "button",
                "aria-current": String(name === this.choice.algorithm),
                style: `--part: ${Math.max(0.5, (100 * us) / most)}%`,
                click: () => choose(current.scene, { algorithm: name }),
              },
              html("span", {}, name),
              html("span", {}, secondsInWords(us)),
            ),
          ),
        ),
      ),
    );
  }

  /** Show the functions that yield the current round, with the ranks' lines. */
  source(open) {
    const round = this.run.rounds[Math.min(this.step, this.steps - 1)] || [];
    const busy = busyRanks(round);
    const ranks = busy.size ? [...busy] : range(round.length);
    const linesOf = new Map([[this.row.function, new Map()]]);
    const add = (number, line, rank) => {
      if (!linesOf.has(number)) linesOf.set(number, new Map());
      const lines = linesOf.get(number);
      lines.set(line, [...(lines.get(line) || []), rank]);
    };
    const isOver = this.step === this.steps;
    for (const rank of ranks) for (const [number, line] of this.lines[round[rank].line]) add(number, line, rank);
    const blocks = [...linesOf].map(([number, lines]) => this.block(catalog.functions[number], isOver ? new Map() : lines, open));
    return html("section", { id: "source" }, html("h2", {}, "The lines that yield this round"), ...blocks);
  }

  block({ name, file, lines }, now, open) {
    const item = ([number, text]) => {
      const ranks = [...new Set(now.get(number) || [])];
      const who = ranks.length && ranks.length < this.run.size ? html("em", {}, `rank${ranks.length > 1 ? "s" : ""} ${ranksInWords(ranks)}`) : "";
      return html("li", ranks.length ? { class: "now", "data-line": number } : {}, html("span", {}, String(number)), text, who);
    };
    const code = html("div", { class: "source", tabindex: "0", role: "region", "aria-label": `Source of ${name}` }, html("ol", {}, ...lines.map(item)));
    const isPlumbing = file.endsWith("groups.py") || file.endsWith("moves.py");
    const title = html("span", { class: "file" }, `${name}, ${file}`);
    const isOpen = open.length ? open.includes(name) : !isPlumbing;
    return html("details", { open: isOpen || !isPlumbing, "data-name": name }, html("summary", {}, title), code);
  }
}

/** Return the ranks that move something in a round, or wait at a barrier. */
function busyRanks(round) {
  const busy = new Set();
  round.forEach(({ transfers, barrier }, rank) => {
    if (transfers.length || barrier.length) busy.add(rank);
    for (const { kind, sources } of transfers) if (kind.startsWith("Recv")) busy.add(sources[0]);
  });
  return new Set([...busy].sort((a, b) => a - b));
}

/** Return the ranks of each host: consecutive, the first hosts with one more if necessary. */
function hostsOf(size, count) {
  const [length, extra] = [Math.floor(size / count), size % count];
  return range(count).map((host) => {
    const first = host * length + Math.min(host, extra);
    return range(length + (host < extra ? 1 : 0)).map((nth) => first + nth);
  });
}

/** The picture: a row for each rank, a column for each chunk, arrows between them. */
class Board {
  constructor(view, width, windowHeight) {
    const { size } = view.run;
    const names = width < 600 ? 46 : 84;
    const gaps = (Math.min(Math.ceil(view.numChunks / size), 3) - 1) * 18;
    const left = names + (view.hosts.length > 1 ? 14 : 0);
    const cell = Math.max(12, Math.min(150, (width - left - gaps - 28) / view.numChunks));
    const rowHeight = Math.max(38, Math.min(110, (windowHeight - 430) / size));
    Object.assign(this, { view, size, left, cell, names, top: 36, patterns: new Map() });
    this.height = rowHeight * (size > 8 ? 0.66 : 0.55);
    this.gap = rowHeight - this.height;
    this.width = Math.max(width, this.x(view.numChunks - 1) + cell + 24);
    this.bottom = this.y(size - 1) + this.height + 10;
  }

  x(chunk) {
    return this.left + chunk * this.cell + Math.min(2, Math.floor(chunk / this.size)) * 18;
  }

  y(rank) {
    const host = this.view.hosts.findIndex((ranks) => ranks.includes(rank));
    return this.top + rank * (this.height + this.gap) + (this.view.hosts.length > 1 ? host * 12 : 0);
  }

  draw() {
    const { view } = this;
    const { run, step } = view;
    const round = run.rounds[step] || [];
    const cells = range(this.size).map((rank) => this.row(rank));
    const arrows = step < view.steps ? this.arrows(round) : [];
    const label = `${view.status(step)}. ${run.size} ranks, ${view.numChunks} chunks each.`;
    const picture = svg("svg", {
      id: "board", width: this.width, height: this.bottom, viewBox: `0 0 ${this.width} ${this.bottom}`,
      role: "group", "aria-label": label,
    });
    picture.append(svg("defs", {}, ...this.patterns.values()), ...this.hosts(), ...this.heads(), ...cells.flat(), ...this.barriers(round), ...arrows);
    return picture;
  }

  heads() {
    const { view, size } = this;
    const isBarrier = view.choice.collective === "barrier";
    const titles = isBarrier ? ["has heard of"] : ["vector", view.apart ? "result" : "working space", "working space"];
    const regions = range(Math.min(titles.length, Math.ceil(view.numChunks / size)));
    const named = regions.filter((region) => region === 0 || size * this.cell > 90 || (view.apart && region === 2 && size * this.cell > 60));
    const text = (x, y, font, words, anchor) => svg("text", { class: "soft", x, y, "font-size": font, "text-anchor": anchor }, words);
    const numbers = isBarrier || this.cell < 16 ? [] : range(view.numChunks);
    return [
      ...named.map((region) => text(this.x(region * size), 14, 13, titles[region], "start")),
      ...numbers.map((chunk) => text(this.x(chunk) + this.cell / 2, 31, 11, String(chunk), "middle")),
    ];
  }

  hosts() {
    if (this.view.hosts.length < 2) return [];
    return this.view.hosts.map((ranks, host) => {
      const [top, bottom] = [this.y(ranks[0]) - 4, this.y(ranks[ranks.length - 1]) + this.height + 4];
      const d = `M8 ${top}H3V${bottom}H8`;
      return svg("g", {}, svg("title", {}, `host ${host}`), svg("path", { class: "host", d }));
    });
  }

  row(rank) {
    const { view, size } = this;
    const { run, step } = view;
    const [vector, before] = [run.states[step][rank], step ? run.states[step - 1][rank] : run.states[step][rank]];
    const written = new Set(step ? run.rounds[step - 1].flatMap(({ transfers }) => transfers).flatMap((each) => (each.dest === rank ? range(each.length).map((nth) => each.here + nth) : [])) : []);
    const isDone = run.goal[rank].every((value, chunk) => value === undefined || vector[chunk] === value);
    const y = this.y(rank);
    const pressed = view.shownRank === rank;
    const press = () => {
      view.shownRank = pressed ? null : rank;
      view.again();
      view.stage.querySelectorAll(".rank-name")[rank].focus();
    };
    const hear = (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        event.stopPropagation();
        press();
      }
    };
    const left = this.left - this.names;
    const name = svg(
      "g",
      { class: "rank-name", tabindex: "0", role: "button", "aria-pressed": String(pressed), "aria-label": `Moves of rank ${rank} only${isDone ? "; it has its result" : ""}`, click: press, keydown: hear },
      svg("rect", { x: left, y, width: this.names - 6, height: this.height, fill: "transparent" }),
      svg("rect", { x: left, y: y + this.height / 2 - 7, width: 14, height: 14, rx: 3, fill: colorOf(rank, size) }),
      svg("text", { x: left + 19, y: y + this.height / 2 + 5, "font-size": 14 }, this.names > 50 ? `rank ${rank}` : String(rank)),
      isDone ? svg("text", { class: "done", x: left + this.names - 8, y: y + this.height / 2 + 5, "font-size": 13, "text-anchor": "end" }, "✓") : "",
    );
    const cells = range(view.numChunks).map((chunk) => this.drawCell(rank, chunk, vector[chunk], written.has(chunk) && before !== vector));
    return [name, ...cells];
  }

  drawCell(rank, chunk, value, isNew) {
    const { size, cell, height } = this;
    const [x, y] = [this.x(chunk), this.y(rank)];
    const text = this.view.moves && cell >= 16 && value !== undefined;
    const strip = text ? 15 : 2;
    const group = svg(
      "g",
      {
        "data-rank": rank, "data-chunk": chunk,
        "data-value": value === undefined ? "" : `${chunkOf(value)}:${ranksOf(value, size).join(",")}`,
      },
      svg("title", {}, `rank ${rank}, [${chunk}]: ${valueInWords(value, size)}`),
      svg("rect", { class: `cell${value === undefined ? " empty" : ""}${isNew ? " new" : ""}`, x: x + 1.5, y, width: cell - 3, height, rx: 3 }),
    );
    if (value !== undefined) {
      group.append(svg("rect", { x: x + 3, y: y + strip, width: cell - 6, height: height - strip - 2, fill: this.fill(value), rx: 1.5 }));
      if (text) group.append(svg("text", { x: x + cell / 2, y: y + 12, "font-size": 11, "text-anchor": "middle" }, String(chunkOf(value))));
    }
    return group;
  }

  /** Return the fill of a value: a stripe in its place for each rank, or the color of the one it came from. */
  fill(value) {
    const ranks = ranksOf(value, this.size);
    if (!this.view.reduces && ranks.length === 1) return colorOf(ranks[0], this.size);
    const id = `mask-${value & 0xffff}`;
    if (!this.patterns.has(id)) {
      const stops = ranks.flatMap((rank) =>
        [["transparent", rank], [colorOf(rank, this.size), rank], [colorOf(rank, this.size), rank + 1], ["transparent", rank + 1]].map(([color, offset]) =>
          svg("stop", { offset: offset / this.size, "stop-color": color }),
        ),
      );
      this.patterns.set(id, svg("linearGradient", { id }, ...stops));
    }
    return `url(#${id})`;
  }

  barriers(round) {
    const seen = new Set();
    return round.flatMap(({ barrier }) => {
      if (!barrier.length || seen.has(barrier.join())) return [];
      seen.add(barrier.join());
      const [top, bottom] = [this.y(barrier[0]), this.y(barrier[barrier.length - 1]) + this.height];
      const x = this.left - 8;
      return [svg("rect", { class: "barrier", x, y: top, width: 5, height: bottom - top, rx: 2 }, svg("title", {}, `barrier of ranks ${ranksInWords(barrier)}`))];
    });
  }

  arrows(round) {
    const transfers = round.flatMap(({ transfers }) => transfers).filter((each) => !isOwn(each));
    const ends = transfers.flatMap((each) => each.sources.map((source) => [source, each])).filter(([source, { dest, kind }]) => source !== dest || kind === "Copy");
    const many = ends.length > 40;
    return ends.map(([source, each]) => this.arrow(source, each, many));
  }

  arrow(source, { kind, dest, theirs, here, length }, many) {
    const { view } = this;
    const [count, color] = [Math.max(1, length), colorOf(source, this.size)];
    const middle = (first) => (this.x(first) + this.x(first + count - 1) + this.cell) / 2;
    const [x1, x2] = [middle(theirs), middle(here)];
    const down = dest > source;
    const y1 = source === dest ? this.y(source) + 2 : this.y(source) + (down ? this.height : 0);
    const y2 = source === dest ? this.y(dest) + 2 : this.y(dest) + (down ? 0 : this.height);
    const far = Math.abs(dest - source) > 1 && Math.abs(x2 - x1) < this.cell;
    const side = far ? Math.min(this.cell * 0.75, 14 + 6 * Math.abs(dest - source)) * (down ? 1 : -1) : down ? 4 : -4;
    const bow = source === dest ? [0, -26] : [side, 0];
    const d = `M${x1 + (far ? 0 : side)} ${y1}C${x1 + bow[0] * 1.4} ${y1 + bow[1] + (y2 - y1) * 0.3} ${x2 + bow[0] * 1.4} ${y2 + bow[1] - (y2 - y1) * 0.3} ${x2 + (far ? 0 : side)} ${y2}`;
    const isAside = view.shownRank !== null && ![source, dest].includes(view.shownRank);
    const name = `arrow${kind.startsWith("Recv") ? "" : " get"}${many ? " many" : ""}${isAside ? " aside" : ""}`;
    const tip = [x2 + (far ? 0 : side), y2];
    const group = svg("g", { class: isAside ? "aside" : "", "data-arrow": `${source}>${dest}` }, svg("path", { class: name, d, stroke: color, pathLength: kind.startsWith("Recv") ? 1 : false }));
    if (isAside) return group;
    group.append(kind.endsWith("Reduce") && !many ? this.plus(tip, color) : this.head(tip, source === dest || down, color));
    return group;
  }

  head([x, y], down, color) {
    const sign = down ? -1 : 1;
    return svg("path", { d: `M${x} ${y}l-4.5 ${sign * 8}h9z`, fill: color });
  }

  plus([x, y], color) {
    return svg("g", {}, svg("circle", { class: "sign", cx: x, cy: y, r: 6.5, stroke: color }), svg("path", { d: `M${x - 3.5} ${y}h7M${x} ${y - 3.5}v7`, stroke: "currentColor", "stroke-width": 1.6 }));
  }
}

// For tests: every state of a run as text, rank by rank and chunk by chunk.
globalThis.collectiveStates = async (collective, algorithm) => {
  catalog = await unpack("collectives.catalog");
  const { runs } = await unpack(`collectives.${collective}.${algorithm}`);
  const text = (vector) => Array.from(vector, (value) => (value === undefined ? NOTHING : value)).join(" ");
  return Object.fromEntries(Object.entries(runs).map(([key, data]) => [key, decodeRun(data).states.map((ranks) => ranks.map(text).join(";"))]));
};
