/* The views of checks, of the swarm, of the ledger and of joining. */
import {el, svg, card, clean, facts, named, command, count, plural, short, bytes, time, share, table, words} from "/page/{digest}-dom.js";
import {bar, bars, legend, plot} from "/page/{digest}-charts.js";
import {qrCode} from "/page/{digest}-qr.js";

/* A visitor's invitation, which follows the digest in the link, is part of the commands too. */
const invitation = () => /^#[0-9a-f]{64}(\.[0-9A-Za-z_=-]{1,4096})$/.exec(location.hash)?.[1] ?? "";
const link = doc => `${location.origin}/#${doc.run.digest}`;
const joinLink = doc => link(doc) + (location.hash.startsWith(`#${doc.run.digest}`) ? invitation() : "");
const sum = values => values.reduce((a, b) => a + b, 0);

export function checksView() {
  const root = el("div", {class: "view"});
  let known = "";
  return {root, update(doc) {
    const now = JSON.stringify([doc.now.refused, doc.now.accepted, doc.bans]);
    if (now === known) return;
    known = now;
    const reasons = Object.entries(doc.now.refused).sort((a, b) => b[1] - a[1]), refused = sum(reasons.map(r => r[1]));
    root.replaceChildren(el("div", {class: "split"},
      card("c-bans", "Bans", doc.bans.length ? `${plural(doc.bans.length, "worker")}; anyone can check the evidence` : null, doc.bans.length ? table("Bans", ["worker, and why", "step", "evidence"], doc.bans.map(ban => [[named(ban.name), " ", el("span", {class: "mono soft"}, ban.key.slice(-6)), el("div", {class: "soft"}, clean(ban.reason, 240))], count(ban.step),
        el("a", {href: `/v1/evidence/${encodeURIComponent(ban.dossier)}`, download: ban.dossier}, "download", el("span", {class: "sr"}, ` the evidence against ${clean(ban.name)}`))])) : el("p", {class: "soft"}, "No worker is banned.")),
      card("c-became", "What became of rollouts", null, bar([["good", doc.now.accepted], ["refused", refused]], `${doc.now.accepted} accepted, ${refused} rejected`, true), legend([["good", "accepted", count(doc.now.accepted)], ["refused", "rejected", count(refused)]]), reasons.length > 0 && bars(reasons.map(([reason, n]) => [words(reason), n, "refused"])))),
    card("c-prove", "Check it yourself", "this page proves nothing; these commands do", el("div", {class: "steps"}, el("p", {}, "Every published policy, its signatures and its chain:"), command(`prime-node verify ${link(doc)}`), el("p", {}, "The ledger of settled receipts:"), command(`prime-node ledger verify ${link(doc)}`), el("p", {}, "A ban, with the file from above:"), command("prime-node evidence verify FILE"))));
  }};
}

const unknown = (id, ...lines) => card(id, "What this page does not know", null, el("ul", {class: "about plainlist"}, lines.map(line => el("li", {}, line))));

/* A view that is drawn again when its part of the document has changed. */
function drawn(signature, make) {
  const root = el("div", {class: "view"});
  let known = "";
  return {root, update(doc) {
    const now = JSON.stringify(signature(doc));
    if (now !== known) { known = now; root.replaceChildren(...make(doc)); }
  }};
}

