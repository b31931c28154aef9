/* The views of checks and of joining. */
import {el, svg, card, clean, named, command, count, plural, words} from "/page/{digest}-dom.js";
import {bar, bars, legend} from "/page/{digest}-charts.js";
import {qrCode} from "/page/{digest}-qr.js";

const link = doc => `${location.origin}/#${doc.run.digest}`;
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
      card("c-bans", "Bans", doc.bans.length ? `${plural(doc.bans.length, "worker")}; anyone can check the evidence` : null, doc.bans.length ? el("div", {class: "wide", tabindex: 0, role: "group", "aria-label": "Bans"}, el("table", {class: "plain"},
        el("thead", {}, el("tr", {}, ["worker", "step", "why", "evidence"].map((name, i) => el("th", {class: i === 1 ? "n" : "", scope: "col"}, name)))),
        el("tbody", {}, doc.bans.map(ban => el("tr", {}, el("td", {}, named(ban.name), " ", el("span", {class: "mono soft"}, ban.key.slice(-6))), el("td", {class: "n"}, count(ban.step)), el("td", {}, clean(ban.reason, 240)),
          el("td", {}, el("a", {href: `/v1/evidence/${encodeURIComponent(ban.dossier)}`, download: ban.dossier}, "download", el("span", {class: "sr"}, ` the evidence against ${clean(ban.name)}`)))))))) : el("p", {class: "soft"}, "Nobody is banned.")),
      card("c-became", "What became of rollouts", null, bar([["good", doc.now.accepted], ["refused", refused]], `${doc.now.accepted} accepted, ${refused} refused`, true), legend([["good", "accepted", count(doc.now.accepted)], ["refused", "refused", count(refused)]]), reasons.length > 0 && bars(reasons.map(([reason, n]) => [words(reason), n, "refused"])))),
    card("c-prove", "Check it yourself", "this page proves nothing; these commands do", el("div", {class: "steps"}, el("p", {}, "Every published policy, its signatures and its chain:"), command(`prime-node verify ${link(doc)}`), el("p", {}, "The ledger of settled receipts:"), command(`prime-node ledger verify ${link(doc)}`), el("p", {}, "A ban, with the file from above:"), command("prime-node evidence verify FILE"))));
  }};
}

export function joinView() {
  const root = el("div", {class: "view"});
  let known = "";
  return {root, update(doc) {
    if (known === doc.run.digest) return;
    known = doc.run.digest;
    const code = qrCode(link(doc)), {run} = doc;
    root.replaceChildren(card("c-lend", "Lend a machine", "no account, no payment; Ctrl-C ends it and loses nothing",
      el("div", {class: "joinrow"}, el("ol", {}, el("li", {}, "What can this machine do, and does the run answer?", command(`prime-node doctor ${link(doc)}`)), el("li", {}, "Lend it:", command(`prime-node join ${link(doc)}`)), el("li", {}, "No GPU, but bandwidth and a disk? Pass checkpoints on:", command(`prime-node seed ${link(doc)}`))),
        code && svg("svg", {class: "qr", viewBox: `-3 -3 ${code.length + 6} ${code.length + 6}`, role: "img", "aria-label": "The join link as a QR code"}, svg("rect", {x: -3, y: -3, width: code.length + 6, height: code.length + 6, fill: "#fff"}),
          svg("path", {fill: "#000", d: code.flatMap((row, y) => row.map((dark, x) => dark ? `M${x} ${y}h1v1h-1z` : "")).join("")})))),
    card("c-what", "What is trained", null, el("dl", {class: "facts"}, [["run", clean(run.title, 200)], ["about", clean(run.description, 500)], ["environments", run.environments.map(one => clean(`${one.name} (${one.id})`, 120)).join(", ")],
      ["a step", `${plural(run.groups_per_step, "problem")} × ${plural(run.rollouts_per_group, "completion")} of at most ${plural(run.completion_tokens_max, "token")}, temperature ${run.temperature}`], ["steps", count(run.max_steps)], ["staleness", `sampling may be ${plural(run.k, "policy", "policies")} behind training`], ["created", new Date(run.created_at).toLocaleString()], ["digest", run.digest]]
      .filter(row => row[1]).map(([name, text]) => [el("dt", {}, name), el("dd", {class: name === "digest" ? "mono" : ""}, text)]))));
  }};
}
