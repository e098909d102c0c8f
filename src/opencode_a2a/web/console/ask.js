// What waits for a person: the card of a permission, of questions or of a plan.
import { call } from "./api.js";
import { long, newFile, patchView } from "./diff.js";
import { button, clock, fill, h, when } from "./dom.js";
import { inline } from "./markdown.js";

const WANTS = {
  bash: "run a command", edit: "change a file", write: "write a file", read: "read a file",
  external_directory: "use files outside of its directory", webfetch: "fetch a web page",
  task: "start a sub-agent", doom_loop: "repeat the same call once more",
};
const LABELS = { once: "Allow once", task: "Allow for this task", context: "Allow for this conversation", always: "Always allow" };
const SETTLED = { once: "Allowed once", always: "Always allowed", rejected: "Denied", replied: "Answered", approved: "Approved", expired: "Nobody answered", void: "No longer needed" };
const INERT_MS = 300;
let number = 0;

export function askCard(asked, more) {
  const title = `ask-${++number}`;
  const { details } = asked;
  const type = asked.type ?? asked.interrupt_type;
  const permission = type === "permission", plan = type === "plan";
  const error = h("p", { class: "bad", role: "alert" });
  const questions = details.questions ?? [];
  const wants = WANTS[details.permission] ?? `use ${details.permission}`;
  const heading = plan ? "Carry out this plan?" : permission ? `May OpenCode ${wants}?` : questions.length > 1 ? `OpenCode asks ${questions.length} questions` : "OpenCode asks";
  const card = h("section", { class: "ask", "aria-labelledby": title, tabindex: "-1", "data-request": asked.request_id },
    h("header", {}, h("h3", { id: title }, heading), asked.expires_at && when(asked.expires_at, "left")),
    permission ? preview(details) : null);
  const reply = (method, params) => answer(() => call(`a2a.interrupt.${method}`, { request_id: asked.request_id, ...params }));
  const answer = async (send) => {
    const buttons = [...card.querySelectorAll("button")];
    buttons.forEach((one) => (one.disabled = true));
    error.textContent = "";
    try {
      await send();
      card.classList.add("sent");
      error.textContent = "";
      more?.answered?.();
    } catch (raised) {
      error.textContent = raised.message;
      buttons.forEach((one) => (one.disabled = false));
    }
  };
  const notes = [
    details.origin && `Asked by the sub-agent “${details.origin.title}”.`,
    asked.expires_at && `If nobody answers by ${clock(asked.expires_at)}, ${asked.default}.`,
  ];
  const form = plan ? h("div", { class: "buttons" }, button("Go", () => answer(() => more.say("go")), "primary", { "data-key": "a" }), h("span", { class: "note" }, "Or say below what to change.")) : permission ? permissionForm(details, reply) : questionForm(questions, reply);
  card.append(form,
    h("p", { class: "note" }, notes.filter(Boolean).join(" ")), error);
  // A click that was meant for what stood here before must not approve anything.
  form.inert = true;
  setTimeout(() => (form.inert = false), INERT_MS);
  return card;
}

function preview({ permission, patterns, metadata = {}, tool }) {
  const { input = {} } = tool ?? {};
  if (metadata.diff) return patchView(metadata.diff, input.filePath ?? metadata.filepath);
  if (input.content && input.filePath) return newFile(input.filePath, input.content);
  const text = input.command ?? metadata.command ?? metadata.url ?? input.url;
  if (text) return [metadata.description ?? input.description ? h("p", {}, metadata.description ?? input.description) : null, long(text.split("\n"))].flat();
  const shown = (patterns ?? []).filter((one) => one !== "*").join("\n");
  return long((shown || JSON.stringify(tool?.input ?? permission, null, 2)).split("\n"));
}

function permissionForm({ replies = ["once", "reject"], scopes = [], always }, reply) {
  const yes = replies.filter((one) => one !== "reject").map((one) =>
    button(LABELS[one] ?? `Allow: ${one}`, () => reply("permission.reply", { reply: one }), one === "once" ? "primary" : "",
      { "data-key": one === "once" ? "a" : null, title: one === "always" ? `Always: ${(always ?? []).join(", ")}` : null }));
  yes.splice(1, 0, ...scopes.map((scope) => button(LABELS[scope] ?? scope, () => reply("permission.reply", { reply: "once", scope }), "", { title: `Also: ${(always ?? []).join(", ")}` })));
  const reason = h("input", { "aria-label": "Why not, for the agent (optional)", placeholder: "Why not? The agent reads this (optional)" });
  const form = h("form", { class: "reason", hidden: true, onsubmit: (event) => {
    event.preventDefault();
    reply("permission.reply", { reply: "reject", ...(reason.value.trim() && { message: reason.value.trim() }) });
  } }, reason, h("button", { class: "danger" }, "Deny"));
  const deny = button("Deny…", () => {
    form.hidden = !form.hidden;
    deny.setAttribute("aria-expanded", !form.hidden);
    if (!form.hidden) reason.focus();
  }, "", { "data-key": "d", "aria-expanded": "false" });
  return h("div", {}, h("div", { class: "buttons" }, yes, deny), form);
}

function questionForm(questions, reply) {
  const name = `question-${number}`;
  const fields = questions.map((question, i) => {
    const kind = question.multiple ? "checkbox" : "radio";
    const options = (question.options ?? []).map((option) => h("label", { class: "option" },
      h("input", { type: kind, name: `${name}-${i}`, value: option.label }),
      h("span", {}, h("b", {}, option.label), option.description && h("small", {}, option.description))));
    const own = question.custom !== false && h("input", { class: "own", "aria-label": "Your own answer", placeholder: options.length ? "Or say it in your own words" : "Your answer" });
    return h("fieldset", {}, h("legend", {}, inline(question.question || question.header)), options, own);
  });
  return h("form", { onsubmit: (event) => {
    event.preventDefault();
    const answers = fields.map((field) => [
      ...[...field.querySelectorAll("input:checked")].map((input) => input.value),
      ...[...field.querySelectorAll(".own")].map((input) => input.value.trim()).filter(Boolean),
    ]);
    const open = answers.findIndex((given) => !given.length);
    if (open >= 0) fields[open].querySelector("input")?.focus();
    else reply("question.reply", { answers });
  } }, fields, h("div", { class: "buttons" }, h("button", { class: "primary", "data-key": "a" }, "Answer"),
    button("Dismiss", () => reply("question.reject", {}), "", { "data-key": "d" })));
}

// How it was settled, in place of the card.
export function settled(card, { resolution, by, reason }, time) {
  const text = `${SETTLED[resolution] ?? resolution}${by ? ` by ${by}` : ""}${time ? `, ${clock(time)}` : ""}${reason ? `: ${reason}` : ""}`;
  const line = h("p", { class: `note settled ${resolution === "rejected" ? "bad" : ""}` }, text);
  if (!card) return line;
  // What was allowed stays readable.
  const about = card.querySelector("h3").textContent;
  const body = [...card.querySelectorAll(":scope > pre, :scope > .diff")];
  card.replaceWith(h("details", { class: "asked" }, h("summary", {}, h("span", { class: "name" }, about), line), body));
  return line;
}