export const swarmView = () => drawn(doc => [doc.now.holders, doc.now.head, doc.now.swarm, doc.now.downloads, doc.now.routes, doc.now.usable, doc.now.bytes_published, doc.steps.step.at(-1)], doc => {
  const {now, run, steps} = doc, got = now.downloads, own = got.operator_share, total = sum(now.holders), whole = now.routes.find(route => route[0] === null)?.[1], x = steps.step;
  return [el("div", {class: "split"},
    card("c-has", `Who has policy ${count(Math.max(0, now.head))}?`, total > 0 && `${share(now.holders[0] / total)} of ${plural(total, "worker")}`, total > 0 ? [bar(now.holders.map((n, i) => [i === 0 ? "good" : i <= run.k ? "accent" : "refused", n]), `${now.holders[0]} of ${total} workers have the newest policy`, true),
      bars(now.holders.map((n, i) => [i === 0 ? "newest" : i === 4 ? "4 or more behind" : `${i} behind`, n, i === 0 ? "good" : i <= run.k ? "accent" : "refused"])), el("p", {class: "fine gap"}, `Work of workers that are more than ${plural(run.k, "policy", "policies")} behind is not accepted.`)] : el("p", {class: "soft"}, "No worker has reported its policy yet.")),
    card("c-came", "Where checkpoints came from", "as workers report it, mean", got.workers ? [bar([["good", 1 - own], ["accent", own]], `${share(1 - own)} from other contributors`, true), legend([["good", "other contributors", share(1 - own, 1)], ["accent", "the operator's machines", share(own, 1)]]), facts([["workers that report", count(got.workers)], ["links of a worker", got.links.toFixed(1)]])] : el("p", {class: "soft"}, "Nothing is reported yet."))),
  el("div", {class: "split"},
    card("c-usable", "Time until a policy could be used", "as workers report it", now.usable.length ? table("Time until a policy could be used", ["policy", "workers", "half of them", "nine of ten"], [...now.usable].reverse().map(one => [count(one.policy_version), count(one.workers), time(one.median_s), time(one.most_s)])) : el("p", {class: "soft"}, "No worker has reported a time yet."),
      x.length > 1 && [el("h3", {}, "Nine of ten workers, by step"), plot({lines: [{name: "usable after", x, y: steps.broadcast, colour: "broadcast"}], format: time, label: "Seconds from publication until nine of ten workers could use a policy, by step"})]),
    el("div", {class: "stack"}, card("c-links", "Who passes it on", null, facts([["peers that announced themselves", count(now.swarm.announced)], ["reached by the coordinator, so listed", count(now.swarm.listed)], ["guests, which only pass on", count(now.swarm.guests)], ["linked with the coordinator's own peer", count(now.swarm.linked)], ["published so far", bytes(now.bytes_published)]])),
      card("c-routes", `What policy ${count(Math.max(0, now.head))} takes to download`, null, now.routes.length ? table("Bytes of the newest policy", ["from", "bytes", "of the whole"], now.routes.map(([base, n]) => [base === null ? "nothing" : `policy ${count(base)}`, bytes(n), whole ? share(n / whole, 1) : "–"])) : el("p", {class: "soft"}, "Nothing is published yet.")))),
  card("c-fetching", "Downloads in progress", got.fetching ? plural(got.fetching, "worker") : null, got.shown.length ? bars(got.shown.map(([name, done, all]) => [named(name), Math.floor(100 * done / all), "accent"]), percent => `${percent} %`, 100) : el("p", {class: "soft"}, "No worker reported one in its last heartbeat."),
      got.fetching > got.shown.length && el("p", {class: "fine gap"}, `and ${plural(got.fetching - got.shown.length, "more worker", "more workers")}`)),
  unknown("c-unknown", "Which pieces a peer holds: peers tell each other, not the coordinator.", "Workers that only download and never announce an address are counted above, not listed as peers.")];
});

