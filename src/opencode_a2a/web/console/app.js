// The console: sign-in, the list of tasks, and the view that the address names.
import { askTabs, call, get, inState, send, session as credential, who } from "./api.js";
import { forgetDrafts, takeDrops } from "./compose.js";
import { conversation } from "./conversation.js";
import { button, fill, h, money, when } from "./dom.js";
import { visible } from "./odd.js";
import { badge, ended, stateOf, titleOf, waits } from "./task.js";
import * as views from "./views.js";

const OPEN = ["INPUT_REQUIRED", "AUTH_REQUIRED", "WORKING", "SUBMITTED"];
const MOST_FOUND = 100;
const tasks = new Map();
const rows = new Map();
const listeners = new Set();
let health = {}, older, newest, stopped = new AbortController(), timer, words = [], found = new Map(), lost = false;

const announce = (text) => (live.textContent = text);
const go = (hash) => (location.hash = hash);
const live = h("p", { class: "sr", role: "status" });
const list = h("div", { class: "tasks" });
const main = h("main", { tabindex: "-1" });
const aside = h("div", { class: "aside", "aria-label": "Tasks" });
const narrow = matchMedia("(max-width: 760px)");
const facts = h("div", { class: "facts" });
const person = h("p", { class: "note who" });
const banner = h("p", { class: "banner", hidden: true, role: "status" });
const search = h("input", { type: "search", "aria-label": "Search the tasks", placeholder: "Search", maxlength: 200, oninput: () => filterBy(search.value) });
const searched = h("p", { class: "note", role: "status" });
const more = button("Older tasks", () => load(older), "", { hidden: true });
const help = h("dialog", { "aria-label": "Keys" }, h("h2", {}, "Keys"), h("dl", {}, Object.entries({
  n: "new task", "j k": "next and previous task", w: "next that waits", "/": "search", "a d": "allow or deny, in a request", Esc: "back", "?": "this help",
}).map(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)])), button("Close", () => help.close()));

// Tasks

function changed(task) {
  const known = tasks.get(task.id);
  if (known && known.status.timestamp > task.status.timestamp) return;
  const state = stateOf(task);
  // What waited before the console was opened is in the list; what came since may be here for the first time.
  if (waits(state) && (known ? !waits(stateOf(known)) : newest)) {
    announce(`${titleOf(task)} waits for you`);
    if (document.hidden && window.Notification?.permission === "granted") new Notification("OpenCode waits for you", { body: titleOf(task), tag: task.id });
  }
  tasks.set(task.id, task);
  listeners.forEach((hear) => hear(task));
  draw();
}

async function load(token = "") {
  const page = await get(`tasks?pageSize=50&historyLength=0&pageToken=${encodeURIComponent(token)}`);
  page.tasks.forEach(changed);
  older = page.nextPageToken;
  more.hidden = !older;
  draw();
  return page.tasks[0]?.status.timestamp;
}

// The newest page, and everything that is open however old it is.
async function begin() {
  const first = await load();
  const open = (await Promise.all(OPEN.map(inState))).flat();
  const now = new Set(open.map((task) => task.id));
  open.forEach(changed);
  // What is in none of the lists has ended, or moved from one to another between them.
  const moved = [...tasks.values()].filter((task) => !ended(stateOf(task)) && !now.has(task.id));
  await Promise.all(moved.map(({ id }) => get(`tasks/${id}?historyLength=0`).then(changed, (error) => error.status === 404 && tasks.delete(id))));
  newest = first;
}

