// What waits for a person: the card of a permission, of questions, of a plan or of a sign-in.
import { call, say, session, tryAgain } from "./api.js";
import { button, clock, h, when } from "./dom.js";
import { inline } from "./markdown.js";
import { marked, visible } from "./odd.js";
import { subject } from "./subject.js";

const WANTS = {
  bash: "run a command", edit: "change a file", write: "write a file", read: "read a file",
  external_directory: "use files outside of its directory", webfetch: "fetch a web page",
  task: "start a sub-agent", doom_loop: "repeat the same call once more", shell: "run a command",
};
const LABELS = { once: "Allow once", task: "Allow for this task", context: "Allow for this conversation", always: "Always allow" };
const SETTLED = { once: "Allowed once", always: "Always allowed", rejected: "Denied", replied: "Answered", approved: "Approved", retried: "Tried again", expired: "Nobody answered", void: "No longer needed" };
const SCOPED = { task: "Allowed for this task", context: "Allowed for this conversation" };
const INERT_MS = 300;
const STILL_MS = 1000;
let number = 0, still;

// Cards that come or go move the others: a click that was meant for what stood there before must not approve anything.
export function hold() {
  const all = () => document.querySelectorAll(".ask .allowing");
  all().forEach((one) => (one.inert = true));
  clearTimeout(still);
  still = setTimeout(() => all().forEach((one) => (one.inert = false)), STILL_MS);
}

export function askCard(asked, more) {
  const title = `ask-${++number}`, about = `about-${number}`;
  const { details } = asked;
  const type = asked.type ?? asked.interrupt_type;
  const permission = type === "permission", plan = type === "plan";
  const error = h("p", { class: "bad", role: "alert" });
  const questions = details.questions ?? [];
  const wants = Object.hasOwn(WANTS, details.permission ?? "") ? WANTS[details.permission] : `use ${visible(details.permission ?? "something")}`;
  const heading = plan ? "Carry out this plan?" : permission ? `May OpenCode ${wants}?` : questions.length > 1 ? `OpenCode asks ${questions.length} questions` : "OpenCode asks";
  const head = h("h3", { id: title }, heading);
  const named = [asked.number && `Request ${asked.number}`, more?.task].filter(Boolean);
  const card = h("section", { class: "ask", "aria-labelledby": named.length ? `${title} ${about}` : title, tabindex: "-1", "data-request": asked.request_id },
    h("header", {}, head, asked.expires_at && when(asked.expires_at, "left")),
    named.length ? h("p", { class: more?.task ? "note" : "sr", id: about }, named[0], named.length > 1 && " of ", named[1]) : null);
  // A page without a session answers by a way of its own.
  const send = more?.send ?? ((method, params) => call(`a2a.interrupt.${method}`, { request_id: asked.request_id, ...params }));
  const reply = (method, params) => answer(() => send(method, params));
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
    details.origin && ["Asked by the sub-agent ", h("code", {}, marked(details.origin.title)), ". "],
    asked.expires_at && `If nobody answers by ${clock(asked.expires_at)}, ${asked.default}.`,
  ];
  const form = plan ? planForm(() => answer(() => more.send ? send("plan.go") : say("", { files: [{ data: { reply: "go", request_id: asked.request_id } }], taskId: more.taskId })), more, reply) : permission ? permissionForm(details, reply) : questionForm(questions, reply);
  if (permission || plan) readFirst(card, head, plan ? h("div", { class: "subject" }, more.plan) : subject(details), form.firstChild);
  card.append(form,
    h("p", { class: "note" }, notes), error);
  form.inert = true;
  setTimeout(() => (form.inert = false), INERT_MS);
  if (permission || plan) form.firstChild.inert = true;
  hold();
  return card;
}

const planForm = (go, { elsewhere, send }, reply) => h("div", { class: "answers" },
  h("fieldset", { class: "allowing", "aria-label": "Carry it out" }, h("div", { class: "buttons" }, button("Go", go, "primary", { "data-key": "a" }))),
  send ? h("div", { class: "buttons" }, button("Drop it and end the task", () => reply("plan.drop"), "", { "data-key": "d" }))
    : h("p", { class: "note" }, elsewhere ? "To change the plan, open its task." : "Or say below what to change."));

