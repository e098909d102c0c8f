// The smaller views: new task, what waits, sessions, about, methods.
import { askCard, hold, signInCard } from "./ask.js";
import { call, get, inState, newId, say, session as credential } from "./api.js";
import { attachments, composer, draft, said } from "./compose.js";
import { long, patchView } from "./diff.js";
import { add, button, count, h, money, when } from "./dom.js";
import { markdown } from "./markdown.js";
import { marked, visible } from "./odd.js";
import { Tool, stateOf, titleOf, waits } from "./task.js";

// An OpenCode that has no such list has an empty one.
const lacking = (raised) => {
  if (!["METHOD_NOT_SUPPORTED", "NOT_IN_OPENCODE"].includes(raised.reason)) throw raised;
  return { items: [] };
};
const page = (title, ...children) => h("article", { class: "page" }, h("h2", {}, title), children);
const empty = (text) => h("p", { class: "empty" }, text);

const EXAMPLES = ["Explain what this project does", "Run the tests, and mend what fails", "Find what is out of date in the README"];
// What the scripted model of the demo understands.
const DEMO = ["list the files here", "run the tests", "create a file hello.txt with 'hello'", "ask me something", "use a sub-agent"];

export function home(more, health) {
  const form = newTask({ ...more, focuses: false }, health);
  form.classList.add("welcome");
  return form;
}

export function newTask({ go, changed, focuses = true }, { model: used } = {}) {
  const text = h("textarea", { rows: "6", "aria-label": "What should the agent do?", placeholder: "What should the agent do?" });
  const keep = draft(text, "new");
  const choice = (id) => h("select", { id }, h("option", { value: "" }, "The default"));
  const model = choice("model"), agent = choice("agent"), profile = choice("profile");
  const directory = h("input", { id: "directory", list: "directories", placeholder: "The whole workspace" });
  const known = h("datalist", { id: "directories" });
  const limits = h("div", { class: "limits" }, h("label", { for: "profile" }, "What the agent may do"), profile);
  const error = h("p", { class: "bad", role: "alert" });
  const options = h("details", { class: "options", ontoggle: async () => {
    if (model.length > 1) return;
    const [models, files, agents] = await Promise.allSettled([call("opencode.models.list", { connected: true }), call("opencode.files.list"), call("opencode.agents.list")]);
    add(agent, (agents.value?.items ?? []).filter((one) => one.selectable).map((one) => h("option", { value: one.name }, one.name)));
    add(model, (models.value?.items ?? []).map((one) => h("option", { value: `${one.provider_id}/${one.model_id}` }, `${one.name} (${one.provider_id})`)));
    add(known, (files.value?.items ?? []).filter((one) => one.type === "directory").map((one) => h("option", { value: one.path })));
  } }, h("summary", {}, "Options"), h("label", { for: "model" }, "Model"), model, h("label", { for: "agent" }, "Agent"), agent,
    limits, h("label", { for: "directory" }, "Directory"), directory, known);
  const messageId = newId();
  let sending = false;
  const start = async (plan) => {
    const files = attached.parts;
    if (sending) return;
    if (!text.value.trim() && !files.length) return (error.textContent = "Say what the agent should do."), text.focus();
    sending = true;
    const [providerID, ...rest] = model.value.split("/");
    const metadata = {
      ...(model.value && { shared: { model: { providerID, modelID: rest.join("/") } } }),
      opencode: { ...(directory.value && { directory: directory.value }), ...(agent.value && !plan && { agent: agent.value }), ...(profile.value && { profile: profile.value }), ...(plan && { plan: true }) },
    };
    buttons.forEach((one) => (one.disabled = true));
    error.textContent = "";
    try {
      const { task } = await say(text.value, { files, messageId, metadata });
      text.value = "";
      keep();
      changed(task);
      go(`#/task/${task.id}`);
    } catch (raised) {
      error.textContent = raised.message;
      sending = false;
      buttons.forEach((one) => (one.disabled = false));
    }
  };
  const planning = button("Plan first", () => start(true), "", { title: "The agent shows a plan, and waits for your “Go”" });
  const buttons = [h("button", { class: "primary" }, "Start"), planning];
  // Not every OpenCode can be limited to reading.
  get(".well-known/agent-card.json").then(({ capabilities: { extensions } }) => {
    const profiles = extensions.map((one) => one.params?.profiles).find(Boolean) ?? [];
    add(profile, profiles.map((one) => h("option", { value: one }, one)));
    limits.hidden = !profiles.length;
    planning.hidden = !extensions.some((one) => one.params?.supported_metadata?.includes("opencode.plan"));
  }, () => {});
  const form = h("form", { onsubmit: (event) => (event.preventDefault(), start(false)), onkeydown: (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  } });
  const attached = attachments(form, (said) => (error.textContent = said));
  add(form, text, attached.tray, options, error, h("div", { class: "buttons" }, buttons, attached.button, h("span", { class: "note keys" }, "Ctrl Enter sends")));
  if (focuses) setTimeout(() => text.focus());
  const demo = used?.startsWith("demo/");
  return page("New task", form, h("p", { class: "note" }, demo ? "This is the demo: a scripted model, with a real OpenCode around it. It understands:" : "For example:"),
    h("div", { class: "buttons examples" }, (demo ? DEMO : EXAMPLES).map((one) => button(one, () => ((text.value = one), keep(), text.focus()), "small"))),
    h("p", { class: "note keys" }, "Press ", h("kbd", {}, "?"), " for the keys."));
}

