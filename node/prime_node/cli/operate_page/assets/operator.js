/* The operator's page: what the run does, and orders to it. The process that serves it signs them; no key of the run is here. */
import {el, svg, card, clean, named, command, count, plural, short, tile, words} from "/page/{digest}-dom.js";
import {mark, themes} from "/page/{digest}-frame.js";
import {ask, beginSession} from "/page/{digest}-session.js";
import {qrCode} from "/page/{digest}-qr.js";

const POLL_MS = 3000, ROWS_MAX = 50, ORDERS_MAX = 30;
const root = document.getElementById("app");
let view = null, timer = 0;

/* Orders */
const orders = el("ol", {class: "events", "aria-live": "polite"}), noOrders = el("p", {class: "soft"}, "None from this page yet.");
function note(text, isBad) {
  noOrders.remove();
  orders.prepend(el("li", {}, el("time", {class: "mono"}, new Date().toLocaleTimeString([], {hour12: false})), el("span", {class: isBad ? "bad" : ""}, text)));
  while (orders.children.length > ORDERS_MAX) orders.lastChild.remove();
}
async function order(done, body) {
  try { await ask("/v1/order", body); note(done); } catch (error) { note(`${done}: not done, ${error.message}`, true); }
  await look();
}

/* A question before what others notice at once */
function question(title, text, label, {reason, isBad} = {}) {
  const field = reason == null ? null : el("input", {id: "reason", value: reason, maxlength: 200, autocomplete: "off"});
  const yes = el("button", {class: isBad ? "danger" : "main", value: "yes"}, label);
  const dialog = el("dialog", {"aria-labelledby": "asked"}, el("form", {method: "dialog", class: "form"}, el("h2", {id: "asked"}, title), el("p", {class: "soft"}, text),
    field && el("label", {for: "reason"}, "Reason, which others see", field), el("div", {class: "row end"}, button("Cancel", () => dialog.close("")), yes)));
  document.body.append(dialog);
  dialog.showModal();
  (field ?? yes).focus();
  field?.select();
  return new Promise(done => dialog.addEventListener("close", () => { dialog.remove(); done(dialog.returnValue === "yes" ? field?.value.trim() ?? "" : null); }));
}
const button = (text, onclick, more = {}) => el("button", {type: "button", onclick, ...more}, text);

/* The head of the page */
const title = el("h1"), phase = el("span", {class: "pill"}), linked = el("span", {class: "pill"}), notes = el("div", {class: "slot"});
const live = (kind, text) => linked.replaceChildren(el("span", {class: `dot ${kind}`}), text);
const phaseOf = now => now.complete ? "complete" : now.draining ? "draining" : now.paused ? "paused" : now.head < 0 ? "starting" : now.num_workers ? "running" : "waiting for workers";

/* Tiles */
const tiles = el("dl", {class: "tiles four"});
function drawTiles(now) {
  const refused = Object.values(now.rollouts.refused).reduce((a, b) => a + b, 0), banned = now.workers.filter(one => one.banned).length;
  tiles.replaceChildren(
    tile("Step", [count(Math.min(now.step, now.max_steps)), el("span", {class: "fine"}, ` of ${count(now.max_steps)}`)], now.head < 0 ? "no policy yet" : `policy ${count(now.head)} is the newest`),
    tile("Workers", count(now.num_workers), banned ? `${count(banned)} banned` : "none is banned"),
    tile("Rollouts", short(now.rollouts.accepted), refused ? `${short(refused)} rejected` : "none rejected"),
    tile("Leases out", count(now.open_leases), `${plural(now.pending_bundles, "bundle")} unjudged`));
}

