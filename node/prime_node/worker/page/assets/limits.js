/* The form of the limits. It is filled again only while its person has changed nothing. */
import {el, card} from "/page/{digest}-dom.js";

const NUMBERS = {
  upload_mbit_per_s: ["Upload to other workers, Mbit/s", {min: 0, step: "any"}], download_mbit_per_s: ["Download of policies, Mbit/s", {min: 0, step: "any"}],
  threads: ["Processor threads", {min: 1, step: 1}], gpu_memory_share: ["Share of the GPU's memory, %", {min: 1, max: 100, step: "any"}],
};
const CHECKS = {on_battery: "on battery power too", when_busy: "while other programs use the processor too", when_gpu_busy: "while other programs use the GPU too", when_in_use: "while someone uses keyboard and mouse too"};
const SCALE = {gpu_memory_share: 100};

export function limitsForm(send) {
  const fields = {}, notes = {}, said = el("p", {role: "status"});
  let shown = "", isDirty = false;
  const input = (name, attributes) => fields[name] = el("input", {id: `l-${name}`, oninput: () => { isDirty = true; said.textContent = ""; said.className = ""; save.disabled = false; }, ...attributes});
  const check = (name, text) => el("label", {class: "check"}, input(name, {type: "checkbox"}), el("span", {}, text));
  const number = name => { const [text, bounds] = NUMBERS[name]; notes[name] = el("small", {id: `n-${name}`}); return el("div", {class: "field"}, el("label", {for: `l-${name}`}, text), input(name, {type: "number", inputmode: "decimal", "aria-describedby": `n-${name}`, ...bounds}), notes[name]); };
  const save = el("button", {class: "main", type: "submit"}, "Save limits");
  const form = el("form", {class: "form", onsubmit: submit},
    el("fieldset", {}, el("legend", {}, "It computes"),
      el("div", {class: "field"}, el("span", {class: "name", id: "n-hours"}, "only between (empty: at all hours)"), el("div", {class: "span", role: "group", "aria-labelledby": "n-hours"}, input("from", {type: "time", "aria-label": "from"}), "and", input("to", {type: "time", "aria-label": "until"}))),
      Object.entries(CHECKS).map(([name, text]) => check(name, text))),
    el("fieldset", {}, el("legend", {}, "Network"), number("upload_mbit_per_s"), number("download_mbit_per_s")),
    el("fieldset", {}, el("legend", {}, "Processor and GPU"), number("threads"), number("gpu_memory_share")),
    el("div", {class: "save"}, save, said));
  const root = card("c-limits", "Limits", "they are kept over restarts; outside of its hours it is paused", form);

  function values() {
    const {from, to} = fields, found = {hours: from.value && to.value ? `${from.value}-${to.value}` : ""};
    if (!from.value !== !to.value) throw new Error("Give both hours, or none.");
    for (const name in CHECKS) found[name] = fields[name].checked;
    for (const name in NUMBERS) found[name] = fields[name].value === "" ? null : Number(fields[name].value) / (SCALE[name] ?? 1);
    return found;
  }
  async function submit(event) {
    event.preventDefault();
    try {
      const sent = send({limits: values()});
      save.disabled = true;
      await sent;
      isDirty = false; shown = "";
      said.className = ""; said.textContent = "Saved. They hold from now on.";
    } catch (error) { said.className = "bad"; said.textContent = error.message; save.disabled = false; }
  }
  return {root, update({limits, defaults, notes: later}) {
    const now = JSON.stringify([limits, defaults, later]);
    if (isDirty || now === shown) return;
    shown = now;
    save.disabled = true;
    [fields.from.value, fields.to.value] = limits.hours ? limits.hours.split("-") : ["", ""];
    for (const name in CHECKS) fields[name].checked = limits[name];
    for (const name in NUMBERS) {
      const scale = SCALE[name] ?? 1, text = n => String(Math.round(n * scale * 1e4) / 1e4), unlimited = name.endsWith("per_s") && !defaults[name];
      fields[name].value = limits[name] == null ? "" : text(limits[name]);
      fields[name].placeholder = unlimited ? "no limit" : text(defaults[name]);
      notes[name].textContent = later[name] ? `Takes effect ${later[name]}.` : name === "threads" ? "Takes effect with the next work." : "";
    }
  }};
}