// Requests that wait are known to their methods, also those of no task; plans and sign-ins by the state of their task.
// The cards stay as they are while others come and go.
export async function prompts({ hear, failed, signal }) {
  const cards = new Map(), all = h("div", { class: "cards" }), none = empty("Nothing waits for you.");
  let changes = false, drawing = false;
  const draw = async () => {
    changes = true;
    if (drawing) return;
    drawing = true;
    try {
      while (changes && !signal.aborted) {
        changes = false;
        const wanted = await waiting(() => draw().catch(failed));
        for (const [key, { node }] of cards) if (!wanted.has(key)) (hold(), node.remove(), cards.delete(key));
        for (const [key, { id, make }] of wanted) if (!cards.has(key)) (cards.set(key, { id, node: make() }), all.append(cards.get(key).node));
        none.hidden = cards.size > 0;
      }
    } finally {
      drawing = false;
    }
  };
  await draw();
  hear((task) => {
    if (waits(stateOf(task)) || [...cards.values()].some(({ id }) => id === task.id)) draw().catch(() => {});
  });
  return page("What waits for you", all, none);
}

// What waits, by a key for each request: its task, and how its card is made.
async function waiting(answered) {
  const [asked, asking, unsigned] = await Promise.all([
    Promise.all(["permissions", "questions"].map((kind) => call(`opencode.${kind}.list`))).then((lists) => lists.flatMap((list) => list.items)),
    inState("INPUT_REQUIRED"), inState("AUTH_REQUIRED")]);
  const named = new Map(asking.map((task) => [task.id, task]));
  const link = (task, id) => h("a", { href: `#/task/${id}` }, visible(task ? titleOf(task) : "a task"), h("span", { class: "sr" }, ` (${id.slice(0, 8)})`));
  const plans = asking.map((task) => ({ ...task.metadata?.shared?.interrupt, task_id: task.id })).filter((one) => one.type === "plan");
  const texts = new Map(await Promise.all(plans.map(async ({ task_id: id }) => {
    const { artifacts = [] } = await get(`tasks/${id}`);
    return [id, artifacts.filter((one) => one.name === "plan").flatMap((one) => one.parts).map((part) => part.text ?? "").join("")];
  })));
  const card = (one) => askCard(one, { answered, taskId: one.task_id, elsewhere: true, task: one.task_id && link(named.get(one.task_id), one.task_id),
    plan: texts.has(one.task_id) && h("div", { class: "prose" }, markdown(visible(texts.get(one.task_id)))) });
  const items = [...asked, ...plans].sort((a, b) => (a.expires_at ?? "~") < (b.expires_at ?? "~") ? -1 : 1);
  // One that changes while it waits is another card.
  const as = ({ request_id: key, details: { links, links_unknown: unknown, changes } = {} }) => `${key} ${JSON.stringify([links, unknown, changes])}`;
  return new Map([...items.map((one) => [as(one), { id: one.task_id, make: () => card(one) }]),
    ...unsigned.map((task) => [`${task.id} ${task.status.timestamp}`, { id: task.id, make: () => signInCard(task, link(task, task.id), answered) }])]);
}