/* The run */
const runBox = el("div", {class: "form"});
async function pause() {
  const reason = await question("Pause the run?", "No new work is given out. Workers stay and wait; work that is out is accepted and trained. The pause lasts over restarts.", "Pause", {reason: ""});
  if (reason !== null) await order("paused the run", {action: "pause", reason});
}
async function drain() {
  if (await question("Drain the run?", "No new work is given out, and workers leave once they have finished. This cannot be undone. To continue later, pause instead.", "Drain", {isBad: true}) !== null) await order("drained the run", {action: "drain"});
}
function drawRun(now) {
  const over = now.complete || now.draining;
  const state = now.complete ? "Every batch of the run is made." : now.draining ? "The run is draining: workers finish and leave." : now.paused ? ["Paused", now.pause_reason ? `: ${clean(now.pause_reason, 200)}. ` : ". ", "Workers wait for work."] : "Work is given out.";
  runBox.replaceChildren(el("p", {}, state), el("div", {class: "row"},
    !over && (now.paused ? button("Resume", () => order("resumed the run", {action: "resume"}), {class: "main"}) : button("Pause", pause, {class: "main"})),
    button("Save a snapshot", () => order("saved a snapshot", {action: "snapshot"})), !over && button("Drain", drain, {class: "danger"})));
}

/* Who may join */
const field = (id, text, attributes) => el("label", {for: id}, text, el("input", {id, autocomplete: "off", ...attributes}));
const workersMax = field("l-workers", "Workers at one time", {type: "number", min: 1}), perNetwork = field("l-network", "From one network", {type: "number", min: 1});
const invites = el("select", {id: "l-invites"}, [["", "as the settings say"], ["true", "new keys need one"], ["false", "anyone may join"]].map(([value, text]) => el("option", {value}, text)));
const input = label => label.querySelector("input");
async function limit(event) {
  event.preventDefault();
  const number = label => input(label).value ? Number(input(label).value) : null;
  await order("limited who joins", {action: "limit", joining: {workers_max: number(workersMax), workers_per_network_max: number(perNetwork), invites_needed: invites.value ? invites.value === "true" : null}});
  limitsKnown = "";
}
let limitsKnown = "";
const limitsForm = el("form", {class: "form", onsubmit: limit}, el("div", {class: "row fields"}, workersMax, perNetwork, el("label", {for: "l-invites"}, "Invitations", invites)), el("div", {class: "row"}, el("button", {class: "main"}, "Set limits"), el("p", {class: "fine"}, "Empty: as the settings say. Workers that take part stay.")));
function drawLimits(now) {
  const text = JSON.stringify(now.joining);
  if (text === limitsKnown || limitsForm.contains(document.activeElement)) return;
  limitsKnown = text;
  input(workersMax).value = now.joining.workers_max ?? "";
  input(workersMax).placeholder = `at most ${count(now.workers_max)}`;
  input(perNetwork).value = now.joining.workers_per_network_max ?? "";
  input(perNetwork).placeholder = "as set";
  invites.value = now.joining.invites_needed == null ? "" : String(now.joining.invites_needed);
}

/* Invitations */
const keys = field("i-keys", "Keys that may join", {type: "number", min: 1, max: 10000, value: 1, required: true}), days = field("i-days", "Days", {type: "number", min: 1, max: 3650, value: 7, required: true}), invited = el("div", {class: "slot", "aria-live": "polite"});
async function invite(event) {
  event.preventDefault();
  try {
    const {link} = await ask("/v1/invite", {keys: Number(input(keys).value), days: Number(input(days).value)});
    const code = qrCode(link), size = code ? code.length + 8 : 0;
    invited.replaceChildren(el("div", {class: "invited"}, code && svg("svg", {class: "qr large", viewBox: `-4 -4 ${size} ${size}`, role: "img", "aria-label": "The join link with the invitation as a QR code"}, svg("rect", {x: -4, y: -4, width: size, height: size, fill: "#fff"}),
      svg("path", {fill: "#000", d: code.flatMap((row, y) => row.map((dark, x) => dark ? `M${x} ${y}h1v1h-1z` : "")).join("")})),
      el("div", {class: "steps"}, el("p", {}, "For the person who joins. Anyone who has the link can use the invitation."), command(`prime-node join ${link}`), command(link))));
    note(`made an invitation for ${plural(Number(input(keys).value), "key")}`);
  } catch (error) { note(`no invitation was made: ${error.message}`, true); }
}

