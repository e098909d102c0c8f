// The console: sign-in, the list of tasks, and the view that the address names.
import { get, send, session as credential } from "./api.js";
import { button, fill, h, money, when } from "./dom.js";
import { badge, ended, stateOf, taskView, titleOf, waits } from "./task.js";
import * as views from "./views.js";

const tasks = new Map();
const rows = new Map();
let health = {}, older, newest, stopped = new AbortController(), timer, filter = "";

const announce = (text) => (live.textContent = text);
const go = (hash) => (location.hash = hash);
const live = h("p", { class: "sr", role: "status" });
const list = h("div", { class: "tasks" });
const main = h("main", { tabindex: "-1" });
const facts = h("div", { class: "facts" });
const banner = h("p", { class: "banner", hidden: true, role: "status" });
const search = h("input", { type: "search", "aria-label": "Filter the tasks", placeholder: "Filter", oninput: () => ((filter = search.value.toLowerCase()), draw()) });
const more = button("Older tasks", () => load(older), "", { hidden: true });
const help = h("dialog", { "aria-label": "Keys" }, h("h2", {}, "Keys"), h("dl", {}, Object.entries({
  n: "new task", "j k": "next and previous task", w: "next that waits", "/": "filter", "a d": "allow or deny, in a request", Esc: "back", "?": "this help",
}).map(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)])), button("Close", () => help.close()));

// Tasks

function changed(task) {
  const known = tasks.get(task.id);
  if (known && known.status.timestamp > task.status.timestamp) return;
  const state = stateOf(task);
  if (known && waits(state) && !waits(stateOf(known))) {
    announce(`${titleOf(task)} waits for you`);
    if (document.hidden && window.Notification?.permission === "granted") new Notification("OpenCode waits for you", { body: titleOf(task), tag: task.id });
  }
  tasks.set(task.id, task);
  draw();
}

async function load(token) {
  const page = await get(`tasks?pageSize=50&historyLength=0${token ? `&pageToken=${token}` : ""}`);
  page.tasks.forEach((task) => tasks.set(task.id, task));
  newest ??= page.tasks[0]?.status.timestamp;
  older = page.nextPageToken;
  more.hidden = !older;
  draw();
}

async function poll() {
  clearTimeout(timer);
  try {
    if (newest) {
      const { tasks: found } = await get(`tasks?pageSize=100&historyLength=0&statusTimestampAfter=${encodeURIComponent(newest)}`);
      found.filter((task) => tasks.get(task.id)?.status.timestamp !== task.status.timestamp).forEach(changed);
      newest = found[0]?.status.timestamp ?? newest;
    } else await load();
    banner.hidden = true;
  } catch (error) {
    if (error.status !== 401) (banner.hidden = false), (banner.textContent = `${error.message}. Trying again…`);
  }
  if (credential.known) timer = setTimeout(poll, document.hidden ? 15000 : 2000);
}

function row(task) {
  const state = stateOf(task);
  const known = rows.get(task.id);
  if (known?.task === task) return known.node;
  const node = known?.node ?? h("a", { class: "row", href: `#/task/${task.id}` });
  const { shared, opencode } = task.metadata ?? {};
  const cost = (shared?.usage?.cost ?? 0) + (shared?.usage?.children?.cost ?? 0);
  fill(node, h("span", { class: "title" }, titleOf(task)), h("span", { class: "meta" }, badge(state), when(task.status.timestamp), cost ? h("span", {}, money(cost)) : null,
    opencode?.principal && h("span", {}, opencode.principal)));
  rows.set(task.id, { task, node });
  return node;
}

const order = (a, b) => (a.status.timestamp < b.status.timestamp ? 1 : -1);
function groups() {
  const shown = [...tasks.values()].filter((task) => titleOf(task).toLowerCase().includes(filter)).sort(order);
  const is = (test) => shown.filter((task) => test(stateOf(task)));
  const urgent = (task) => task.metadata?.shared?.interrupt?.expires_at ?? "~";
  return [
    ["Waits for you", is(waits).sort((a, b) => (urgent(a) < urgent(b) ? -1 : 1))],
    ["Running", is((state) => !waits(state) && !ended(state))],
    ["Ended", is(ended)],
  ];
}

