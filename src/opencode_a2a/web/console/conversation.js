// One conversation: all turns of a context in one scroll, and one place to say something.
import { ApiError, call, cancel, get, newId, say, tryAgain } from "./api.js";
import { composer } from "./compose.js";
import { badge, ended, stateOf, titleOf, turnView } from "./task.js";
import { button, count, duration, fill, h, money, when } from "./dom.js";
import { messageView } from "./views.js";

const NEAR = 60;
const created = (task) => task.metadata?.opencode?.created_at ?? task.status.timestamp;
const DELIVERIES = { steer: "Tell it now", queue: "After this turn", interrupt: "Stop, and do this instead" };

// `session` is one to continue that has no task here yet, such as a fork.
export async function conversation(id, { signal, announce, changed, failed, hear, mark }, session) {
  const asked = !session && await get(`tasks/${encodeURIComponent(id)}?historyLength=0`, { signal });
  const [about, said] = session ? await Promise.all(["get", "messages.list"].map((name) => call(`opencode.sessions.${name}`, { session_id: session }))) : [];
  const { contextId } = asked || { contextId: newId() };
  const turns = new Map();
  let older = "", following = true, lost;

  const title = h("h2", {}, "…");
  const facts = h("div", { class: "facts" });
  const offline = h("p", { class: "banner", hidden: true }, "The connection is lost. Trying again…");
  const earlier = button("Earlier messages", () => load(), "", { hidden: true });
  const all = h("div", { class: "turns" });
  const scroller = h("div", { class: "scroller" }, h("p", { class: "earlier" }, earlier), said && h("div", { class: "log" }, said.items.map(messageView)), all);
  const toEnd = button("To the end", () => follow(true), "toend", { hidden: true });
  const delivery = h("select", { "aria-label": "When the agent gets it", hidden: true }, Object.entries(DELIVERIES).map(([value, text]) => h("option", { value }, text)));
  const compose = composer("Continue this conversation", session ?? contextId, send, delivery);
  const stop = button("Cancel", async () => {
    stop.disabled = true;
    await cancel(last().task.id).catch((error) => compose.refuse(error.message));
    stop.disabled = false;
  }, "danger");

  // The page follows the end as long as the person is there; a request that is longer than the screen is read from its beginning.
  const left = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
  const follow = (wanted = following) => {
    following = wanted;
    if (following) scroller.scrollTop = scroller.scrollHeight;
    toEnd.hidden = following;
  };
  scroller.addEventListener("scroll", () => {
    following = left() < NEAR;
    toEnd.hidden = following;
  }, { passive: true });
  const sized = new ResizeObserver(() => follow());
  sized.observe(all);
  sized.observe(scroller);
  const shown = (card) => requestAnimationFrame(() => {
    if (!following || card.offsetHeight <= scroller.clientHeight - NEAR) return follow();
    following = false;
    toEnd.hidden = true;
    card.scrollIntoView();
  });

  const ordered = () => [...turns.values()].sort((a, b) => (created(a.task) < created(b.task) ? -1 : 1));
  const last = () => ordered().at(-1);

  function add(task) {
    if (turns.has(task.id)) return;
    const turn = turnView(task, { signal, announce, changed, failed, connected, shown, answered: () => follow(true), updated: head });
    turns.set(task.id, turn);
    const after = ordered();
    all.insertBefore(turn.node, after[after.indexOf(turn) + 1]?.node ?? null);
    near.observe(turn.node);
  }

  // Turns that nobody has scrolled to are not read.
  const near = new IntersectionObserver((entries) => entries.filter((one) => one.isIntersecting).forEach(({ target }) => {
    near.unobserve(target);
    [...turns.values()].find((turn) => turn.node === target)?.start();
  }), { root: scroller, rootMargin: "600px" });

  async function load() {
    earlier.disabled = true;
    const page = await get(`tasks?contextId=${encodeURIComponent(contextId)}&pageSize=20&historyLength=0&pageToken=${encodeURIComponent(older)}`, { signal });
    const [before, place] = [scroller.scrollHeight, scroller.scrollTop];
    page.tasks.forEach(add);
    if (!following) scroller.scrollTop = place + scroller.scrollHeight - before;
    older = page.nextPageToken;
    earlier.hidden = !older;
    earlier.disabled = false;
  }

  function head() {
    if (!turns.size) return fill(title, about.item.metadata.shared.session.title);
    const { task } = last();
    const { shared = {}, opencode = {} } = task.metadata ?? {};
    const { usage } = shared;
    const state = stateOf(task), since = opencode.created_at;
    const cost = (usage?.cost ?? 0) + (usage?.children?.cost ?? 0);
    const whole = titleOf(ordered()[0].task);
    if (title.textContent !== whole) title.textContent = whole;
    fill(facts, badge(state), since && (ended(state) ? h("span", {}, duration(since, task.status.timestamp)) : when(since, "took")),
      usage && h("span", {}, `${count(usage.input_tokens)} in · ${count(usage.output_tokens)} out · ${money(cost)}`),
      opencode.model && h("span", { class: "wide" }, opencode.model), opencode.principal && h("span", {}, opencode.principal), !ended(state) && stop);
    const plan = planned(task), waits = state === "input required" && !plan;
    const runs = !ended(state) && !state.endsWith("required");
    delivery.hidden = !runs;
    compose.set(!waits && !opencode.principal, opencode.principal ? `A task of ${opencode.principal}` : waits ? "Answer the request above first"
      : state === "auth required" ? "Or say something else to try with" : plan ? "Say what to change in the plan" : runs ? "Say something to the agent at work" : "Continue this conversation");
  }

  const planned = (task) => stateOf(task) === "input required" && task.metadata?.shared?.interrupt?.type === "plan";

  async function send(text, files, messageId) {
    const task = last()?.task;
    const begin = async () => {
      const { task: sent } = await say(text, { files, messageId, contextId, metadata: session && { shared: { session: { id: session } } } });
      changed(sent);
      add(sent);
      // The address is that of the newest turn, so that it can be kept; the page stays.
      history.replaceState(null, "", `#/task/${sent.id}`);
      mark();
      head();
    };
    const state = task && stateOf(task);
    if (!task || ended(state)) await begin();
    else if (state === "auth required") await tryAgain(task, text, { files, messageId });
    else if (planned(task)) await say(text, { files, messageId, taskId: task.id });
    else {
      try {
        await say(text, { files, messageId, taskId: task.id, metadata: { shared: { delivery: delivery.value } } });
      } catch (error) {
        // It may have ended in between.
        if (!(error instanceof ApiError) || !ended(stateOf(await get(`tasks/${encodeURIComponent(task.id)}?historyLength=0`)))) throw error;
        await begin();
      }
      delivery.value = "steer";
    }
    follow(true);
  }

  const connected = (well) => {
    if (!well) return (lost ??= setTimeout(() => (offline.hidden = signal.aborted), 3000));
    lost = clearTimeout(lost);
    offline.hidden = true;
  };

  hear((task) => {
    if (task.contextId === contextId && !turns.has(task.id)) (add(task), head());
  });
  signal.addEventListener("abort", () => (sized.disconnect(), near.disconnect()));
  if (asked) {
    add(asked);
    await load();
    while (older && created(ordered()[0].task) > created(asked)) await load();
  } else setTimeout(() => compose.node.querySelector("textarea").focus());
  head();
  if (asked && last().task.id !== id) {
    following = false;
    requestAnimationFrame(() => turns.get(id).node.scrollIntoView());
  }
  return h("article", { class: "task" }, h("header", { class: "bar" }, title, facts), offline, scroller, h("div", { class: "over" }, toEnd), compose.node);
}