/* Keys */
const keyBox = el("div", {class: "steps"});
let keysKnown = "";
function drawKeys(now) {
  const text = JSON.stringify([now.key_ring, now.roles, now.folder]);
  if (text === keysKnown) return;
  keysKnown = text;
  const folder = /^[\w./-]+$/.test(now.folder) ? now.folder : `'${now.folder.replaceAll("'", "'\\''")}'`, next = now.key_ring + 1;
  const role = el("select", {id: "k-role", onchange: draw}, now.roles.map(one => el("option", {value: one, selected: one === "trainer"}, one))), shown = el("div", {class: "slot"});
  function draw() { shown.replaceChildren(command(`prime-node keys rotate ${folder} --role ${role.value}`), command(`prime-node keys submit ${folder}/key-ring-${next}.json ${folder}`)); }
  draw();
  keyBox.replaceChildren(el("p", {class: "soft"}, `Key ring ${count(now.key_ring)} is in force. The root key signs each change, and no browser gets near it: run these on a machine that holds it.`), el("label", {for: "k-role", class: "aside"}, "Replace the key of the", role), shown);
}

/* Workers */
const search = el("input", {type: "search", id: "w-search", placeholder: "Name, or the end of a key", "aria-label": "Search workers", oninput: () => drawWorkers(view)});
const rows = el("tbody"), more = el("p", {class: "fine"}), chosen = {banned: false};
const onlyBanned = button("Banned", () => { chosen.banned = !chosen.banned; drawWorkers(view); }, {class: "chip"});
const about = one => clean(one.name) || one.worker.slice(-8);
async function ban(one) {
  const reason = await question(`Ban ${about(one)}?`, "Its leases end, and its bundles without a verdict are rejected. The worker and all visitors see the reason.", "Ban", {reason: "by the operator", isBad: true});
  if (reason !== null) await order(`banned ${about(one)}`, {action: "ban", worker: one.worker, reason});
}
async function unban(one) {
  if (await question(`Forgive ${about(one)}?`, "It may join again as a newcomer, without its strikes and the evidence against it.", "Forgive") !== null) await order(`forgave ${about(one)}`, {action: "unban", worker: one.worker});
}
let rowsKnown = "", finding = "";
async function find(ending) {
  if (finding === ending || !/^[0-9A-Za-z]{6,80}$/.test(ending)) return;
  finding = ending;
  try {
    const {keys} = await ask(`/v1/keys/${ending}`);
    if (search.value.trim() === ending) drawRows(keys.map(worker => ({worker, name: "", state: "not listed", accepted: null, refused: {}, strikes: 0, banned: null, isFound: true})), keys.length);
  } catch (error) { more.textContent = error.message; }
}
function drawRows(found, total) {
  const shown = found.slice(0, ROWS_MAX), text = JSON.stringify(shown);
  more.textContent = total > shown.length ? `and ${count(total - shown.length)} more: search for one` : total ? "" : "No worker fits.";
  if (text === rowsKnown) return;
  rowsKnown = text;
  rows.replaceChildren(...shown.map(one => {
    const refused = Object.values(one.refused ?? {}).reduce((a, b) => a + b, 0), doing = one.banned ? "banned" : one.active === false ? "away" : words(one.state || "idle");
    return el("tr", {}, el("td", {}, named(one.name), " ", el("span", {class: "mono soft", title: one.worker}, one.worker.slice(-8))), el("td", {class: one.banned ? "bad" : ""}, doing, one.newcomer && !one.banned && el("span", {class: "soft"}, ", newcomer"), one.banned && el("div", {class: "fine"}, clean(one.banned.reason, 120))),
      el("td", {class: "n"}, one.accepted == null ? "–" : short(one.accepted)), el("td", {class: "n opt"}, one.accepted == null ? "–" : short(refused)), el("td", {class: "n opt"}, count(one.strikes)),
      el("td", {class: "n"}, (one.banned || one.isFound) && button("Forgive", () => unban(one), {"aria-label": `Forgive ${about(one)}`}), !one.banned && button("Ban", () => ban(one), {class: "danger", "aria-label": `Ban ${about(one)}`})));
  }));
}
function drawWorkers(now) {
  if (!now) return;
  onlyBanned.setAttribute("aria-pressed", String(chosen.banned));
  const text = search.value.trim(), wanted = text.toLowerCase();
  const found = now.workers.filter(one => (!chosen.banned || one.banned) && (!wanted || clean(one.name).toLowerCase().includes(wanted) || one.worker.endsWith(text)));
  if (!found.length && wanted && !chosen.banned) find(text);
  else finding = "";
  if (found.length || finding !== text || !wanted) drawRows(found, found.length);
}

