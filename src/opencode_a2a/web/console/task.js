// One task: everything that happened, in order, and what can be done about it.
import { askCard, settled } from "./ask.js";
import { cancel, follow, get, say } from "./api.js";
import { long, newFile, patchView } from "./diff.js";
import { add, button, copyButton, count, duration, fill, h, money, perFrame, when } from "./dom.js";
import { blocks } from "./markdown.js";

export const stateOf = (task) => task.status.state.replace("TASK_STATE_", "").toLowerCase().replace("_", " ");
export const ended = (state) => ["completed", "failed", "canceled", "rejected"].includes(state);
export const waits = (state) => state.endsWith("required");
export const titleOf = (task) => task.metadata?.opencode?.title ?? task.metadata?.shared?.session?.title ?? "Task";
export const badge = (state) => h("span", { class: `state ${state.split(" ")[0]}` }, state);

const textOf = (message) => (message.parts ?? []).map((part) => part.text ?? `[${part.filename ?? part.mediaType ?? "data"}]`).join("\n");
const person = (message) => h("div", { class: "person" }, h("span", { class: "sr" }, "You: "), textOf(message));

// Running text: only its last block is drawn again.
class Prose {
  constructor(kind) {
    this.text = "";
    this.drawn = [];
    this.body = h("div", { class: "prose" });
    this.node = kind === "reasoning" ? h("details", { class: "thinking" }, h("summary", {}, "Thinking"), this.body) : this.body;
    this.draw = perFrame(() => this.drawNow());
  }
  grow(text) {
    this.text += text;
    this.draw();
  }
  drawNow() {
    const last = this.drawn.pop();
    last?.node.remove();
    const made = blocks(this.text, last?.at ?? 0);
    add(this.body, made.map((block) => block.node));
    this.drawn.push(...made);
  }
}

export const SIGNS = { pending: "·", running: "", completed: "✓", error: "✕" };
const EDITS = ["edit", "write", "patch", "apply_patch", "multiedit"];

export class Tool {
  constructor() {
    this.began = Date.now();
    this.summary = h("summary");
    this.body = h("div", { class: "body" });
    this.node = h("details", { class: "tool" }, this.summary, this.body);
    this.draw = perFrame(() => this.drawBody());
    this.node.addEventListener("toggle", this.draw);
  }
  set(data) {
    const input = data.input ?? {};
    const about = input.command ?? input.filePath ?? input.url ?? input.pattern ?? input.description ?? data.title ?? "";
    const took = (Date.now() - this.began) / 1000;
    if (this.node.className !== `tool ${data.status}` && EDITS.includes(data.tool) && data.status === "completed") this.node.open = true;
    this.node.className = `tool ${data.status}`;
    fill(this.summary, h("span", { class: "sign", role: "img", "aria-label": data.status }, SIGNS[data.status]), h("span", { class: "name" }, data.tool),
      h("span", { class: "about" }, about.split("\n")[0]),
      data.status === "running" ? when(new Date(this.began).toISOString(), "took") : took >= 1 && h("span", { class: "muted" }, `${took.toFixed(0)} s`));
    this.data = data;
    this.draw();
  }
  drawBody() {
    if (!this.node.open || this.shown === this.data) return;
    this.shown = this.data;
    const { tool, input = {}, output, error, metadata = {} } = this.data;
    const diff = metadata.diff ?? metadata.filediff?.patch;
    const shown = EDITS.includes(tool) && diff ? patchView(diff, input.filePath)
      : tool === "write" && input.content ? newFile(input.filePath, input.content)
      : [input.command ? long(`$ ${input.command}`.split("\n")) : Object.keys(input).length ? long(JSON.stringify(input, null, 2).split("\n")) : null,
        output && long(output.split("\n"))];
    fill(this.body, shown, error && h("p", { class: "bad" }, error));
  }
}

const plan = (todos) => h("ul", { class: "plan" }, todos.map((todo) => h("li", { class: todo.status },
  h("span", { class: "sr" }, `${todo.status.replace("_", " ")}: `), todo.content)));