export const ledgerView = () => drawn(doc => [doc.now.ledger, doc.now.accepted, doc.now.refused, doc.now.tokens, doc.contributors], doc => {
  const {now} = doc, refused = sum(Object.values(now.refused)), given = sum(doc.contributors.map(one => one[2]));
  return [el("div", {class: "split"},
    card("c-who", "Tokens credited", `${short(now.tokens)} by all workers`, doc.contributors.length ? table("Tokens by contributor", ["contributor", "tokens", "share"], [...doc.contributors.map(([key, name, n, machines]) => [[named(name), " ", el("span", {class: "mono soft"}, key.slice(-6)), machines > 1 && el("span", {class: "soft"}, ` · ${machines} machines`)], count(n), share(n / Math.max(1, now.tokens), 1)]), ...(now.tokens > given ? [[el("span", {class: "soft"}, "all others"), count(now.tokens - given), share((now.tokens - given) / now.tokens, 1)]] : [])]) : el("p", {class: "soft"}, now.accepted ? "No tokens are credited yet: the newest accepted bundles are in escrow." : "Nothing is accepted yet.")),
    card("c-chain", "The ledger", null, facts([["receipts", count(now.ledger.entries)], ["accepted rollouts", count(now.accepted)], ["rejected rollouts", count(refused)], ["digest of the last line", el("span", {class: "mono"}, now.ledger.digest)]]),
      el("p", {class: "about gap"}, "Each line is a receipt that the coordinator signed and gave to the worker. It names the line before it, so anyone who kept an older copy notices if a line is taken out or changed."), el("p", {class: "gap"}, el("a", {href: "/v1/ledger/0"}, "The first lines"), " · ", el("a", {href: "/v1/ledger"}, "the signed end")))),
  card("c-own", "Find your own receipts", "this page proves nothing; these commands do", el("div", {class: "steps"}, el("p", {}, "Check every line, and that each receipt of your machine is among them:"), command(`prime-node ledger verify ${link(doc)} --receipts FOLDER`), el("p", {}, "Keep a copy:"), command(`prime-node ledger export ${link(doc)}`))),
  unknown("c-unknown", "What escrow will credit: the newest bundles of a worker count as accepted, and their tokens are credited once later ones pass an audit.", "Who a worker is: names are what workers call themselves; only the key counts.", "Rewards or payments: the run pays nothing, and the coordinator keeps no account.")];
});

export function joinView() {
  const root = el("div", {class: "view"});
  let known = "";
  return {root, update(doc) {
    if (known === doc.run.digest) return;
    known = doc.run.digest;
    const code = qrCode(joinLink(doc)), {run} = doc;
    root.replaceChildren(card("c-lend", "Lend a machine", "no account, no payment; Ctrl-C ends it and loses nothing",
      el("div", {class: "joinrow"}, el("ol", {}, el("li", {}, "What can this machine do, and does the run answer?", command(`prime-node doctor ${joinLink(doc)}`)), el("li", {}, "Lend it:", command(`prime-node join ${joinLink(doc)}`)), el("li", {}, "No GPU, but bandwidth and a disk? Pass checkpoints on:", command(`prime-node seed ${link(doc)}`))),
        code && svg("svg", {class: "qr", viewBox: `-3 -3 ${code.length + 6} ${code.length + 6}`, role: "img", "aria-label": "The join link as a QR code"}, svg("rect", {x: -3, y: -3, width: code.length + 6, height: code.length + 6, fill: "#fff"}),
          svg("path", {fill: "#000", d: code.flatMap((row, y) => row.map((dark, x) => dark ? `M${x} ${y}h1v1h-1z` : "")).join("")})))),
    card("c-what", "What is trained", null, el("dl", {class: "facts"}, [["run", clean(run.title, 200)], ["about", clean(run.description, 500)], ["environments", run.environments.map(one => clean(`${one.name} (${one.id})`, 120)).join(", ")],
      ["a step", `${plural(run.groups_per_step, "problem")} × ${plural(run.rollouts_per_group, "completion")} of at most ${plural(run.completion_tokens_max, "token")}, temperature ${run.temperature}`], ["steps", count(run.max_steps)], ["staleness", `sampling may be ${plural(run.k, "policy", "policies")} behind training`], ["created", new Date(run.created_at).toLocaleString()], ["digest", run.digest]]
      .filter(row => row[1]).map(([name, text]) => [el("dt", {}, name), el("dd", {class: name === "digest" ? "mono" : ""}, text)]))));
  }};
}
