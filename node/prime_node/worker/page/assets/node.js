/* The worker's page: one document, asked for again every two seconds while it is in sight. */
import {el, card, clean, command, count, facts, plural, share, short, bytes, table, tile} from "/page/{digest}-dom.js";
import {plot, bar, legend} from "/page/{digest}-charts.js";
import {arranged, mark, themes} from "/page/{digest}-frame.js";
import {ask, beginSession} from "/page/{digest}-session.js";
import {limitsForm} from "/page/{digest}-limits.js";

const POLL_MS = 2000, SOON_MS = 350, MINUTES_MAX = 1440, POINTS_MAX = 240;
const STATES = {generating: "", idle: "warn", fetching: "warn", banned: "bad"};
const root = document.getElementById("app"), main = el("main", {id: "main", tabindex: -1});
let doc = null, timer = 0, isAsking = false;

/* The state and its buttons */
const dots = {Generating: "live", Paused: "warn", Waiting: "warn", "No answer": "bad", Ended: "off", Finishing: "warn"};
const headline = el("div", {class: "big"}), sentence = el("p", {}), notice = el("p", {class: "soft"}), failed = el("p", {class: "bad", role: "alert", hidden: true});
const pause = el("button", {type: "button", onclick: () => order(doc.doing.is_on_request ? "run" : "pause")}), finish = el("button", {type: "button", class: "risky", onclick: () => sure(true)}, "Finish, then stop");
const yes = el("button", {type: "button", class: "risky", onclick: () => { sure(false); order("finish"); }}, "Yes, finish and stop"), no = el("button", {type: "button", onclick: () => sure(false)}, "No");
const first = el("div", {class: "actions"}, pause, finish), second = el("div", {class: "actions", hidden: true, role: "group", "aria-label": "Finish, then stop?"}, yes, no);
const state = el("section", {class: "card pad", "aria-labelledby": "c-state"}, el("h2", {id: "c-state", class: "sr"}, "What it does now"), el("div", {class: "state"}, el("div", {class: "now", role: "status"}, headline, sentence, notice), el("div", {}, first, second)), failed);
function sure(isAsked) { first.hidden = isAsked; second.hidden = !isAsked; (isAsked ? no : finish).focus(); }
function show({headline: word, sentence: text, notice: more, is_on_request: isPaused, is_finishing: isFinishing}) {
  const said = JSON.stringify([word, text, more]);
  if (state.dataset.said !== said) { state.dataset.said = said; headline.replaceChildren(el("span", {class: `dot ${dots[word] ?? ""}`}), word); sentence.textContent = clean(text, 400); notice.textContent = more ? `The coordinator says: ${clean(more, 400)}` : ""; }
  pause.textContent = isPaused ? "Resume" : "Pause";
  pause.className = isPaused ? "main" : "";
  for (const button of [pause, finish]) button.disabled = isFinishing || word === "Ended";
}
async function send(change) { await ask("/v1/control", change); again(SOON_MS); }
async function order(wanted) {
  failed.hidden = true;
  try { await send({wanted}); } catch (error) { failed.hidden = false; failed.textContent = clean(error.message, 300); }
}
const form = limitsForm(send);

/* Minutes in which the worker did not run count as zero. */
function minutes(recent) {
  const found = {x: [], tokens: [], accepted: [], rejected: [], down: [], up: []}, last = Math.floor(doc.at_ms / 60000), at = new Map(recent.minute.map((minute, i) => [minute, i]));
  const from = Math.max(recent.minute[0] ?? last, last - MINUTES_MAX), size = Math.max(1, Math.ceil((last - from) / POINTS_MAX));
  for (let begin = from; begin < Math.max(last, from + 1); begin += size) {
    const sum = name => { let total = 0; for (let minute = begin; minute < begin + size; minute++) total += at.has(minute) ? recent[name][at.get(minute)] : 0; return total; };
    found.x.push(begin - last); found.tokens.push(sum("tokens") / size / 60); found.accepted.push(sum("accepted") / size); found.rejected.push(sum("rejected") / size); found.down.push(sum("down_bytes") / size / 60); found.up.push(sum("up_bytes") / size / 60);
  }
  return found;
}
const ago = minute => minute > -0.5 ? "now" : minute > -90 ? `−${Math.round(-minute)} min` : `−${Math.round(-minute / 60)} h`;
const clock = minute => new Date((Math.floor(doc.at_ms / 60000) + minute) * 60000).toLocaleTimeString([], {hour: "2-digit", minute: "2-digit", hour12: false});
const axis = {unit: "", format: short, tick: ago, name: clock, nice: [1, 2, 5, 10, 15, 30, 60, 120, 180, 240, 360]};
const rejected = doc => doc.rejected.reduce((sum, one) => sum + one.count, 0);