export function taskView(id, { signal, announce, changed, go, failed }) {
  const title = h("h2", {}, "…");
  const facts = h("div", { class: "facts" });
  const log = h("div", { class: "log" });
  const note = h("p", { class: "progress", hidden: true });
  const tail = h("div", { class: "tail" });
  const offline = h("p", { class: "banner", hidden: true }, "The connection is lost. Trying again…");
  const input = h("textarea", { rows: "1", "aria-label": "Continue this conversation", placeholder: "Continue this conversation" });
  const submit = h("button", { class: "primary" }, "Send");
  const refusal = h("p", { class: "bad", role: "alert" });
  const stop = button("Cancel", async () => {
    stop.disabled = true;
    await cancel(id).catch((error) => (refusal.textContent = error.message));
    stop.disabled = false;
  }, "danger");
  const composer = h("form", { class: "composer", onsubmit: async (event) => {
    event.preventDefault();
    const text = input.value.trim();
    if (!text) return input.focus();
    submit.disabled = true;
    refusal.textContent = "";
    try {
      const retry = state === "auth required" || planned();
      const { task: sent } = await say(text, retry ? { taskId: id } : { contextId: task.contextId });
      input.value = "";
      changed(sent);
      if (sent.id !== id) go(`#/task/${sent.id}`);
    } catch (error) {
      refusal.textContent = error.message;
    }
    submit.disabled = input.disabled;
  }, onkeydown: (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) (event.preventDefault(), composer.requestSubmit());
  } }, input, submit, refusal);
  const root = h("article", { class: "task" }, h("header", { class: "bar" }, title, facts), offline,
    h("div", { class: "scroller" }, log, note, tail), composer);

  let task, state = "submitted", open, lost, planNode;
  let tools, cards, prose;
  const reset = () => {
    [tools, cards, prose, open, planNode] = [new Map(), new Map(), [], undefined, undefined];
    log.replaceChildren();
  };
  reset();

  const put = (node) => {
    const near = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 160;
    log.append(node);
    if (near) requestAnimationFrame(() => (scroller.scrollTop = scroller.scrollHeight));
  };
  const scroller = root.querySelector(".scroller");
  new ResizeObserver(() => {
    if (!ended(state) && scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 240) scroller.scrollTop = scroller.scrollHeight;
  }).observe(log);

  // A plan waits: what is said changes it.
  const planned = () => state === "input required" && task.metadata?.shared?.interrupt?.type === "plan";
  const answers = { say: (text) => say(text, { taskId: id }) };

  function head() {
    const { shared = {}, opencode = {} } = task.metadata ?? {};
    const { usage } = shared;
    const cost = (usage?.cost ?? 0) + (usage?.children?.cost ?? 0);
    title.textContent = titleOf(task);
    const since = opencode.created_at;
    fill(facts, badge(state), since && (ended(state) ? h("span", {}, duration(since, task.status.timestamp)) : when(since, "took")),
      usage && h("span", {}, `${count(usage.input_tokens)} in · ${count(usage.output_tokens)} out · ${money(cost)}`),
      opencode.model && h("span", { class: "wide" }, opencode.model), opencode.principal && h("span", {}, opencode.principal), !ended(state) && stop);
    const busy = (state === "input required" && !planned()) || opencode.principal;
    input.disabled = submit.disabled = busy;
    input.placeholder = opencode.principal ? `A task of ${opencode.principal}` : busy ? "Answer the request above first" : state === "auth required" ? "Try again after signing in to the provider" : planned() ? "Say what to change in the plan" : "Continue this conversation";
    if (!ended(state)) return fill(tail);
    const session = shared.session?.id;
    // The message of a completed task is its answer, which is there already.
    const said = state !== "completed" && task.status.message;
    fill(tail, said && h("p", { class: state === "failed" ? "bad box" : "note" }, textOf(said)),
      h("p", { class: "ids" }, opencode.directory && h("span", {}, opencode.directory), copyButton(id, "Copy task id"),
        session && [h("a", { href: `#/session/${session}` }, "Session"), copyButton(session, "Copy session id")]));
  }

  function artifact({ artifact: made, append }) {
    const hints = made.metadata?.shared?.stream ?? {};
    const [part] = made.parts ?? [];
    if (hints.block_type === "tool_call") {
      open = undefined;
      const data = part.data ?? {};
      if (data.tool === "todowrite" && data.input?.todos) return showPlan(data.input.todos);
      let tool = tools.get(made.artifactId);
      if (!tool) put((tools.set(made.artifactId, (tool = new Tool())), tool.node));
      tool.set(data);
    } else if (hints.block_type === "text" || hints.block_type === "reasoning") {
      const kind = made.name === "plan" ? "plan" : hints.block_type;
      if (hints.source === "final_snapshot") {
        // What a provider had begun is void: this is the whole text anew.
        const [first, ...others] = prose.filter((one) => one.kind === kind);
        others.forEach((one) => one.text.node.remove());
        if (first) {
          const anew = new Prose(kind);
          first.text.node.replaceWith(anew.node);
          first.text = anew;
          prose = prose.filter((one) => !others.includes(one));
          open = undefined;
          return anew.grow(part?.text ?? "");
        }
      }
      if (!part?.text) return;
      if (open?.kind !== kind) {
        prose.push((open = { kind, text: new Prose(kind) }));
        put(open.text.node);
      }
      open.text.grow(part.text);
    } else if (made.name === "diff") {
      open = undefined;
      const patch = made.parts.find(({ raw }) => raw), files = made.parts.find(({ data }) => data);
      put(h("section", { class: "changes" }, h("h3", {}, "Changes"), patch && patchView(decoded(patch.raw)), files?.data.truncated && h("p", { class: "note" }, "The diff was cut.")));
    }
  }

  function showPlan(todos) {
    const made = plan(todos);
    if (planNode) planNode.replaceWith(made);
    else put(made);
    planNode = made;
  }

  function status(update) {
    const { shared = {}, opencode } = update.metadata ?? {};
    const { progress, interrupt } = shared;
    task = { ...task, status: update.status, metadata: { shared: { ...task.metadata?.shared, ...shared }, opencode: { ...task.metadata?.opencode, ...opencode } } };
    const before = state;
    state = stateOf(task);
    if (progress?.type === "todo") showPlan(progress.todos ?? []);
    else if (progress && !progress.type.startsWith("step")) {
      const words = [progress.title ?? progress.type, progress.subtitle, progress.reason].filter(Boolean).join(" · ");
      note.hidden = progress.status === "completed";
      note.textContent = progress.type === "recovered" ? "The service was restarted; the task went on." : words;
    } else if (!progress) note.hidden = true;
    if (interrupt?.phase === "asked") {
      const card = askCard(interrupt, answers);
      cards.set(interrupt.request_id, card);
      open = undefined;
      put(card);
    } else if (interrupt) {
      const card = cards.get(interrupt.request_id);
      const line = settled(card, interrupt, update.status.timestamp);
      if (!card) put(line);
      cards.delete(interrupt.request_id);
    }
    if (before !== state) announce(`${titleOf(task)}: ${state}`);
    if (ended(state)) cards.forEach((card) => card.remove());
    head();
    changed(task);
  }

  function hear(event) {
    if (event.task) {
      // The log is gone, or was rewritten: the task as it is.
      task = { ...event.task };
      reset();
      begin();
      for (const made of task.artifacts ?? []) artifact({ artifact: made });
      state = stateOf(task);
      for (const asked of [task.metadata?.shared?.interrupt].filter((one) => one?.phase === "asked")) put(askCard(asked, answers));
      head();
    } else if (event.artifactUpdate) artifact(event.artifactUpdate);
    else if (event.statusUpdate) status(event.statusUpdate);
    return ended(state) && Boolean(event.statusUpdate ?? event.task);
  }

  const begin = () => task.history?.[0] && put(person(task.history[0]));
  const connected = (well) => {
    if (!well) return (lost ??= setTimeout(() => (offline.hidden = signal.aborted), 3000));
    lost = clearTimeout(lost);
    offline.hidden = true;
  };

  (async () => {
    try {
      task = await get(`tasks/${id}`, { signal });
      state = stateOf(task);
      begin();
      head();
      conversation(task.contextId, id).then((node) => node && log.before(node));
      await follow(id, signal, hear, connected);
    } catch (error) {
      if (!signal.aborted) failed(error);
    }
  })();
  return root;
}

const decoded = (base64) => new TextDecoder().decode(Uint8Array.from(atob(base64), (one) => one.charCodeAt(0)));

// The other tasks of the same conversation.
async function conversation(contextId, id) {
  const { tasks } = await get(`tasks?contextId=${encodeURIComponent(contextId)}&pageSize=20&historyLength=0`).catch(() => ({ tasks: [] }));
  if (tasks.length < 2) return null;
  return h("nav", { class: "conversation", "aria-label": "This conversation" }, tasks.reverse().map((one) =>
    h("a", { href: `#/task/${one.id}`, "aria-current": one.id === id ? "page" : null }, titleOf(one))));
}
