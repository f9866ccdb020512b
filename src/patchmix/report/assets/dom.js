// Elements from plain values. Text always goes in as text nodes: a name that looks like code stays a name.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const make = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
const draw = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

function choice(label, options, chosen, onchange) {
  const list = make("select", {}, ...options.map(([value, text]) => make("option", { value, selected: value === chosen }, text)));
  list.addEventListener("change", () => onchange(list.value));
  return make("label", {}, label, list);
}

// 4 significant digits, without the noise of 0.30000000000000004 or of 12 zeros.
function formatted(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

// About `count` round numbers that cover low … high.
function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
  const places = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) places.push(Number((i * step).toPrecision(12)));
  return places;
}