async function poll() {
  clearTimeout(timer);
  try {
    if (newest) {
      const { tasks: found, nextPageToken } = await get(`tasks?pageSize=100&historyLength=0&statusTimestampAfter=${encodeURIComponent(newest)}`);
      found.filter((task) => tasks.get(task.id)?.status.timestamp !== task.status.timestamp).forEach(changed);
      // More than a page: the tab was asleep.
      if (nextPageToken) await begin();
      newest = found[0]?.status.timestamp ?? newest;
    } else await begin();
    banner.hidden = true;
    if (lost) (lost = false), showHealth();
  } catch (error) {
    if (error.status !== 401) (banner.hidden = false), (banner.textContent = `${error.message}. Trying again…`);
    if (error.status === 0 && !lost) (lost = true), showHealth();
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
const urgent = (task) => task.metadata?.shared?.interrupt?.expires_at ?? "~";
const waiting = () => [...tasks.values()].filter((task) => waits(stateOf(task))).sort((a, b) => (urgent(a) < urgent(b) ? -1 : 1));

function groups() {
  const among = words.length ? [...new Map([...found, ...tasks]).values()].filter(fits) : [...tasks.values()];
  const shown = among.sort(order);
  const is = (test) => shown.filter((task) => test(stateOf(task)));
  const past = is(ended);
  return [
    ["Waits for you", waiting().filter((task) => !words.length || fits(task))],
    ["Running", is((state) => !waits(state) && !ended(state))],
    ["Ended", past, older && !words.length ? `the newest ${past.length}` : past.length],
  ];
}

// As the service searches; it knows the tasks that are not loaded here.
function fits(task) {
  const titles = `${task.metadata?.opencode?.title}\n${task.metadata?.shared?.session?.title}`.toLowerCase();
  return words.every((word) => titles.includes(word)) || task.id.startsWith(words.join(" "));
}

let asking;
function filterBy(text) {
  words = text.toLowerCase().split(/\s+/).filter(Boolean);
  found = new Map();
  clearTimeout(asking);
  searched.textContent = words.length ? "Searching all tasks…" : "";
  draw();
  if (words.length) asking = setTimeout(async () => {
    const wanted = words;
    const { items = [], message } = await call("opencode.tasks.search", { text: text.trim(), limit: MOST_FOUND }).catch((error) => error);
    if (wanted !== words) return;
    found = new Map(items.map((task) => [task.id, task]));
    searched.textContent = message ? `Only the tasks below were searched: ${message}` : items.length === MOST_FOUND ? `The newest ${MOST_FOUND} that fit` : groups().some(([, inside]) => inside.length) ? "" : "No task has these words in its title.";
    draw();
  }, 250);
}

let drawing;
function draw() {
  drawing ??= requestAnimationFrame(() => {
    drawing = undefined;
    const focused = document.activeElement;
    const many = waiting().length;
    fill(list, groups().map(([title, inside, said = inside.length]) => inside.length ? h("section", {}, h("h2", {}, `${title} (${said})`), inside.map(row)) : null),
      tasks.size ? null : h("p", { class: "empty" }, "No tasks yet. Start one, or let an A2A client send a message."), more);
    if (list.contains(focused)) focused.focus();
    document.title = `${many ? `(${many}) ` : ""}OpenCode A2A`;
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
  const working = (health.upstreams ?? []).some((one) => one.running > 0);
  const [text, kind] = ready ? [["OpenCode", opencode.version && h("span", { class: "wide" }, ` ${opencode.version}`)], "ok"] : ready === null ? ["The service is away", "bad"] : working ? ["OpenCode answers slowly", "slow"] : ["OpenCode is away", "bad"];
  fill(facts, h("span", { class: `dot ${kind}` }, text), model && h("span", { class: "wide" }, model), cost !== undefined && h("span", { class: "wide" }, `${money(cost)} today`));
  const place = health.workspace?.split("/").pop();
  const brand = document.querySelector(".brand");
  if (place && brand) fill(brand, h("span", { class: "wide" }, "OpenCode A2A · "), place);
}

function shell() {
  const link = (href, text) => h("a", { href }, text);
  fill(document.body, h("header", { class: "top" }, h("a", { class: "skip", href: "#main", onclick: (event) => (event.preventDefault(), main.focus()) }, "Skip to the content"),
      h("a", { class: "back", href: "#/", "aria-label": "Back to the list" }, "←"), h("h1", {}, h("a", { class: "brand", href: "#/" }, "OpenCode A2A")), facts, button("Sign out", signOut)),
    banner, fill(aside, h("div", { class: "tools" }, h("a", { class: "button primary", href: "#/new" }, "New task"), search, searched), list, person,
      h("nav", { "aria-label": "Views" }, link("#/prompts", "Waiting"), link("#/grants", "Allowed"), link("#/sessions", "Sessions"), link("#/about", "About"))), main, help, live);
  draw();
  showHealth();
  poll();
}

// On a phone the list is a page of its own, and so the main part of it.
function setParts() {
  const alone = narrow.matches && !document.body.classList.contains("inside");
  aside.setAttribute("role", alone ? "main" : "complementary");
}

// The names in the address; none if it is not an address of ours.
function place() {
  try {
    return location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  } catch {
    return [null];
  }
}

async function show() {
  const code = /^#code=(.+)/.exec(location.hash)?.[1];
  if (code) return enter(code);
  if (!credential.known) return signIn();
  if (!main.isConnected) shell();
  stopped.abort();
  stopped = new AbortController();
  const { signal } = stopped;
  const [name = "", id] = place();
  const failed = (error) => fill(main, h("div", { class: "page" }, h("p", { class: "bad box", role: "alert" }, error.status === 404 ? `There is no such ${name} here, or it is somebody else's.` : error.message), h("div", { class: "buttons" }, button("Try again", show))));
  document.body.className = name === "" ? "" : "inside";
  setParts();
  mark();
  if (!credential.principal) {
    credential.principal = await who().catch(() => undefined);
    person.textContent = credential.principal ? `Signed in as ${visible(credential.principal)}` : "";
    if (signal.aborted || !credential.known) return;
  }
  const hear = (listener) => (listeners.add(listener), signal.addEventListener("abort", () => listeners.delete(listener)));
  const with_ = { signal, announce, changed, go, failed, hear, mark, again: show };
  const make = new Map(Object.entries({ task: id && (() => conversation(id, with_)), conversation: id && (() => conversation(null, with_, id)), new: () => views.newTask(with_, health), prompts: () => views.prompts(with_), grants: () => views.grants(with_), sessions: views.sessions,
    session: id && (() => views.session(id, with_)), about: () => views.about(credential.principal), docs: views.docs })).get(name);
  if (["", "new"].includes(name) && !health.model) {
    health = await get("health").catch(() => health);
    if (signal.aborted) return;
  }
  if (name === "") return fill(main, views.home(with_, health));
  if (!make) return fill(main, h("div", { class: "page" }, h("h2", {}, "Not found"), h("p", {}, "The console has no page with this address."), h("p", {}, h("a", { href: "#/" }, "All tasks"))));
  fill(main, h("p", { class: "empty" }, "Loading…"));
  try {
    const node = await make();
    if (!signal.aborted) fill(main, node);
  } catch (error) {
    if (!signal.aborted) failed(error);
  }
}

// Sign-in

function forgetTasks() {
  clearTimeout(timer);
  forgetDrafts();
  tasks.clear();
  rows.clear();
  older = newest = undefined;
}

function signIn(message = "") {
  forgetTasks();
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
    views.sharing(),
    h("p", { class: "note" }, "Run ", h("code", {}, "opencode-a2a console"), " on the machine of the service to be signed in. Or paste its token: the one in ", h("code", {}, "A2A_BEARER_TOKEN"), ", or, if none was set, the one in the file ", h("code", {}, "token"),
      " of its state directory, by default ", h("code", {}, "~/.local/state/opencode-a2a"), "."))));
  token.focus();
  get(".well-known/agent-card.json").then((card) => {
    const basic = Object.values(card.securitySchemes ?? {}).some((scheme) => scheme.httpAuthSecurityScheme?.scheme?.toLowerCase() === "basic");
    name.hidden = !basic;
  }, () => {});
}

// A code of one use, from `opencode-a2a console`; the address must not keep it. It may be a code of
// somebody else, so that it never replaces who is signed in without a question.
async function enter(code) {
  history.replaceState(null, "", location.pathname);
  const before = credential.known ? credential.principal ?? await who().catch(() => undefined) : undefined;
  let authorization, after;
  try {
    const { token } = await (await send("POST", "console/session", { authorization: `Bearer ${code}` })).json();
    authorization = `Bearer ${token}`;
    after = await who({ authorization });
  } catch {
    const used = "This link was used or is too old. Run opencode-a2a console again.";
    return credential.known ? choose([used, before && ` You are still signed in as ${visible(before)}.`], button("Go on", show, "primary")) : signIn(used);
  }
  const change = () => {
    forgetTasks();
    credential.keep(authorization);
    credential.principal = undefined;
    show();
  };
  if (!credential.known || before === after) return change();
  choose(["This link signs you in as ", h("b", {}, visible(after)), ". In this tab you are signed in as ", h("b", {}, visible(before ?? "somebody else")), "."],
    button(`Stay ${visible(before ?? "signed in")}`, async () => {
      await send("DELETE", "console/session", { authorization }).catch(() => {});
      show();
    }, "primary"),
    button(`Sign in as ${visible(after)}`, async () => {
      await send("DELETE", "console/session").catch(() => {});
      change();
    }));
}

function choose(text, ...buttons) {
  stopped.abort();
  fill(document.body, h("main", { class: "signin" }, h("div", { class: "choice" }, h("h1", {}, "OpenCode A2A"), h("p", {}, text), h("div", { class: "buttons" }, buttons))));
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
  const answer = () => {
    const found = target.closest?.(".ask")?.querySelector(`[data-key="${key}"]`);
    if (!event.repeat && !found?.closest("[inert]")) found?.click();
  };
  const act = { n: () => go("#/new"), j: () => step(1), k: () => step(-1), "/": () => search.focus(), "?": () => help.showModal(), a: answer, d: answer,
    w: () => {
      const card = main.querySelector(".ask:not(.sent)");
      const [first] = waiting();
      if (card) card.focus();
      else if (first) go(`#/task/${first.id}`);
    } }[key];
  if (act) (event.preventDefault(), act());
});
addEventListener("hashchange", show);
narrow.addEventListener("change", setParts);
document.addEventListener("visibilitychange", () => !document.hidden && main.isConnected && poll());
setInterval(showHealth, 30000);
askTabs(() => show());
takeDrops(main);
new IntersectionObserver(([entry]) => entry.isIntersecting && older && load(older)).observe(more);

show();
