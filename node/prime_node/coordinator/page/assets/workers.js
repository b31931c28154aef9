/* The workers: any number of rows, of which only those in sight are elements. */
import {el, clean, named, count, short, share} from "/page/{digest}-dom.js";

const ROW = 38, SPARE = 8, REFRESH_MS = 15000;
const DOTS = {generating: "", idle: "warn", fetching: "warn", draining: "off", away: "off", banned: "bad"};
const HEADS = [["name", "worker", ""], ["key", "key", "opt"], ["state", "doing", ""], ["policy", "policy", "n opt"], ["accepted", "accepted", "n"], ["tokens", "tokens", "n opt"], ["refused", "refused", "n"], ["audits", "audited", "n opt"], ["hardware", "hardware", "opt"]];

export function workersView() {
  let rows = [], shown = [], sort = ["accepted", -1], needle = "", only = "", place = {}, timer = 0, isLoaded = false;
  const filter = el("input", {id: "filter", type: "search", placeholder: "Find a name, key, hardware", "aria-label": "Find a worker by name, key or hardware", oninput: () => { needle = filter.value.toLowerCase(); order(); }});
  const chips = el("div", {class: "chips"}), said = el("span", {class: "sr", role: "status"});
  const heads = el("div", {class: "wrow whead", role: "row", "aria-rowindex": 1}), box = el("div", {class: "vs", tabindex: 0, role: "rowgroup", "aria-label": "Rows; scroll with the arrow keys", onscroll: () => { due ||= requestAnimationFrame(() => { due = 0; draw(); }); }});
  const sizer = el("div", {class: "sizer", role: "presentation"}), part = el("div", {class: "win", role: "presentation"});
  const table = el("div", {role: "table", "aria-label": "Workers"}, el("div", {role: "rowgroup"}, heads), box);
  let due = 0;
  sizer.append(part); box.append(sizer);
  const root = el("section", {class: "card wt", "aria-labelledby": "w-title"}, el("h2", {id: "w-title", class: "sr"}, "Workers"), el("div", {class: "tools"}, filter, chips, said), table);
  new ResizeObserver(() => draw()).observe(box);

  function order() {
    const at = place[sort[0]], sign = sort[1];
    shown = rows.filter(row => (!only || row[place.state] === only) && (!needle || [place.name, place.key, place.hardware].some(i => row[i].toLowerCase().includes(needle))));
    shown.sort((a, b) => (a[at] < b[at] ? -1 : a[at] > b[at] ? 1 : 0) * sign);
    sizer.style.height = `${Math.max(1, shown.length) * ROW}px`;
    box.style.height = `min(var(--vs), ${Math.max(1, shown.length) * ROW + 2}px)`;
    table.setAttribute("aria-rowcount", shown.length + 1);
    said.textContent = `${count(shown.length)} workers shown`;
    const states = {};
    for (const row of rows) states[row[place.state]] = (states[row[place.state]] ?? 0) + 1;
    const focused = chips.contains(document.activeElement) ? document.activeElement.dataset.state : null;
    chips.replaceChildren(...["", ...Object.keys(DOTS).filter(s => states[s])].map(s => el("button", {class: "chip", type: "button", "data-state": s, "aria-pressed": String(only === s), onclick: () => { only = s; box.scrollTop = 0; order(); }}, `${s || "all"} ${count(s ? states[s] : rows.length)}`)));
    if (focused != null) [...chips.children].find(chip => chip.dataset.state === focused)?.focus();
    draw();
  }
  function title() {
    heads.replaceChildren(...HEADS.map(([id, text, kind]) => el("div", {role: "columnheader", class: kind, "aria-sort": sort[0] !== id ? "none" : sort[1] > 0 ? "ascending" : "descending"},
      el("button", {type: "button", "data-column": id, onclick: () => { sort = [id, sort[0] === id ? -sort[1] : ["name", "key", "state", "hardware"].includes(id) ? 1 : -1]; box.scrollTop = 0; title(); order(); heads.querySelector(`[data-column=${id}]`).focus(); }}, text, sort[0] === id ? (sort[1] > 0 ? " ↑" : " ↓") : ""))));
  }
  function draw() {
    const first = Math.max(0, Math.floor(box.scrollTop / ROW) - SPARE), end = Math.min(shown.length, Math.ceil((box.scrollTop + box.clientHeight) / ROW) + SPARE);
    part.style.transform = `translateY(${first * ROW}px)`;
    const cell = (kind, ...content) => el("div", {role: "cell", class: kind}, content);
    part.replaceChildren(...shown.slice(first, end).map((row, i) => {
      const get = name => row[place[name]], state = get("state");
      return el("div", {class: `wrow ${state}`, role: "row", "aria-rowindex": first + i + 2}, cell("", named(get("name")), get("newcomer") && el("span", {class: "soft"}, " · new")), cell("mono opt", get("key").slice(-6)),
        cell("", el("span", {class: "st", title: clean(get("waits"), 200)}, el("span", {class: `dot ${DOTS[state] ?? ""}`}), state)), cell("n opt", get("policy") < 0 ? "–" : count(get("policy"))), cell("n", count(get("accepted"))), cell("n opt", short(get("tokens"))), cell("n", count(get("refused"))), cell("n opt", share(get("audits"))), cell("opt", named(get("hardware") || "–")));
    }));
    if (!shown.length) part.replaceChildren(el("div", {class: "wrow", role: "row"}, cell("", isLoaded ? rows.length ? "Nobody fits." : "Nobody has joined yet." : "Loading…")));
  }
  async function load() {
    clearTimeout(timer);
    try {
      const answer = await fetch("/v1/roster");
      if (answer.ok) { const found = await answer.json(); rows = found.rows; place = Object.fromEntries(found.columns.map((name, i) => [name, i])); isLoaded = true; order(); }
    } catch { /* the next time */ }
    if (root.isConnected) timer = setTimeout(load, REFRESH_MS);
  }
  title(); draw(); load();
  return {root, update() {}, find: () => filter.focus()};
}
