// The smaller views: new task, what waits, sessions, about, methods.
import { askCard } from "./ask.js";
import { call, get, say } from "./api.js";
import { long, patchView } from "./diff.js";
import { add, button, fill, h, money, when } from "./dom.js";
import { markdown } from "./markdown.js";
import { Tool } from "./task.js";

const page = (title, ...children) => h("article", { class: "page" }, h("h2", {}, title), children);
const empty = (text) => h("p", { class: "empty" }, text);

export function newTask({ go, changed }) {
  const text = h("textarea", { rows: "6", "aria-label": "What should the agent do?", placeholder: "What should the agent do?" });
  const model = h("select", { id: "model" }, h("option", { value: "" }, "The default"));
  const agent = h("select", { id: "agent" }, h("option", { value: "" }, "The default"));
  const directory = h("input", { id: "directory", list: "directories", placeholder: "The whole workspace" });
  const known = h("datalist", { id: "directories" });
  const error = h("p", { class: "bad", role: "alert" });
  const options = h("details", { ontoggle: async () => {
    if (model.length > 1) return;
    const [models, files, agents] = await Promise.allSettled([call("opencode.models.list", { connected: true }), call("opencode.files.list"), call("opencode.agents.list")]);
    add(agent, (agents.value?.items ?? []).filter((one) => one.selectable).map((one) => h("option", { value: one.name }, one.name)));
    add(model, (models.value?.items ?? []).map((one) => h("option", { value: `${one.provider_id}/${one.model_id}` }, `${one.name} (${one.provider_id})`)));
    add(known, (files.value?.items ?? []).filter((one) => one.type === "directory").map((one) => h("option", { value: one.path })));
  } }, h("summary", {}, "Options"), h("label", { for: "model" }, "Model"), model, h("label", { for: "agent" }, "Agent"), agent, h("label", { for: "directory" }, "Directory"), directory, known);
  const submit = h("button", { class: "primary" }, "Start");
  const form = h("form", { onsubmit: async (event) => {
    event.preventDefault();
    if (!text.value.trim()) return text.focus();
    submit.disabled = true;
    const [providerID, ...rest] = model.value.split("/");
    const metadata = {
      ...(model.value && { shared: { model: { providerID, modelID: rest.join("/") } } }),
      opencode: { ...(directory.value && { directory: directory.value }), ...(agent.value && { agent: agent.value }) },
    };
    try {
      const { task } = await say(text.value, { metadata });
      changed(task);
      go(`#/task/${task.id}`);
    } catch (raised) {
      error.textContent = raised.message;
      submit.disabled = false;
    }
  }, onkeydown: (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  } }, text, options, error, h("div", { class: "buttons" }, submit, h("span", { class: "note" }, "Ctrl Enter sends")));
  setTimeout(() => text.focus());
  return page("New task", form);
}

export async function prompts({ again }) {
  const lists = await Promise.all(["permissions", "questions"].map((kind) => call(`opencode.${kind}.list`)));
  const items = lists.flatMap((list) => list.items).sort((a, b) => (a.expires_at ?? "~") < (b.expires_at ?? "~") ? -1 : 1);
  return page("What waits for you", items.length ? items.map((asked) => h("div", {},
    askCard(asked, { answered: again }), asked.task_id && h("a", { href: `#/task/${asked.task_id}` }, "Open the task"))) : empty("Nothing waits for you."));
}

export async function sessions() {
  const { items } = await call("opencode.sessions.list", { limit: 50, roots: true });
  return page("Sessions", items.length ? h("ul", { class: "rows" }, items.map(({ metadata: { shared, opencode }, status }) => h("li", {},
    h("a", { href: `#/session/${shared.session.id}` }, h("b", {}, shared.session.title), h("small", {}, opencode?.directory ?? ""), status?.timestamp && when(status.timestamp))))) : empty("There are no sessions yet."));
}

