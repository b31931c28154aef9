/* The page: one document, live changes from one stream, and views of it. Views live in the query, since the fragment is the digest of a join link. */
import {el, clean, count} from "/page/{digest}-dom.js";
import {mark, themes} from "/page/{digest}-frame.js";
import {runView, phaseOf} from "/page/{digest}-run.js";
import {workersView} from "/page/{digest}-workers.js";
import {checksView, joinView, ledgerView, swarmView} from "/page/{digest}-others.js";

const VIEWS = {run: ["Run", runView], workers: ["Workers", workersView], swarm: ["Swarm", swarmView], checks: ["Checks", checksView], ledger: ["Ledger", ledgerView], join: ["Join", joinView]};
const POLL_MS = 15000, EVENTS_MAX = 400;
let doc = null, source = null, view = null, shownView = "", retry = 0;
const root = document.getElementById("app"), main = el("main", {id: "main", tabindex: -1});

const asked = () => { const name = new URLSearchParams(location.search).get("view"); return Object.hasOwn(VIEWS, name ?? "") ? name : "run"; };
const href = name => (name === "run" ? location.pathname : `?view=${name}`) + location.hash;

/* The head of the page */
const titleBox = el("h1"), phase = el("span", {class: "pill"}), linked = el("span", {class: "pill", title: "How this page is kept up to date"}), about = el("p", {class: "about"});
const nav = el("nav", {"aria-label": "Views"}, Object.entries(VIEWS).map(([name, [title]]) => el("a", {href: href(name), "data-view": name, onclick: event => { if (event.metaKey || event.ctrlKey || event.shiftKey) return; event.preventDefault(); go(name); }}, title)));
const say = (kind, text) => linked.replaceChildren(el("span", {class: `dot ${kind}`}), text);

function pinned() {
  const named = location.hash.slice(1).split(".")[0];
  if (!/^[0-9a-f]{64}$/.test(named)) return null;
  if (named === doc.run.digest) return null;
  return el("p", {class: "card pad note bad", role: "alert"}, el("b", {}, "Your link names another run. "), "This coordinator serves ", el("span", {class: "mono"}, doc.run.digest.slice(0, 16) + "…"), ", and the link names ", el("span", {class: "mono"}, named.slice(0, 16) + "…"), ". Do not join; ask the person who gave you the link.");
}
const warning = el("div", {class: "slot"});

function begin() {
  root.replaceChildren(el("header", {class: "top"}, el("div", {class: "who"}, mark(), titleBox, phase), linked, nav, themes), main,
    el("footer", {}, el("p", {}, "What a coordinator says of its run, and what workers call themselves. It is not proven; ", el("span", {class: "mono"}, "prime-node verify"), " proves.")));
}
function open() {
  shownView = asked();
  view = VIEWS[shownView][1]();
  main.replaceChildren(warning, about, view.root);
  for (const a of nav.children) { a.href = href(a.dataset.view); if (a.dataset.view === shownView) a.setAttribute("aria-current", "page"); else a.removeAttribute("aria-current"); }
}
function draw() {
  if (!titleBox.isConnected) begin();
  if (shownView !== asked()) open();
  const {run, now} = doc;
  titleBox.replaceChildren(el("bdi", {}, clean(run.title, 80) || "A training run"));
  document.title = `${clean(run.title, 80)} · step ${count(Math.min(now.step, run.max_steps))} of ${count(run.max_steps)}`;
  phase.replaceChildren(el("span", {class: `dot ${now.phase === "learning" ? "live" : now.phase === "complete" ? "" : "warn"}`}), phaseOf(now));
  about.textContent = shownView === "run" ? clean(run.description, 500) : "";
  about.hidden = !about.textContent;
  warning.replaceChildren(...[pinned()].filter(Boolean));
  view.update(doc);
}
function go(name) { history.pushState(null, "", href(name)); draw(); main.focus({preventScroll: true}); scrollTo(0, 0); }

function merge(change) {
  if (change.now) doc.now = {...doc.now, ...change.now};
  for (const name of ["bans", "evaluations", "contributors"]) if (change[name]) doc[name] = change[name];
  if (change.events) { const last = doc.events.at(-1)?.number ?? 0; doc.events = [...doc.events, ...change.events.filter(e => e.number > last)].slice(-EVENTS_MAX); }
  if (change.steps) {
    const last = doc.steps.step.at(-1) ?? -1, from = change.steps.step.findIndex(step => step > last);
    if (from >= 0) for (const [name, values] of Object.entries(change.steps)) doc.steps[name] = doc.steps[name].concat(values.slice(from));
  }
}
async function load() {
  const answer = await fetch("/v1/history");
  if (!answer.ok) throw new Error(String(answer.status));
  doc = await answer.json();
  draw();
}
function listen() {
  source?.close();
  source = new EventSource(`/v1/live?since=${doc.version}`);
  source.onopen = () => say("", "live");
  source.onmessage = event => { doc.version = Number(event.lastEventId) || doc.version; merge(JSON.parse(event.data)); draw(); };
  source.addEventListener("reset", () => load().catch(() => {}));
  source.onerror = () => { const isOver = source.readyState === 2; say("warn", isOver ? "every 15 s" : "connecting"); if (isOver) again(); };
}
function again() { clearTimeout(retry); retry = setTimeout(start, POLL_MS); }
async function start() {
  try { await load(); listen(); } catch {
    if (doc) say("bad", "no answer"); else document.getElementById("wait")?.replaceChildren("The coordinator does not answer. The page tries again.");
    again();
  }
}
addEventListener("popstate", () => doc && draw());
addEventListener("hashchange", () => doc && draw());
document.addEventListener("visibilitychange", () => { if (document.hidden) { source?.close(); clearTimeout(retry); if (doc) say("off", "paused"); } else start(); });
addEventListener("keydown", event => {
  if (!doc || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input")) return;
  if (event.key === "/") { event.preventDefault(); if (asked() !== "workers") go("workers"); view.find?.(); }
});
say("warn", "connecting");
start();