const parts = {
  tiles: [doc => [doc.last_tokens_per_s, doc.tokens_per_s, doc.accepted, doc.tokens_credited, doc.pending, doc.rejected, doc.down_bytes, doc.up_bytes, doc.policy, doc.head, doc.bundles], doc => [el("dl", {class: "tiles four"},
    tile("Speed", [short(doc.tokens_per_s), el("span", {class: "fine"}, " tokens/s")], doc.tokens_per_s === 0 && doc.last_tokens_per_s ? `${short(doc.last_tokens_per_s)} tokens/s when it last generated` : doc.policy < 0 ? "no policy is loaded yet" : doc.policy === doc.head ? `with policy ${count(doc.policy)}, the newest` : `with policy ${count(doc.policy)}; the newest is ${count(doc.head)}`),
    tile("Accepted rollouts", short(doc.accepted), `${count(doc.pending)} without a verdict, ${plural(doc.bundles.spooled, "bundle")} to upload`),
    tile("Tokens credited", short(doc.tokens_credited), doc.bundles.escrow ? `${plural(doc.bundles.escrow, "bundle")} in escrow until later ones pass` : "by receipts that the coordinator signed"),
    tile("Network since the start", [`↓ ${bytes(doc.down_bytes)}`], `↑ ${bytes(doc.up_bytes)}; ${plural(doc.peers, "peer")} linked`))]],
  speed: [doc => [doc.recent.minute.at(-1), doc.recent.minute.length], doc => {
    const found = minutes(doc.recent), begun = found.x[0] ?? 0;
    return [card("c-speed", "Tokens per second", begun < -1 ? `the last ${begun > -90 ? plural(-begun, "minute") : `${Math.round(-begun / 60)} hours`}` : null,
      found.x.length > 1 ? plot({lines: [{name: "tokens/s", x: found.x, y: found.tokens, colour: "generate"}], tall: true, ...axis, label: `Tokens per second by the minute, now ${short(doc.tokens_per_s)}`}) : el("p", {class: "empty"}, "The first point appears after a minute."))];
  }],
  became: [doc => [doc.accepted, doc.pending, doc.rejected], doc => {
    const refused = rejected(doc);
    return [card("c-became", "What became of rollouts", null, bar([["good", doc.accepted], ["wait", doc.pending], ["refused", refused]], `${doc.accepted} accepted, ${doc.pending} without a verdict, ${refused} rejected`, true),
      legend([["good", "accepted", count(doc.accepted)], ["wait", "no verdict yet", count(doc.pending)], ["refused", "rejected", count(refused)]]),
      doc.rejected.length ? el("ul", {class: "reasons"}, doc.rejected.slice(0, 6).map(one => el("li", {}, el("span", {}, clean(one.words, 120), el("small", {class: "mono"}, clean(one.reason, 40))), el("b", {}, count(one.count))))) : el("p", {class: "soft"}, "Nothing is rejected."))];
  }],
  verdicts: [doc => [doc.recent.minute.at(-1), doc.recent.minute.length], doc => {
    const {x, accepted, rejected: refused} = minutes(doc.recent);
    return [card("c-verdicts", "Verdicts per minute", null, legend([["good", "accepted"], ["refused", "rejected"]]), x.length > 1 ? plot({lines: [{name: "accepted", x, y: accepted, colour: "good"}, {name: "rejected", x, y: refused, colour: "refused"}], ...axis, label: "Rollouts accepted and rejected by the minute"}) : el("p", {class: "soft"}, "None yet."))];
  }],
  traffic: [doc => [doc.recent.minute.at(-1), doc.recent.minute.length, doc.swarm], doc => {
    const {x, down, up} = minutes(doc.recent);
    return [card("c-traffic", "Bytes per second", clean(doc.swarm, 300) || null, legend([["broadcast", "received"], ["accent", "sent"]]), x.length > 1 ? plot({lines: [{name: "received", x, y: down, colour: "broadcast"}, {name: "sent", x, y: up, colour: "accent"}], ...axis, format: bytes, label: "Bytes received and sent per second"}) : el("p", {class: "soft"}, "None yet."))];
  }],
  standing: [doc => [doc.standing, doc.worker.key], doc => {
    const {standing} = doc;
    if (!standing) return [];
    const place = standing.rank === null ? "no credited tokens yet" : `place ${count(standing.rank)} of ${plural(standing.contributors, "contributor")}, ${share(standing.tokens / Math.max(1, standing.all_tokens), 1)} of all tokens`;
    return [card("c-standing", standing.person ? "Your machines" : "Your place in this run", `${place}; as the coordinator counts what receipts credit`,
      table("Machines", ["machine", "accepted", "rejected", "tokens"], standing.machines.map(one => [el("div", {class: "rig", title: one.key}, el("bdi", {}, clean(one.name, 64) || "(no name)"), el("small", {class: "soft"}, el("span", {class: `dot ${STATES[one.state] ?? "off"}`}), ` ${clean(one.state, 20)}`, one.key === doc.worker.key && " · this machine")), count(one.accepted), count(one.rejected), short(one.tokens)])),
      standing.person && el("p", {class: "about gap"}, "Machines of person ", el("span", {class: "mono"}, standing.person), "."))];
  }],
  ledger: [doc => [doc.tokens_credited, doc.accepted, doc.pending, doc.bundles, doc.worker, doc.run], doc => [card("c-ledger", "Your standing in the ledger", "by receipts that the coordinator signed; this machine keeps them",
    facts([["credited", `${plural(doc.tokens_credited, "token")} of ${plural(doc.accepted, "accepted rollout")}`], ["in escrow", doc.bundles.escrow ? `${plural(doc.bundles.escrow, "accepted bundle")}, credited once later ones pass` : "nothing"], ["without a verdict", plural(doc.pending, "rollout")], ["your key", el("span", {class: "mono"}, doc.worker.key)]]),
    el("p", {class: "about gap"}, "This proves that the ledger has all of your receipts:"), command(`prime-node ledger verify ${doc.run.link} --receipts ${doc.worker.folder}`))]],
  about: [doc => [doc.run, doc.worker], doc => [card("c-about", "This worker", null, facts([["run", clean(doc.run.title, 200)], ["about", clean(doc.run.description, 400)], ["name", clean(doc.worker.name)], ["engine", clean(doc.worker.engine, 120)], ["folder", el("span", {class: "mono"}, doc.worker.folder)], ["join link", el("span", {class: "mono"}, doc.run.link)]].filter(row => row[1])))]],
};
const view = arranged(parts, [["tiles"], ["split", ["speed"], ["became"]], ["two", ["verdicts"], ["traffic"]], ["standing"]]), more = arranged(parts, [["two", ["ledger"], ["about"]]]);