/* The whole */
function begin() {
  const table = el("div", {class: "wide", tabindex: 0, role: "group", "aria-label": "Workers"}, el("table", {class: "plain"}, el("thead", {}, el("tr", {}, [["worker"], ["doing"], ["accepted", "n"], ["rejected", "n opt"], ["strikes", "n opt"], ["", "n"]].map(([name, kind]) => el("th", {class: kind ?? "", scope: "col"}, name || el("span", {class: "sr"}, "orders"))))), rows));
  root.replaceChildren(el("header", {class: "top"}, el("div", {class: "who"}, mark(), title, phase), el("div", {class: "row end"}, linked, themes)),
    el("main", {id: "main"}, notes, tiles,
      el("div", {class: "halves"},
        el("div", {class: "stack"}, card("o-run", "The run", null, runBox), card("o-join", "Who may join", null, limitsForm), card("o-keys", "Keys", null, keyBox)),
        el("div", {class: "stack"}, card("o-invite", "Invite", "one link for one person or a few", el("form", {class: "form", onsubmit: invite}, el("div", {class: "row fields"}, keys, days, el("button", {class: "main"}, "Make a link"))), invited), card("o-orders", "Orders from this page", null, noOrders, orders))),
      card("o-workers", "Workers", null, el("div", {class: "row above"}, search, onlyBanned), table, more)),
    el("footer", {}, el("p", {}, "This page is for you alone: the process that printed its address signs your orders. Ctrl-C there ends it.")));
}
function draw() {
  if (!title.isConnected) begin();
  const now = view, state = phaseOf(now);
  title.replaceChildren("Operate ", el("bdi", {}, clean(now.title, 80)));
  document.title = `Operate ${clean(now.title, 80)}`;
  phase.replaceChildren(el("span", {class: `dot ${state === "running" ? "live" : state === "complete" ? "" : "warn"}`}), state);
  notes.replaceChildren(...(now.waiting_for.length && state !== "running" && state !== "complete" ? [el("p", {class: "card pad note"}, el("b", {}, "Waits for "), now.waiting_for.map(one => clean(one, 240)).join("; "))] : []));
  drawTiles(now); drawRun(now); drawLimits(now); drawKeys(now); drawWorkers(now);
}
async function look() {
  clearTimeout(timer);
  try { view = await ask("/v1/view"); draw(); live("", "live"); }
  catch (error) { if (view) { live("bad", "no answer"); notes.replaceChildren(el("p", {class: "card pad note bad", role: "alert"}, error.message)); } else document.getElementById("wait")?.replaceChildren(error.message); }
  timer = setTimeout(look, POLL_MS);
}
document.addEventListener("visibilitychange", () => { if (document.hidden) clearTimeout(timer); else look(); });
beginSession().then(look, error => document.getElementById("wait")?.replaceChildren(error.message));
