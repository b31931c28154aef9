/* Charts as SVG, drawn again when their data or their width change. */
import {el, svg, count} from "/page/{digest}-dom.js";

function ticks(low, high, most, nice) {
  const rough = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = nice ? nice.find(n => n >= rough) ?? nice.at(-1) : [1, 2, 5, 10].map(n => n * power).find(n => n >= rough);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(Math.abs(at) < step * 1e-6 ? 0 : at);
  return found;
}
const watch = new ResizeObserver(entries => entries.forEach(entry => entry.target.redraw?.()));

/* lines: [{name, x, y, colour, faint, dots, silent}], band: {x, low, high, colour}. `format` writes a value, `tick` a place on the axis below, `name` a place in full; `nice` has the distances of ticks. */
export function plot({lines, band, label, format = String, tall, top, unit = "step", tick = count, name = x => `${unit} ${count(x)}`, nice}) {
  const box = el("div", {class: "plot" + (tall ? " tall" : ""), role: "img", "aria-label": label}), tip = el("div", {class: "tip", "aria-hidden": "true"});
  const xs = lines.flatMap(line => line.x), ys = lines.flatMap(line => line.y.filter(y => y != null)).concat(band?.high ?? []);
  const x0 = xs.reduce((a, b) => Math.min(a, b), Infinity), x1 = Math.max(xs.reduce((a, b) => Math.max(a, b), 0), x0 + 1);
  const y0 = ys.reduce((a, b) => Math.min(a, b), 0), y1 = top ?? (ys.reduce((a, b) => Math.max(a, b), y0) * 1.08 || 1);
  box.redraw = () => {
    const W = box.clientWidth, H = box.clientHeight, levels = ticks(y0, y1, H < 200 ? 3 : 5);
    const left = Math.max(52, 16 + 7 * Math.max(...levels.map(y => format(y).length))), right = 10, above = 8, below = 26;
    if (W < 80 || (box.width === W && box.height === H)) return;
    box.width = W; box.height = H;
    const px = x => left + (x - x0) / (x1 - x0) * (W - left - right), py = y => above + (1 - (y - y0) / (y1 - y0)) * (H - above - below);
    const path = (x, y) => { let pen = "M", d = ""; x.forEach((at, i) => { if (y[i] == null) return; d += `${pen}${px(at).toFixed(1)} ${py(y[i]).toFixed(1)}`; pen = "L"; }); return d; };
    const cursor = svg("line", {class: "cursor", y1: above, y2: H - below, visibility: "hidden"});
    const drawing = svg("svg", {width: W, height: H, "aria-hidden": "true"},
      levels.map(y => [svg("line", {class: "grid", x1: left, x2: W - right, y1: py(y), y2: py(y)}), svg("text", {x: left - 8, y: py(y) + 4, "text-anchor": "end"}, format(y))]),
      ticks(x0, x1, Math.max(2, Math.floor(W / 90)), nice).filter(Number.isInteger).map(x => svg("text", {x: px(x), y: H - 6, "text-anchor": tick === count || px(x) < W - right - 16 ? "middle" : "end"}, tick(x))),
      band?.x.length > 1 && svg("path", {class: `band f-${band.colour}`, d: path(band.x, band.high) + path([...band.x].reverse(), [...band.low].reverse()).replace("M", "L") + "Z"}),
      lines.map(line => svg("path", {class: `line s-${line.colour}${line.faint ? " faint" : ""}`, d: path(line.x, line.y)})),
      lines.filter(line => line.dots).map(line => line.x.map((x, i) => line.y[i] != null && svg("circle", {class: `f-${line.colour}`, cx: px(x), cy: py(line.y[i]), r: 3.2}))), cursor);
    box.replaceChildren(drawing, tip);
    box.onpointermove = event => {
      const at = x0 + (event.clientX - box.getBoundingClientRect().left - left) / (W - left - right) * (x1 - x0);
      const near = lines.filter(line => !line.silent && line.x.length).map(line => { let best = 0; line.x.forEach((x, i) => { if (Math.abs(x - at) < Math.abs(line.x[best] - at)) best = i; }); return [line, best]; });
      if (!near.length) return;
      const shown = near[0][0].x[near[0][1]];
      cursor.setAttribute("x1", px(shown)); cursor.setAttribute("x2", px(shown)); cursor.setAttribute("visibility", "visible");
      tip.textContent = [name(shown), ...near.filter(([line, i]) => line.y[i] != null).map(([line, i]) => `${line.name} ${format(line.y[i])}${line.x[i] === shown ? "" : ` (${name(line.x[i])})`}`)].join("\n");
      tip.style.display = "block";
      tip.style.left = `${Math.max(4, Math.min(px(shown) + 12, W - tip.offsetWidth - 4))}px`;
    };
    box.onpointerleave = () => { tip.style.display = "none"; cursor.setAttribute("visibility", "hidden"); };
  };
  watch.observe(box);
  return box;
}

/* A bar of parts: [[colour, value]] */
export function bar(parts, label, tall) {
  const total = parts.reduce((sum, part) => sum + part[1], 0) || 1;
  let at = 0;
  return el("div", {class: "bar" + (tall ? " tall" : "")}, svg("svg", {viewBox: "0 0 1000 10", preserveAspectRatio: "none", ...(label ? {role: "img", "aria-label": label} : {"aria-hidden": "true"})},
    parts.map(([colour, value]) => { const x = at; at += 1000 * value / total; return svg("rect", {class: "f-" + colour, x, width: at - x, height: 10}); })));
}
/* rows: [[name, value, colour]] */
export function bars(rows, format = count, most = Math.max(1e-9, ...rows.map(row => row[1]))) {
  return el("dl", {class: "hbars"}, rows.map(([name, value, colour = "accent"]) => [el("dt", {}, name), el("dd", {}, bar([[colour, value], ["none", most - value]])), el("dd", {class: "n"}, format(value))]));
}
export function legend(items) {
  return el("ul", {class: "legend"}, items.map(([colour, text, value]) => el("li", {}, el("span", {class: `key k-${colour}`}), text, value != null && el("b", {}, value))));
}

/* What each lane did before `end`. spans: [{lane, colour, begin, end, title}], in seconds */
export function lanes(spans, end, wide, label) {
  const order = ["training", "broadcast"], names = [...new Set(spans.map(span => span.lane))], at = s => 100 * Math.min(1, Math.max(0, 1 - (end - s) / wide));
  const sorted = [...order.filter(name => names.includes(name)), ...names.filter(name => !order.includes(name) && name !== "checks").sort().slice(0, 8), ...(names.includes("checks") ? ["checks"] : [])];
  return el("div", {class: "lanes", role: "img", "aria-label": label}, sorted.map(name => [el("span", {}, el("bdi", {}, name)), svg("svg", {width: "100%", height: 24},
    svg("rect", {class: "f-line", y: 22, width: "100%", height: 1}),
    spans.filter(span => span.lane === name && span.end > end - wide).map(span => svg("rect", {class: "f-" + span.colour, x: `${Math.min(99.6, at(span.begin)).toFixed(2)}%`, y: 3, height: 15, rx: 2.5, width: `${Math.max(.4, at(span.end) - at(span.begin) - .1).toFixed(2)}%`}, svg("title", {}, span.title))))]),
    el("span", {}), el("div", {class: "ends"}, el("span", {}, `−${Math.round(wide)} s`), el("span", {}, `−${Math.round(wide / 2)} s`), el("span", {}, "now")));
}
