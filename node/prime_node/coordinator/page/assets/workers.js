/* The workers: any number of rows, of which only those in sight are elements. */
import {el, clean, count, short, share} from "/page/{digest}-dom.js";

const ROW = 38, SPARE = 6, REFRESH_MS = 15000;
const DOTS = {generating: "", idle: "warn", fetching: "warn", draining: "off", away: "off", banned: "bad"};
const HEADS = [["name", "worker", ""], ["key", "key", "opt"], ["state", "doing", ""], ["policy", "policy", "n opt"], ["accepted", "accepted", "n"], ["tokens", "tokens", "n opt"], ["refused", "rejected", "n"], ["audits", "audited", "n opt"], ["hardware", "hardware", "opt"]];
const change = (node, text) => { if (node.data !== text) node.data = text; };

/* One row's elements, which show one worker after another: to make new ones at each turn of the wheel takes three times as long. */
function line() {
  const [name, key, state, hardware, ...numbers] = Array.from({length: 9}, () => document.createTextNode("")), fresh = el("span", {class: "soft"}, " · new"), owner = document.createTextNode(""), dot = el("span"), doing = el("span", {class: "st"}, dot, state);
  const cell = (kind, ...content) => el("div", {role: "cell", class: kind}, content), [policy, accepted, tokens, refused, audits] = numbers;
  const root = el("div", {role: "row"}, cell("", el("bdi", {}, name), fresh, el("span", {class: "soft"}, owner)), cell("mono opt", key), cell("", doing), cell("n opt", policy), cell("n", accepted), cell("n opt", tokens), cell("n", refused), cell("n opt", audits), cell("opt", el("bdi", {}, hardware)));
  return {root, show(row, index) {
    root.hidden = false;
    root.className = `wrow ${row.state}`;
    root.setAttribute("aria-rowindex", index);
    dot.className = `dot ${DOTS[row.state] ?? ""}`;
    doing.title = clean(row.waits, 200);
    fresh.hidden = !row.newcomer;
    [[name, row.shown ??= clean(row.name) || "(no name)"], [key, row.key.slice(-6)], [owner, row.person ? ` · of person ${row.person.slice(-6)}` : ""], [state, row.state], [policy, row.policy < 0 ? "–" : count(row.policy)], [accepted, count(row.accepted)], [tokens, short(row.tokens)], [refused, count(row.refused)], [audits, share(row.audits)], [hardware, row.machine ??= clean(row.hardware) || "–"]].forEach(one => change(...one));
  }};
}

export function workersView() {
  let shown = [], sort = ["accepted", -1], needle = "", only = "", timer = 0, isLoaded = false, version = 0, due = 0;
  const rows = new Map(), lines = [];
  const filter = el("input", {id: "filter", type: "search", placeholder: "Find a name, key, hardware", "aria-label": "Find a worker by name, key, person's key or hardware", oninput: () => { needle = filter.value.toLowerCase(); box.scrollTop = 0; order(); }});
  const chips = el("div", {class: "chips"}), said = el("span", {class: "sr", role: "status"});
  const heads = el("div", {class: "wrow whead", role: "row", "aria-rowindex": 1}), box = el("div", {class: "vs", tabindex: 0, role: "rowgroup", "aria-label": "Rows; scroll with the arrow keys", onscroll: () => { due ||= requestAnimationFrame(() => { due = 0; draw(); }); }});
  const none = el("div", {role: "cell"}), empty = el("div", {class: "wrow", role: "row"}, none);
  const sizer = el("div", {class: "sizer", role: "presentation"}), part = el("div", {class: "win", role: "presentation"}, empty);
  const table = el("div", {role: "table", "aria-label": "Workers"}, el("div", {role: "rowgroup"}, heads), box);
  sizer.append(part); box.append(sizer);
  const root = el("section", {class: "card wt", "aria-labelledby": "w-title"}, el("h2", {id: "w-title", class: "sr"}, "Workers"), el("div", {class: "tools"}, filter, chips, said), table);
  new ResizeObserver(() => draw()).observe(box);

  function order() {
    const [at, sign] = sort, states = {}, texts = ["name", "key", "hardware", "person"];
    for (const row of rows.values()) states[row.state] = (states[row.state] ?? 0) + 1;
    shown = [...rows.values()].filter(row => (!only || row.state === only) && (!needle || texts.some(name => row[name].toLowerCase().includes(needle))));
    shown.sort((a, b) => (a[at] < b[at] ? -1 : a[at] > b[at] ? 1 : 0) * sign);
    sizer.style.height = `${Math.max(1, shown.length) * ROW}px`;
    box.style.height = `min(var(--vs), ${Math.max(1, shown.length) * ROW + 2}px)`;
    table.setAttribute("aria-rowcount", shown.length + 1);
    said.textContent = `${count(shown.length)} workers shown`;
    const focused = chips.contains(document.activeElement) ? document.activeElement.dataset.state : null;
    chips.replaceChildren(...["", ...Object.keys(DOTS).filter(s => states[s])].map(s => el("button", {class: "chip", type: "button", "data-state": s, "aria-pressed": String(only === s), onclick: () => { only = s; box.scrollTop = 0; order(); }}, `${s || "all"} ${count(s ? states[s] : rows.size)}`)));
    if (focused != null) [...chips.children].find(chip => chip.dataset.state === focused)?.focus();
    draw();
  }
  function title() {
    heads.replaceChildren(...HEADS.map(([id, text, kind]) => el("div", {role: "columnheader", class: kind, "aria-sort": sort[0] !== id ? "none" : sort[1] > 0 ? "ascending" : "descending"},
      el("button", {type: "button", "data-column": id, onclick: () => { sort = [id, sort[0] === id ? -sort[1] : ["name", "key", "state", "hardware"].includes(id) ? 1 : -1]; box.scrollTop = 0; title(); order(); heads.querySelector(`[data-column=${id}]`).focus(); }}, text, sort[0] === id ? (sort[1] > 0 ? " ↑" : " ↓") : ""))));
  }
  function draw() {
    const first = Math.max(0, Math.floor(box.scrollTop / ROW) - SPARE), seen = shown.slice(first, Math.ceil((box.scrollTop + box.clientHeight) / ROW) + SPARE);
    part.style.transform = `translateY(${first * ROW}px)`;
    while (lines.length < seen.length) { lines.push(line()); part.append(lines.at(-1).root); }
    lines.forEach((one, i) => { if (i < seen.length) one.show(seen[i], first + i + 2); else one.root.hidden = true; });
    empty.hidden = shown.length > 0;
    change(none.firstChild ?? none.appendChild(document.createTextNode("")), isLoaded ? rows.size ? "No worker fits." : "No worker has joined yet." : "Loading…");
  }
  function merge(found) {
    if (!found.since) rows.clear();
    for (const {number, ...columns} of [found.named, found.moved]) number.forEach((n, i) => {
      const row = rows.get(n) ?? rows.set(n, {}).get(n);
      for (const name in columns) row[name] = columns[name][i];
      if (columns.name) row.shown = row.machine = null;
    });
    found.gone.forEach(n => rows.delete(n));
    version = found.version;
  }
  async function load() {
    clearTimeout(timer);
    try {
      const answer = document.hidden ? {} : await fetch(`/v1/roster?since=${version}`);
      if (answer.ok) { merge(await answer.json()); isLoaded = true; order(); }
    } catch { /* the next time */ }
    if (root.isConnected) timer = setTimeout(load, REFRESH_MS);
  }
  title(); draw(); load();
  return {root, update() {}, find: () => filter.focus()};
}