export async function grants({ again }) {
  const { items } = await call("a2a.interrupt.grants.list");
  const contexts = [...new Set(items.map((one) => one.context_id))];
  const found = new Map(await Promise.all(contexts.map(async (id) => [id, (await get(`tasks?contextId=${encodeURIComponent(id)}&pageSize=1&historyLength=0`)).tasks[0]])));
  const error = h("p", { class: "bad", role: "alert" });
  const revoke = async (grant_id, target) => {
    target.disabled = true;
    await call("a2a.interrupt.grants.revoke", { grant_id }).then(again, (raised) => ((error.textContent = raised.message), (target.disabled = false)));
  };
  return page("What you have allowed", h("p", { class: "note" }, "These hold without asking again, until their task or conversation ends or you revoke them."), error,
    items.length ? h("ul", { class: "rows" }, items.map((one) => {
      const id = one.task_id ?? found.get(one.context_id)?.id;
      const title = visible(found.get(one.context_id) ? titleOf(found.get(one.context_id)) : "a conversation");
      return h("li", { class: "grant" }, h("div", {}, h("b", {}, visible(one.permission)), " ", one.patterns.map((pattern) => [pattern === one.exact && "exactly ", h("code", {}, marked(pattern)), " "]),
        h("small", {}, one.directory && `${visible(one.directory)}, `, one.scope === "task" ? "in a task of " : "in ", id ? h("a", { href: `#/task/${id}` }, title) : title, ", ", when(one.given_at))),
        button("Revoke", ({ target }) => revoke(one.grant_id, target), "danger", { "aria-label": `Revoke ${visible(one.permission)} ${one.patterns.map(visible).join(" ")}` }));
    })) : empty("You have allowed nothing beyond single requests."));
}

export async function sessions() {
  const { items } = await call("opencode.sessions.list", { limit: 50, roots: true });
  return page("Sessions", items.length ? h("ul", { class: "rows" }, items.map(({ metadata: { shared, opencode }, status }) => h("li", {},
    h("a", { href: `#/session/${shared.session.id}` }, h("b", {}, shared.session.title), h("small", {}, opencode?.directory ?? ""), status?.timestamp && when(status.timestamp))))) : empty("There are no sessions yet."));
}

export async function session(id, { go, again, changed }) {
  const params = { session_id: id };
  const [about, messages, todo, diff, children] = await Promise.all(["get", "messages.list", "todo", "diff", "children"]
    .map((name) => call(`opencode.sessions.${name}`, params).catch(lacking)));
  const { title } = about.item.metadata.shared.session;
  const error = h("p", { class: "bad", role: "alert" });
  const act = (name, more, then) => call(`opencode.sessions.${name}`, { ...params, ...more }).then(then, (raised) => (error.textContent = raised.message));
  const name = h("input", { value: title, "aria-label": "Title" });
  const sure = h("dialog", { "aria-label": "Delete the session" }, h("p", {}, `Delete “${title}” and everything in it?`), h("div", { class: "buttons" },
    button("Delete", () => act("delete", {}, () => go("#/sessions")), "danger"), button("Keep", () => sure.close())));
  return page(title, error,
    h("form", { class: "composer", onsubmit: (event) => (event.preventDefault(), act("update", { request: { title: name.value } }, again)) }, name, h("button", {}, "Rename"),
      button("Fork", ({ target }) => ((target.disabled = true), act("fork", {}, ({ item }) => go(`#/conversation/${item.id}`)).finally(() => (target.disabled = false)))), button("Delete…", () => sure.showModal(), "danger")), sure,
    todo.items.length ? [h("h3", {}, "Plan"), h("ul", { class: "plan" }, todo.items.map((one) => h("li", { class: one.status }, one.content)))] : null,
    children.items.length ? [h("h3", {}, "Sub-agents"), h("ul", {}, children.items.map(({ metadata: { shared: { session: child } } }) => h("li", {}, h("a", { href: `#/session/${child.id}` }, child.title))))] : null,
    h("h3", {}, "Messages"), messages.items.map(messageView),
    diff.items.length ? [h("h3", {}, "Changes"), diff.items.map((one) => patchView(one.patch ?? "", one.file))] : null,
    composer("Continue this session", id, async (text, files, messageId) => {
      const { task } = await say(text, { files, messageId, metadata: { shared: { session: { id } } } });
      changed(task);
      go(`#/task/${task.id}`);
    }).node);
}