// A provider that refuses the key: somebody has to sign in to it in OpenCode.
export function signInCard(task, link, answered, send = () => tryAgain(task, "Try again")) {
  const title = `ask-${++number}`;
  const error = h("p", { class: "bad", role: "alert" });
  const again = button("Try again", async () => {
    again.disabled = true;
    error.textContent = "";
    try {
      await send();
      answered?.();
    } catch (raised) {
      error.textContent = raised.message;
      again.disabled = false;
    }
  }, "primary", { "data-key": "a" });
  const said = (task.status.message?.parts ?? []).map((part) => part.text ?? "").join("\n");
  return h("section", { class: "ask", "aria-labelledby": title, tabindex: "-1" }, h("header", {}, h("h3", { id: title }, "The model provider refused the key"), when(task.status.timestamp)),
    link && h("p", { class: "note" }, link), h("p", { class: "said" }, visible(said)), h("div", { class: "buttons" }, again), error);
}

// Nothing can be allowed before its beginning, and then its end, were on the screen. The end alone
// proves nothing: the page may have followed the conversation to it.
function readFirst(card, first, body, allowing) {
  const last = h("div", { class: "end", tabindex: "-1" }, h("span", { class: "sr" }, "The end of what is asked for."));
  const unseen = [first, last];
  const note = h("p", { class: "note unread", hidden: true }, "You can go on when you have seen all of it. ", button("Show the rest", () => {
    const [place] = unseen;
    place.scrollIntoView({ block: "center" });
    (place === last ? last : card).focus({ preventScroll: true });
  }, "small"));
  card.append(note, body, last);
  allowing.disabled = true;
  const watch = new IntersectionObserver((entries) => {
    if (entries.some((one) => one.isIntersecting)) {
      watch.unobserve(unseen.shift());
      if (unseen.length) return watch.observe(unseen[0]);
    }
    note.hidden = !unseen.length;
    allowing.disabled = unseen.length > 0;
  });
  watch.observe(first);
}

// Programs that run or fetch whatever they are told, or remove it: a pattern for them is for everything.
const WIDE = new RegExp("^(?:\\S*/)?(?:(?:ba|da|z|k|c|tc|fi|a)?sh|busybox|pwsh|powershell|cmd|env|xargs|sudo|doas|su|find|fd|eval|exec|source|\\.|command|builtin|nohup|time|timeout|nice|setsid|watch|parallel|" +
  "python[\\d.]*|pypy\\d*|node|nodejs|deno|bun|ruby|perl|php|lua|tclsh|osascript|awk|gawk|mawk|sed|vi|vim|ed|emacs|make|npx|bunx|uvx|pipx|npm|pnpm|yarn|pip\\d*|uv|go|cargo|git|" +
  "curl|wget|ssh|scp|sftp|rsync|nc|ncat|socat|telnet|ftp|docker|podman|kubectl|helm|terraform|ansible\\S*|gh|aws|gcloud|az|rm|dd|shred|truncate|mv|cp|ln|tee|install|tar|chmod|chown|mkfs\\S*|mount|" +
  "chroot|unshare|nsenter|systemctl|systemd-run|launchctl|crontab|at|tmux|screen|script|expect|gdb|strace|java|dotnet|psql|mysql|sqlite3|mongosh|redis-cli|apt(?:-get)?|dnf|yum|brew|kill|pkill|killall)(?: (?:-\\S*|run|exec))* \\*$");