let drawing;
function draw() {
  drawing ??= requestAnimationFrame(() => {
    drawing = undefined;
    const focused = document.activeElement;
    const found = groups();
    const waiting = found[0][1].length;
    fill(list, found.map(([title, inside]) => inside.length ? h("section", {}, h("h2", {}, `${title} (${inside.length})`), inside.map(row)) : null),
      tasks.size ? null : h("p", { class: "empty" }, "No tasks yet. Start one, or let an A2A client send a message."), more);
    if (list.contains(focused)) focused.focus();
    document.title = `${waiting ? `(${waiting}) ` : ""}OpenCode A2A`;
    mark();
  });
}

function mark() {
  const here = location.hash || "#/";
  document.querySelectorAll("nav a, a.row").forEach((a) => (a.getAttribute("href") === here ? a.setAttribute("aria-current", "page") : a.removeAttribute("aria-current")));
}

// The page

async function showHealth() {
  if (!credential.known) return;
  const ready = await get("readyz").then(() => true, (error) => error.status === 0 ? null : false);
  health = await get("health").catch(() => health);
  const { opencode = {}, model, cost_today: cost } = health;
  const text = ready ? `OpenCode ${opencode.version ?? ""}` : "OpenCode is away";
  fill(facts, h("span", { class: `dot ${ready ? "ok" : "bad"}` }, text), model && h("span", { class: "wide" }, model), cost !== undefined && h("span", { class: "wide" }, `${money(cost)} today`));
  const place = health.workspace?.split("/").pop();
  if (place) document.querySelector(".brand").textContent = `OpenCode A2A · ${place}`;
}

function shell() {
  const link = (href, text) => h("a", { href }, text);
  fill(document.body, h("header", { class: "top" }, h("a", { class: "skip", href: "#main", onclick: (event) => (event.preventDefault(), main.focus()) }, "Skip to the content"),
      h("a", { class: "back", href: "#/", "aria-label": "Back to the list" }, "←"), h("h1", {}, h("a", { class: "brand", href: "#/" }, "OpenCode A2A")), facts, button("Sign out", signOut)),
    banner, h("aside", { "aria-label": "Tasks" }, h("div", { class: "tools" }, h("a", { class: "button primary", href: "#/new" }, "New task"), search), list,
      h("nav", { "aria-label": "Views" }, link("#/prompts", "Waiting"), link("#/sessions", "Sessions"), link("#/about", "About"), link("#/docs", "Methods"))), main, help, live);
  draw();
  showHealth();
  poll();
}

async function show() {
  if (!credential.known) return signIn();
  if (!main.isConnected) shell();
  stopped.abort();
  stopped = new AbortController();
  const { signal } = stopped;
  const [name = "", id] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  const failed = (error) => fill(main, h("div", { class: "page" }, h("p", { class: "bad box", role: "alert" }, error.status === 404 ? "There is no such task here, or it is somebody else's." : error.message), button("Try again", show)));
  document.body.className = name ? "inside" : "";
  mark();
  const with_ = { signal, announce, changed, go, failed, again: show };
  const make = { task: () => taskView(id, with_), new: () => views.newTask(with_), prompts: () => views.prompts(with_), sessions: views.sessions,
    session: () => views.session(id, with_), about: () => views.about(health), docs: views.docs }[name];
  if (!make) return fill(main, h("div", { class: "welcome" }, h("p", {}, "Choose a task, or start one."), h("p", {}, "Press ", h("kbd", {}, "?"), " for the keys.")));
  fill(main, h("p", { class: "empty" }, "Loading…"));
  try {
    const node = await make();
    if (!signal.aborted) fill(main, node);
  } catch (error) {
    if (!signal.aborted) failed(error);
  }
}