export function messageView(message) {
  const mine = message.role === "ROLE_USER";
  return h("div", { class: mine ? "person" : "reply" }, (message.parts ?? []).map((part) => {
    if (mine || part.raw) return said([part]);
    if (part.text) return h("div", { class: "prose" }, markdown(part.text));
    if (!part.data?.tool) return null;
    const tool = new Tool();
    tool.set({ ...part.data, ...part.data.state });
    return tool.node;
  }));
}

// A new tab asks those that are open for their session; a credential that is pasted stays in its tab.
export const sharing = () => h("label", { class: "option" },
  h("input", { type: "checkbox", checked: credential.shared, onchange: ({ target }) => (credential.shared = target.checked) }),
  h("span", {}, "Sign in new tabs of this browser as well", h("small", {}, "As long as this tab is open.")));

const yes = (value) => value ? "yes" : "no";
const limited = (spent, most) => most === null || most === undefined ? null : `${spent} of ${most}`;

export async function about(principal) {
  const [health, ready] = await Promise.all([get("health"), get("readyz").then(() => true, () => false)]);
  const { opencode = {}, upstreams = [], budget = {}, demo } = health;
  const facts = {
    You: { "Signed in as": visible(principal ?? "unknown"), "Cost today": money(health.cost_today), "Budget for today": limited(money(budget.cost), budget.cost_per_day && money(budget.cost_per_day)),
      "Tokens today": limited(count(budget.tokens), budget.tokens_per_day && count(budget.tokens_per_day)), "Turns at once": limited(budget.running, budget.turns),
      "Counted anew": (budget.cost_per_day || budget.tokens_per_day) && new Date(budget.resets_at).toLocaleString() },
    Service: { Version: health.version, Address: new URL(".", location.href).href, "Ready for work": yes(ready), "Workspace": health.workspace, A2A: health.protocol_versions?.join(" and ") },
    OpenCode: { Version: opencode.version, Model: demo ? `${health.model} (scripted, no AI)` : health.model, "Started by the service": yes(opencode.managed),
      ...Object.fromEntries(upstreams.map((one) => [upstreams.length > 1 ? one.name : "State", `${one.state}, ${one.running} at work${one.drain ? ", takes nothing new" : ""}`])) },
  };
  const notify = "Notification" in window && Notification.permission === "default" &&
    button("Notify me when something waits", (event) => Notification.requestPermission().then(() => event.target.remove()));
  return page("About", Object.entries(facts).map(([title, rows]) => [h("h3", {}, title), h("dl", {}, Object.entries(rows).filter(([, value]) => value || value === 0).map(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))]))]),
    h("h3", {}, "This browser"), sharing(), health.web_push && h("p", {}, h("a", { href: "notices" }, "Messages to this device")), notify,
    h("h3", {}, "For programs"), h("p", {}, h("a", { href: "#/docs" }, "Methods and paths of this service")),
    fold("What /health says", health));
}

const fold = (title, value) => h("details", { class: "tool", ontoggle: (event) => {
  if (event.target.childElementCount < 2) add(event.target, long(JSON.stringify(value, null, 2).split("\n")));
} }, h("summary", {}, h("span", { class: "about" }, title)));

export async function docs() {
  const { paths, components, info } = await get("openapi.json");
  const examples = Object.entries(paths["/"].post.requestBody.content["application/json"].examples);
  return page(info.title, h("p", {}, info.description), h("h3", {}, "Methods"), examples.map(([name, { summary, value }]) => fold(`${name}: ${summary}`, value)),
    h("h3", {}, "Paths"), Object.entries(paths).flatMap(([path, verbs]) => Object.entries(verbs).map(([verb, operation]) => fold(`${verb.toUpperCase()} ${path}`, operation))),
    h("h3", {}, "Schemas"), Object.entries(components.schemas).map(([name, schema]) => fold(name, schema)));
}