// So is one for a home directory, or for all that lies below a place at the root.
const wide = (pattern) => /^[./~]*\**$/.test(pattern) || /^(?:\/(?:home|Users))?\/[^/*]+\/\*$/.test(pattern) || WIDE.test(pattern);

function permissionForm({ permission, patterns = [], replies = ["once", "reject"], scopes = [], scope_text, always: proposed = [], tool, tells_reason = true }, reply) {
  const granted = `grants-${number}`;
  const commands = permission === "bash" || permission === "shell";
  // For the service, a pattern that is the command itself is none, even if it ends with a star.
  const always = proposed.filter((one) => !commands || replies.includes("always") || !(patterns.includes(one) || one === tool?.input?.command));
  const allowed = scope_text ?? always.join(", "); // a replica of the version before has no text
  const broad = always.filter(wide);
  const everything = always.includes("*");
  const what = everything ? `every use of ${visible(permission)}, whatever it is for` : null;
  const sure = h("div", { class: "sure", hidden: true, role: "group", "aria-label": "Are you sure?" });
  const wider = [...scopes.map((scope) => [scope, { reply: "once", scope }]), ...(replies.includes("always") ? [["always", { reply: "always" }]] : [])].map(([name, params]) => {
    const label = LABELS[name] ?? `Allow: ${name}`;
    return button(label, (event) => {
      if (!broad.length) return reply("permission.reply", params);
      const { target } = event;
      const back = button("Back", () => ((sure.hidden = true), target.focus()));
      sure.replaceChildren(h("p", {}, h("b", {}, "This is broad. "), "It allows, without asking again, ", name !== "always" ? marked(allowed) : what ?? [commands ? "any command that begins with " : "everything that fits ", broad.map((one, i) => [i ? ", " : "", h("code", {}, marked(commands ? one.replace(/ \*$/, "") : one))])], ". Is that what you want?"),
        h("div", { class: "buttons" }, back, button(`Yes, ${label.toLowerCase()}`, () => reply("permission.reply", params), "danger")));
      sure.hidden = false;
      back.focus();
    }, "", { "aria-describedby": granted });
  });
  const everyone = replies.includes("always"), scope = scopes.length || everyone;
  const allowing = h("fieldset", { class: "allowing", "aria-label": "Allow" },
    h("div", { class: "buttons" }, button("Allow once", () => reply("permission.reply", { reply: "once" }), "primary", { "data-key": "a" }), h("span", { class: "note" }, "Only this request.")),
    scope ? h("div", { class: "wider" }, h("p", { class: "note", id: granted },
        scopes.length > 0 && ["Or also allow, from now on and without asking: ", h("span", { class: broad.length ? "bad" : "" }, marked(allowed)), ". "],
        everyone && ["“Always allow” allows ", what ?? always.map((one) => [h("code", { class: broad.includes(one) ? "bad" : "" }, marked(one)), " "]), " and holds for everybody who uses this service", commands && ", in every directory", "."]),
      h("div", { class: "buttons" }, wider), sure) : null);
  const reader = tells_reason ? "for the agent" : "which this OpenCode does not tell the agent";
  const reason = h("input", { "aria-label": `Why not, ${reader} (optional)`, placeholder: tells_reason ? "Why not? The agent reads this (optional)" : "Why not? Kept here; the agent is not told (optional)" });
  const form = h("form", { class: "reason", hidden: true, onsubmit: (event) => {
    event.preventDefault();
    reply("permission.reply", { reply: "reject", ...(reason.value.trim() && { message: reason.value.trim() }) });
  } }, reason, h("button", { class: "danger" }, "Deny"));
  const deny = button("Deny…", () => {
    form.hidden = !form.hidden;
    deny.setAttribute("aria-expanded", !form.hidden);
    if (!form.hidden) reason.focus();
  }, "", { "data-key": "d", "aria-expanded": "false" });
  return h("div", { class: "answers" }, allowing, h("div", { class: "buttons" }, deny), form);
}

function questionForm(questions, reply) {
  const name = `question-${number}`;
  const fields = questions.map((question, i) => {
    const kind = question.multiple ? "checkbox" : "radio";
    const options = (question.options ?? []).map((option) => h("label", { class: "option" },
      h("input", { type: kind, name: `${name}-${i}`, value: option.label }),
      h("span", {}, h("b", {}, marked(option.label)), option.description && h("small", {}, marked(option.description)))));
    const own = question.custom !== false && h("input", { class: "own", "aria-label": "Your own answer", placeholder: options.length ? "Or say it in your own words" : "Your answer" });
    return h("fieldset", {}, h("legend", {}, inline(visible(question.question || question.header))), options, own);
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
export function settled(card, { resolution, by, reason, scope }, time) {
  const text = `${SCOPED[resolution === "once" && scope] ?? SETTLED[resolution] ?? resolution}${by ? ` by ${by === session.principal ? "you" : by}` : ""}${time ? `, ${clock(time)}` : ""}${reason ? `: ${reason}` : ""}`;
  const line = h("p", { class: `note settled ${resolution === "rejected" ? "bad" : ""}` }, text);
  hold();
  if (!card) return line;
  // What was allowed stays readable.
  const about = card.querySelector("h3").textContent;
  card.replaceWith(h("details", { class: "asked" }, h("summary", {}, h("span", { class: "name" }, about), line), card.querySelector(".subject")));
  return line;
}
