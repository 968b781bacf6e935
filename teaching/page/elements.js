// Elements, and numbers in words.

/** Return an HTML element. */
function html(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Return an SVG element. */
function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== false && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== ""));
  return element;
}

/** Return a select with its label. */
function labelledSelect(name, label, options, value, change) {
  const choices = options.map(([option, text]) => html("option", { value: option, selected: option === value }, text));
  return html("label", {}, label, html("select", { name, change: (event) => change(event.target.value) }, ...choices));
}

/** Return numbers from 0. */
function range(length) {
  return Array.from({ length }, (_, index) => index);
}

/** Return a color for one of `count` ranks; each second one is darker, so that neighbours differ. */
function colorOf(index, count) {
  const lightness = count > 8 ? [0.74, 0.58][index % 2] : 0.68;
  return `oklch(${lightness} 0.15 ${Math.round((index * 360) / count + 25) % 360})`;
}

function secondsInWords(us) {
  const [number, unit] = us >= 1e6 ? [us / 1e6, "s"] : us >= 1e3 ? [us / 1e3, "ms"] : [us, "µs"];
  return `${Number(number.toPrecision(3))} ${unit}`;
}

function bytesInWords(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (bytes >= 1024 && power < units.length - 1) {
    bytes /= 1024;
    power += 1;
  }
  return `${Number(bytes.toPrecision(3))} ${units[power]}`;
}
