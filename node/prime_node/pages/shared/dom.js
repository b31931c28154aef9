/* Elements, texts and numbers. Texts become text nodes; nothing here parses markup. */
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(3).filter(child => child != null && child !== false));
  return node;
}
export const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/* Names come from strangers: control and direction characters are dropped, runs of marks and the length are bounded. */
export const clean = (text, most = 48) => String(text ?? "").replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, "").replace(/\p{M}{3,}/gu, "").trim().slice(0, most);
export const named = text => el("bdi", {}, clean(text) || "(no name)");

const whole = new Intl.NumberFormat("en");
export const count = n => whole.format(n ?? 0);
export const plural = (n, one, many = one + "s") => `${count(n)} ${n === 1 ? one : many}`;
export function short(n) {
  if (n == null) return "–";
  if (Math.abs(n) < 1e4) return whole.format(Math.round(n));
  const [size, unit] = n < 1e6 ? [1e3, "k"] : n < 1e9 ? [1e6, "M"] : [1e9, "G"];
  return `${(n / size).toPrecision(3)} ${unit}`;
}
export function bytes(n) {
  if (n == null) return "–";
  const [size, unit] = n < 1e3 ? [1, "B"] : n < 1e6 ? [1e3, "kB"] : n < 1e9 ? [1e6, "MB"] : [1e9, "GB"];
  return `${(n / size).toFixed(size === 1 ? 0 : 1)} ${unit}`;
}
export function time(s) {
  if (s == null || !Number.isFinite(s)) return "–";
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 100) return `${s < 10 ? s.toFixed(1) : Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  return s < 172800 ? `${(s / 3600).toFixed(1)} h` : `${(s / 86400).toFixed(1)} days`;
}
export const share = (x, digits = 0) => x == null || !Number.isFinite(x) ? "–" : `${(100 * x).toFixed(digits)} %`;
export const words = text => clean(text, 80).replaceAll("_", " ");
export const mean = values => { const known = values.filter(v => v != null); return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null; };

export function card(id, title, note, ...body) {
  return el("section", {class: "card pad", "aria-labelledby": id},
    el("div", {class: "head"}, el("h2", {id}, title), note && el("p", {}, note)), body);
}
export const tile = (name, big, fine, more) => el("div", {class: "card pad tile"}, el("dt", {}, name), el("dd", {}, el("div", {class: "big"}, big), more, el("div", {class: "fine"}, fine)));
export const facts = rows => el("dl", {class: "facts"}, rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
export const table = (label, heads, rows) => el("div", {class: "wide", tabindex: 0, role: "group", "aria-label": label}, el("table", {class: "plain"},
  el("thead", {}, el("tr", {}, heads.map((name, i) => el("th", {class: i ? "n" : "", scope: "col"}, name)))),
  el("tbody", {}, rows.map(row => el("tr", {}, row.map((cell, i) => el("td", {class: i ? "n" : ""}, cell)))))));
export function command(text) {
  const said = el("span", {class: "sr", role: "status"});
  const button = el("button", {type: "button", onclick: async () => {
    try { await navigator.clipboard.writeText(text); } catch { getSelection().selectAllChildren(code); return; }
    button.textContent = "Copied"; said.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; said.textContent = ""; }, 1600);
  }}, "Copy");
  const code = el("code", {class: "mono", tabindex: 0, role: "group", "aria-label": "Command"}, text);
  return el("div", {class: "cmd"}, code, button, said);
}