// Sign-in

function signIn(message = "") {
  clearTimeout(timer);
  tasks.clear();
  rows.clear();
  newest = undefined;
  const token = h("input", { type: "password", id: "token", autocomplete: "current-password", required: true });
  const user = h("input", { id: "user", autocomplete: "username" });
  const error = h("p", { class: "bad", role: "alert" }, message);
  const name = h("div", { hidden: true }, h("label", { for: "user" }, "User name"), user);
  fill(document.body, h("main", { class: "signin" }, h("form", { onsubmit: async (event) => {
    event.preventDefault();
    const given = token.value.trim();
    const authorization = user.value ? `Basic ${btoa(String.fromCharCode(...new TextEncoder().encode(`${user.value}:${given}`)))}` : `Bearer ${given}`;
    try {
      await send("GET", "health", { authorization });
      credential.keep(authorization);
      show();
    } catch (raised) {
      error.textContent = raised.status === 401 ? "This token is not valid." : raised.message;
      token.select();
    }
  } }, h("h1", {}, "OpenCode A2A"), name, h("label", { for: "token" }, "Token"), token, error, h("button", { class: "primary" }, "Sign in"),
    h("p", { class: "note" }, "Run ", h("code", {}, "opencode-a2a console"), " on the machine of the service to be signed in, or paste the token that the service was started with."))));
  token.focus();
  get(".well-known/agent-card.json").then((card) => {
    const basic = Object.values(card.securitySchemes ?? {}).some((scheme) => scheme.httpAuthSecurityScheme?.scheme?.toLowerCase() === "basic");
    name.hidden = !basic;
  }, () => {});
}

async function signOut() {
  await send("DELETE", "console/session").catch(() => {});
  credential.forget();
  signIn("");
}

credential.refused = () => {
  if (!credential.known) return;
  credential.forget();
  stopped.abort();
  signIn("You were signed out. Sign in again.");
};

// Keys

addEventListener("keydown", (event) => {
  const { target, key } = event;
  if (event.ctrlKey || event.metaKey || event.altKey || !main.isConnected) return;
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName);
  if (key === "Escape") return typing ? target.blur() : !document.querySelector("dialog[open]") && go("#/");
  if (typing) return;
  const step = (by, found = [...list.querySelectorAll("a.row")]) => {
    const at = found.findIndex((a) => a.getAttribute("href") === location.hash);
    const next = found[at < 0 ? 0 : Math.max(0, Math.min(found.length - 1, at + by))];
    next?.click(), next?.focus();
  };
  const answer = () => target.closest?.(".ask")?.querySelector(`:not([inert]) > * > [data-key="${key}"]`)?.click();
  const act = { n: () => go("#/new"), j: () => step(1), k: () => step(-1), "/": () => search.focus(), "?": () => help.showModal(), a: answer, d: answer,
    w: () => {
      const card = main.querySelector(".ask:not(.sent)");
      const [first] = groups()[0][1];
      if (card) card.focus();
      else if (first) go(`#/task/${first.id}`);
    } }[key];
  if (act) (event.preventDefault(), act());
});
addEventListener("hashchange", show);
document.addEventListener("visibilitychange", () => !document.hidden && main.isConnected && poll());
setInterval(showHealth, 30000);
new IntersectionObserver(([entry]) => entry.isIntersecting && older && load(older)).observe(more);

// A code of one use, from `opencode-a2a console`; the address must not keep it.
const code = /^#code=(.+)/.exec(location.hash)?.[1];
if (code) {
  history.replaceState(null, "", location.pathname);
  try {
    const { token } = await (await send("POST", "console/session", { authorization: `Bearer ${code}` })).json();
    credential.keep(`Bearer ${token}`);
    show();
  } catch {
    signIn("This link was used or is too old. Run opencode-a2a console again.");
  }
} else show();