/* The frame */
const title = el("h1"), linked = el("span", {class: "pill", title: "How this page is kept up to date"});
const say = (kind, text) => linked.replaceChildren(el("span", {class: `dot ${kind}`}), text);
function begin(...content) {
  if (!title.isConnected) root.replaceChildren(el("header", {class: "top"}, el("div", {class: "who"}, mark(), title), linked, el("span", {class: "fill"}), themes), main, el("footer", {}, el("p", {}, "Only this machine reaches this page. ", el("span", {class: "mono"}, "prime-node pause, resume, finish, limit"), " do the same in a terminal.")));
  if (main.firstChild !== content[0]) main.replaceChildren(...content);
}
function draw() {
  begin(state, view.root, form.root, more.root);
  title.replaceChildren(el("bdi", {}, clean(doc.worker.name) || "This machine"), el("span", {class: "soft"}, " for "), el("bdi", {}, clean(doc.run.title, 80)));
  document.title = `${doc.doing.headline} · ${clean(doc.worker.name)}`;
  show(doc.doing); view.update(doc); form.update(doc); more.update(doc);
}
const closed = el("section", {class: "card pad note", "aria-labelledby": "c-closed"}, el("h2", {id: "c-closed"}, "This page needs a new address"), el("p", {class: "about gap"}, "Each address opens the page once. A command on this machine makes another one:"), command("prime-node open"));

function merge(found) {
  const old = doc?.recent, from = found.recent.minute[0] ?? Infinity, keep = old ? old.minute.filter(minute => minute < from).length : 0;
  if (old) for (const name in found.recent) found.recent[name] = [...old[name].slice(0, keep), ...found.recent[name]].slice(-MINUTES_MAX);
  doc = found;
}
function again(ms = POLL_MS) { clearTimeout(timer); timer = setTimeout(load, ms); }
async function load() {
  if (isAsking) return again(SOON_MS);
  isAsking = true;
  let found = null;
  try {
    found = await ask(`/v1/node?since=${doc?.recent.minute.at(-1) ?? 0}`);
  } catch (error) {
    if (error.isForeign) { doc = null; title.textContent = "This machine's worker"; say("off", "closed"); begin(closed); return; }
    say("bad", "no answer");
    if (doc) show({...doc.doing, headline: "Ended", sentence: "The worker does not answer: it has ended, or this machine was asleep.", notice: ""}); else document.getElementById("wait")?.replaceChildren("The worker does not answer. The page tries again.");
    again();
  } finally { isAsking = false; }
  if (found) { again(); merge(found); say("", "live"); draw(); }
}
const start = () => beginSession().catch(() => {}).then(load);
document.addEventListener("visibilitychange", () => { clearTimeout(timer); if (document.hidden) { if (doc) say("off", "paused"); } else load(); });
addEventListener("hashchange", start);
start();
