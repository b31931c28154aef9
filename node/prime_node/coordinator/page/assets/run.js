/* The run view: is it learning, how far is it, who works, what is rejected. Each part is drawn again only when its data change. */
import {el, card, clean, named, count, plural, short, bytes, tile, time, share, words, mean} from "/page/{digest}-dom.js";
import {arranged} from "/page/{digest}-frame.js";
import {plot, bar, bars, legend, lanes} from "/page/{digest}-charts.js";

const tail = (values, n) => (values ?? []).slice(-n);
const sum = values => values.reduce((a, b) => a + b, 0);
const phases = {learning: "learning", complete: "complete", draining: "draining", paused: "paused", starting: "starting", waiting: "waiting for workers"};

function held(doc) {
  const trusted = doc.evaluations.filter(one => one.by === "trainer"), found = trusted.length ? trusted : doc.evaluations;
  const by = found.some(one => one.sampled != null) ? "sampled" : "greedy";
  return {by, trusted: trusted.length > 0, rows: found.filter(one => one[by] != null).sort((a, b) => a.policy - b.policy)};
}
function smooth(values) { let at = null; return values.map(v => v == null ? at : at = at == null ? v : at + .1 * (v - at)); }

const parts = {
  notes: [doc => [doc.now.waiting_for, doc.now.phase], doc => doc.now.waiting_for.length && doc.now.phase !== "learning" ? [el("p", {class: "card pad note"}, el("b", {}, "Waits for "), doc.now.waiting_for.map(one => clean(one, 200)).join("; "))] : []],
  tiles: [doc => [doc.now.step, doc.now.left_s, doc.now.states, doc.now.accepted, doc.now.refused, doc.now.tokens, doc.now.bytes_published, doc.evaluations, doc.now.phase], doc => {
    const {now, run} = doc, {rows, by} = held(doc), last = rows.at(-1), first = rows[0], refused = sum(Object.values(now.refused)), reward = mean(tail(doc.steps.reward, 10)), begun = mean(doc.steps.reward.slice(0, 10));
    const doing = ["generating", "idle", "fetching", "draining"].filter(s => now.states[s]).map(s => `${count(now.states[s])} ${s}`);
    if (now.states.banned) doing.push(`${count(now.states.banned)} banned`);
    return [el("dl", {class: "tiles"},
      last ? tile("Held-out accuracy", share(last[by], 1), rows.length > 1 ? `${by}, policy ${count(last.policy)}; ${share(first[by], 1)} at policy ${count(first.policy)}` : `${by}, policy ${count(last.policy)}`)
        : tile("Reward", reward == null ? "–" : reward.toFixed(2), reward == null ? now.head > 0 ? "no earlier step is recorded" : "no step is trained yet" : `mean of the newest steps; ${begun.toFixed(2)} in the first`),
      tile("Step", [count(Math.min(now.step, run.max_steps)), el("span", {class: "fine"}, ` of ${count(run.max_steps)}`)], now.phase === "complete" ? "all steps are trained" : now.step_s ? `${time(now.step_s)} a step, about ${time(now.left_s)} left` : "time left: not known yet",
        bar([["accent", now.step], ["line", Math.max(0, run.max_steps - now.step)]], `${now.step} of ${run.max_steps} steps`)),
      tile("Workers", count(now.active), doing.join(", ") || "no worker takes part now"),
      tile("Accepted rollouts", short(now.accepted), `${short(now.tokens)} tokens; ${share(refused / Math.max(1, refused + now.accepted), 1)} rejected`),
      tile("Published", bytes(now.bytes_published), `${plural(now.head + 1, "policy", "policies")}; ${plural(now.peers, "peer")} share${now.peers === 1 ? "s" : ""} them`))];
  }],
  learning: [doc => [doc.steps.step.length, doc.steps.step.at(-1), doc.evaluations], doc => {
    const {step, reward} = doc.steps, {rows, by, trusted} = held(doc), x = rows.map(one => one.policy), y = rows.map(one => one[by]);
    const most = Math.max(0, ...reward.filter(v => v != null), ...y), lows = Math.min(0, ...reward.filter(v => v != null));
    const lines = [{name: "reward", x: step, y: reward, colour: "accent", faint: true, silent: true}, {name: "reward, smoothed", x: step, y: smooth(reward), colour: "accent"}];
    if (rows.length) lines.push({name: `held-out, ${by}`, x, y, colour: "broadcast", dots: true});
    const ends = rows.filter(one => one[by + "_low"] != null), r = mean(tail(reward, 10));
    return [card("c-learning", "Is it learning?", null, legend([["accent", "reward of each step", r?.toFixed(2)], ...(rows.length ? [["broadcast", `held-out answers (${by}${trusted ? "" : ", by workers"}), 95 % interval`, y.at(-1).toFixed(2)]] : [])]),
      step.length || rows.length ? plot({lines, tall: true, format: v => v.toFixed(2), top: most <= 1 && lows >= 0 ? 1 : undefined, band: ends.length ? {x: ends.map(o => o.policy), low: ends.map(o => o[by + "_low"]), high: ends.map(o => o[by + "_high"]), colour: "broadcast"} : undefined,
        label: `Mean reward by step, now ${r?.toFixed(2) ?? "unknown"}${rows.length ? `; held-out accuracy ${rows.map(o => `${o[by].toFixed(2)} at policy ${o.policy}`).slice(-6).join(", ")}` : ""}`}) : el("p", {class: "empty"}, doc.now.head > 0 ? "No earlier step is recorded; the next one appears here." : "The first point appears when a step is trained."))];
  }],
  window: [doc => doc.now.window, doc => [card("c-window", "Groups on their way", null, doc.now.window.length ? el("table", {class: "plain"},
    el("thead", {}, el("tr", {}, ["step", "open", "at workers", "ready", "trained"].map((name, i) => el("th", {class: i ? "n" : "", scope: "col"}, name)))),
    el("tbody", {}, doc.now.window.slice(-5).map(s => el("tr", {}, [s.step, s.open, s.held, s.accepted - s.trained, s.trained].map((n, i) => el("td", {class: i ? "n" : ""}, count(n))))))) : el("p", {class: "soft"}, "No step is open."))]],
  holders: [doc => [doc.now.holders, doc.now.head], doc => {
    const {now, run} = doc, total = sum(now.holders);
    return [card("c-holders", `Who has policy ${count(Math.max(0, now.head))}?`, total > 0 && `${count(now.holders[0])} of ${count(total)}`, total === 0 ? el("p", {class: "soft"}, "No worker has reported its policy yet.") : bars(now.holders.map((n, i) => [i === 0 ? "newest" : i === 4 ? "4 or more behind" : `${i} behind`, n, i <= run.k ? "good" : "refused"])))];
  }],
  seconds: [doc => doc.steps.step.at(-1), doc => {
    const s = doc.steps, n = 60, x = tail(s.step, n), known = [["a step", mean(tail(s.seconds, n))], ["training", mean(tail(s.train, n))], ["a lease", mean(tail(s.generate, n))], ["a check", mean(tail(s.check, n))], ["broadcast", mean(tail(s.broadcast, n))]].filter(one => one[1] != null);
    return [card("c-seconds", "Where the time goes", `newest ${plural(x.length, "step")}`, known.length ? bars(known.map(([name, v], i) => [name, v, ["wait", "train", "generate", "check", "broadcast"][i]]), time) : el("p", {class: "soft"}, "Not measured yet."),
      x.length > 1 && [el("h3", {}, "Seconds of each step"), plot({lines: [{name: "step", x, y: tail(s.seconds, n), colour: "wait"}, {name: "training", x, y: tail(s.train, n), colour: "train"}], format: time, label: `Seconds of each of the newest ${x.length} steps, mean ${time(known[0]?.[1])}`})])];
  }],
  lag: [doc => doc.steps.step.at(-1), doc => {
    const s = doc.steps, x = s.step, lag = mean(tail(s.lag, 50)), slow = mean(tail(s.broadcast, 20));
    return [card("c-lag", "How stale is what is trained?", lag == null ? "not known yet" : `${lag.toFixed(1)} policies of at most ${doc.run.k}`,
      x.length > 1 && [plot({lines: [{name: "lag", x, y: s.lag, colour: "save"}], format: v => v.toFixed(1), top: Math.max(1, doc.run.k), label: `Mean lag by step, mean of the newest 50 ${lag?.toFixed(2)}`}),
        el("div", {class: "head gap"}, el("h3", {}, "Broadcast to the slowest worker"), el("p", {}, time(slow))), plot({lines: [{name: "usable after", x, y: s.broadcast, colour: "broadcast"}], format: time, label: `Seconds from publication until the slowest worker could use a policy; mean of the newest 20 ${time(slow)}`})])];
  }],
  refused: [doc => doc.now.refused, doc => {
    const rows = Object.entries(doc.now.refused).sort((a, b) => b[1] - a[1]);
    return [card("c-refused", "Rejected, by reason", plural(sum(rows.map(r => r[1])), "rollout"), rows.length ? bars(rows.slice(0, 8).map(([reason, n]) => [words(reason), n, "refused"])) : el("p", {class: "soft"}, "None."))];
  }],
  given: [doc => doc.contributors, doc => [card("c-given", "Tokens contributed", "credited so far, by the names that workers give themselves", doc.contributors.length ? bars(doc.contributors.slice(0, 8).map(([key, name, n, machines]) => [el("span", {title: key}, named(name || key.slice(-8)), machines > 1 && el("span", {class: "soft"}, ` · ${machines} machines`)), n, "generate"]), short) : el("p", {class: "soft"}, "Nothing is credited yet."))]],
  lanes: [doc => doc.events.at(-1)?.number, doc => {
    const spans = doc.events.filter(e => e.begin_ms != null && e.end_ms != null), end = Math.max(0, ...spans.map(e => e.end_ms)) / 1000, wide = Math.min(600, Math.max(10, 10 * (doc.now.step_s || 1)));
    const drawn = spans.map(e => ({begin: e.begin_ms / 1000, end: Math.max(e.end_ms, e.begin_ms + 1) / 1000,
      ...(e.kind === "lease" ? {lane: clean(e.name, 16) || clean(e.worker).slice(-6), colour: e.outcome === "redeemed" ? "generate" : "wait", title: `${clean(e.name)}: ${e.num_groups} groups of step ${e.step}, ${e.outcome}, ${time((e.end_ms - e.begin_ms) / 1000)}`}
        : e.kind === "check" ? {lane: "checks", colour: e.outcome === "accepted" ? "check" : "refused", title: `check of ${clean(e.name)}, step ${e.step}: ${words(e.outcome)}`}
        : e.kind === "usable" ? {lane: "broadcast", colour: "broadcast", title: `policy ${e.policy_version}: usable after ${time((e.end_ms - e.begin_ms) / 1000)}`}
        : {lane: "training", colour: e.kind === "batch" ? "train" : "publish", title: e.kind === "batch" ? `batch of step ${e.step}` : `policy ${e.policy_version} published`})}));
    return [card("c-lanes", "Who did what", `the newest ${time(wide)}`, legend([["generate", "generate"], ["check", "check"], ["refused", "rejected"], ["train", "batch"], ["publish", "policy"], ["broadcast", "broadcast"]]), drawn.length ? lanes(drawn, end, wide, "What trainer, workers and checks did in the newest seconds") : el("p", {class: "soft"}, "Nothing yet."))];
  }],
  events: [doc => [doc.events.at(-1)?.number], doc => {
    const shown = doc.events.filter(e => ["ban", "policy", "evaluation"].includes(e.kind)).slice(-7).reverse();
    const text = e => e.kind === "ban" ? [named(e.name), ` is banned: ${clean(e.outcome, 120)}`] : e.kind === "policy" ? `policy ${count(e.policy_version)} is published` : `policy ${count(e.policy_version)} is evaluated`;
    return [card("c-events", "Recent events", null, shown.length ? el("ol", {class: "events"}, shown.map(e => el("li", {}, el("time", {class: "mono", datetime: new Date(e.end_ms).toISOString()}, new Date(e.end_ms).toLocaleTimeString([], {hour12: false})), el("span", {class: e.kind === "ban" ? "bad" : ""}, text(e))))) : el("p", {class: "soft"}, "Nothing yet."))];
  }],
};
const LAYOUT = [["notes"], ["tiles"], ["split", ["learning"], ["stack", ["window"], ["holders"]]], ["thirds", ["seconds"], ["lag"], ["stack", ["refused"], ["given"]]], ["split", ["lanes"], ["events"]]];

export const runView = () => arranged(parts, LAYOUT);
export const phaseOf = now => phases[now.phase] ?? now.phase;
