/* What the pages have in common: the mark, dark and light colours, and parts that are drawn again only when their data change. */
import {el, svg} from "/page/{digest}-dom.js";

export const stored = (name, value) => { try { return value === undefined ? localStorage.getItem(name) : localStorage.setItem(name, value); } catch { return null; } };
export const mark = () => svg("svg", {class: "mark", viewBox: "0 0 32 32", "aria-hidden": "true"}, svg("rect", {width: 32, height: 32, rx: 8, fill: "#3156d4"}), svg("path", {d: "M7 23 13 14l5 5 7-11", fill: "none", stroke: "#fff", "stroke-width": 3.4, "stroke-linecap": "round", "stroke-linejoin": "round"}));

const line = d => svg("path", {d, fill: "none", stroke: "currentColor", "stroke-width": 2, "stroke-linecap": "round", "stroke-linejoin": "round"});
const isDark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
function paint(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  themes.setAttribute("aria-label", isDark() ? "Light colours" : "Dark colours");
  themes.replaceChildren(svg("svg", {viewBox: "0 0 24 24", "aria-hidden": "true"}, isDark() ? [svg("circle", {cx: 12, cy: 12, r: 4.5, fill: "none", stroke: "currentColor", "stroke-width": 2}), line("M12 2v2.5M12 19.5V22M2 12h2.5M19.5 12H22M4.9 4.9l1.8 1.8M17.3 17.3l1.8 1.8M4.9 19.1l1.8-1.8M17.3 6.7l1.8-1.8")] : line("M20.5 14.2A8.5 8.5 0 0 1 9.8 3.5a8.5 8.5 0 1 0 10.7 10.7z")));
}
export const themes = el("button", {class: "icon", type: "button", onclick: () => { const next = isDark() ? "light" : "dark"; stored("theme", next); paint(next); }});
paint(stored("theme"));

/* parts: {name: [signature, make]}, functions of the document. layout: rows [class, ...rows], or [name] of a part. */
export function arranged(parts, layout) {
  const slots = {}, known = {};
  const build = ([name, ...inner]) => inner.length ? el("div", {class: name}, inner.map(build)) : slots[name] = el("div", {class: "slot"});
  return {root: el("div", {class: "view"}, layout.map(build)), update(doc) {
    for (const name in slots) {
      const [signature, make] = parts[name], now = JSON.stringify(signature(doc) ?? null);
      if (known[name] !== now) { known[name] = now; slots[name].replaceChildren(...make(doc)); }
    }
  }};
}