export async function session(id, { go, again }) {
  const params = { session_id: id };
  const [about, messages, todo, diff, children] = await Promise.all(["get", "messages.list", "todo", "diff", "children"]
    .map((name) => call(`opencode.sessions.${name}`, params)));
  const { title } = about.item.metadata.shared.session;
  const error = h("p", { class: "bad", role: "alert" });
  const act = (name, more, then) => call(`opencode.sessions.${name}`, { ...params, ...more }).then(then, (raised) => (error.textContent = raised.message));
  const name = h("input", { value: title, "aria-label": "Title" });
  const sure = h("dialog", { "aria-label": "Delete the session" }, h("p", {}, `Delete “${title}” and everything in it?`), h("div", { class: "buttons" },
    button("Delete", () => act("delete", {}, () => go("#/sessions")), "danger"), button("Keep", () => sure.close())));
  return page(title, error,
    h("form", { class: "composer", onsubmit: (event) => (event.preventDefault(), act("update", { request: { title: name.value } }, again)) }, name, h("button", {}, "Rename"),
      button("Fork", () => act("fork", {}, ({ item }) => go(`#/session/${item.metadata.shared.session.id}`))), button("Delete…", () => sure.showModal(), "danger")), sure,
    todo.items.length ? [h("h3", {}, "Plan"), h("ul", { class: "plan" }, todo.items.map((one) => h("li", { class: one.status }, one.content)))] : null,
    children.items.length ? [h("h3", {}, "Sub-agents"), h("ul", {}, children.items.map(({ metadata: { shared: { session: child } } }) => h("li", {}, h("a", { href: `#/session/${child.id}` }, child.title))))] : null,
    h("h3", {}, "Messages"), messages.items.map(messageView),
    diff.items.length ? [h("h3", {}, "Changes"), diff.items.map((one) => patchView(one.patch ?? "", one.file))] : null);
}

function messageView(message) {
  const mine = message.role === "ROLE_USER";
  return h("div", { class: mine ? "person" : "reply" }, (message.parts ?? []).map((part) => {
    if (part.text) return mine ? part.text : h("div", { class: "prose" }, markdown(part.text));
    if (!part.data?.tool) return null;
    const tool = new Tool();
    tool.set({ ...part.data, ...part.data.state });
    return tool.node;
  }));
}

export async function about(health) {
  const ready = await get("readyz").catch(() => null);
  const rows = (value, path = "") => Object.entries(value).flatMap(([name, inner]) =>
    inner && typeof inner === "object" && !Array.isArray(inner) ? rows(inner, `${path}${name} `) : [[`${path}${name}`, Array.isArray(inner) ? inner.join(", ") : String(inner ?? "–")]]);
  const notify = "Notification" in window && Notification.permission === "default" &&
    button("Notify me when something waits", (event) => Notification.requestPermission().then(() => event.target.remove()));
  return page("About", h("dl", {}, rows({ ready: ready?.checks ?? "no", ...health }).map(([name, value]) => [h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, value)])),
    h("p", {}, h("a", { href: "#/docs" }, "Methods and paths of this service")), notify);
}

export async function docs() {
  const { paths, components, info } = await get("openapi.json");
  const fold = (title, value) => h("details", { class: "tool", ontoggle: (event) => {
    if (event.target.childElementCount < 2) add(event.target, long(JSON.stringify(value, null, 2).split("\n")));
  } }, h("summary", {}, h("span", { class: "about" }, title)));
  const examples = Object.entries(paths["/"].post.requestBody.content["application/json"].examples);
  return page(info.title, h("p", {}, info.description), h("h3", {}, "Methods"), examples.map(([name, { summary, value }]) => fold(`${name}: ${summary}`, value)),
    h("h3", {}, "Paths"), Object.entries(paths).flatMap(([path, verbs]) => Object.entries(verbs).map(([verb, operation]) => fold(`${verb.toUpperCase()} ${path}`, operation))),
    h("h3", {}, "Schemas"), Object.entries(components.schemas).map(([name, schema]) => fold(name, schema)));
}
