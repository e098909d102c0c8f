// One task, which is a turn of a conversation: everything that happened, in order.
import { askCard, settled, signInCard } from "./ask.js";
import { call, follow, get } from "./api.js";
import { isPicture, picture, said } from "./compose.js";
import { fileView, long, newFile, patchView } from "./diff.js";
import { add, button, copyButton, fill, h, perFrame, when } from "./dom.js";
import { blocks } from "./markdown.js";
import { marked, visible } from "./odd.js";
import { gist } from "./subject.js";

export const stateOf = (task) => task.status.state.replace("TASK_STATE_", "").toLowerCase().replace("_", " ");
export const ended = (state) => ["completed", "failed", "canceled", "rejected"].includes(state);
export const waits = (state) => state.endsWith("required");
export const titleOf = (task) => task.metadata?.opencode?.title ?? task.metadata?.shared?.session?.title ?? "Task";
const CALLED = { "input required": "waits for you", "auth required": "needs a sign-in", submitted: "about to start" };
const called = (state) => CALLED[state] ?? state;
export const badge = (state) => h("span", { class: `state ${state.split(" ")[0]}` }, called(state));

const textOf = (message) => (message.parts ?? []).map((part) => part.text ?? "").join("\n");
const person = (parts) => h("div", { class: "person" }, h("span", { class: "sr" }, "You: "), said(parts));
const FATES = { accepted: { queue: "Waits for the end of this turn" }, refused: "Not delivered", dropped: "Not delivered: the turn had ended" };

// Running text: only its last block is drawn again, and less often if that takes long.
class Prose {
  constructor(kind) {
    this.kind = kind;
    this.text = "";
    this.drawn = [];
    this.body = h("div", { class: "prose" });
    this.node = kind === "reasoning" ? h("details", { class: "thinking" }, h("summary", {}, "Thinking"), this.body) : this.body;
    this.draw = perFrame(() => this.drawNow());
  }
  grow(text) {
    text = text.replace(/\r\n?/g, "\n");
    this.text += this.kind === "plan" ? visible(text) : text;
    if (!this.rest) this.draw();
    else this.timer ??= setTimeout(() => ((this.timer = undefined), this.draw()), this.rest);
  }
  drawNow() {
    const began = performance.now();
    const last = this.drawn.pop();
    last?.node.remove();
    const made = blocks(this.text, last?.at ?? 0);
    add(this.body, made.map((block) => block.node));
    this.drawn.push(...made);
    const took = performance.now() - began;
    this.rest = took > 20 ? took * 4 : 0;
  }
}

// What is heard this soon may have happened long ago.
const REPLAY_MS = 1500;
export const SIGNS = { pending: "·", running: "", completed: "✓", error: "✕", unfinished: "–" };
const EDITS = ["edit", "write", "patch", "apply_patch", "multiedit"];

export class Tool {
  // `live` is false for calls of the past, of which nobody knows when they began.
  constructor(live = false) {
    this.began = live && Date.now();
    this.summary = h("summary");
    this.body = h("div", { class: "body" });
    this.node = h("details", { class: "tool" }, this.summary, this.body);
    this.draw = perFrame(() => this.drawBody());
    this.node.addEventListener("toggle", this.draw);
  }
  set(data) {
    const input = data.input ?? {};
    const about = gist(data.tool, input) ?? data.title ?? "";
    const took = this.began && (Date.now() - this.began) / 1000;
    if (this.node.className !== `tool ${data.status}` && EDITS.includes(data.tool) && data.status === "completed") this.node.open = true;
    this.node.className = `tool ${data.status}`;
    fill(this.summary, h("span", { class: "sign", role: "img", "aria-label": data.status }, SIGNS[data.status]), h("span", { class: "name" }, data.tool),
      h("span", { class: "about" }, marked(about)),
      this.began && data.status === "running" ? when(new Date(this.began).toISOString(), "took") : took >= 1 && h("span", { class: "muted" }, `${took.toFixed(0)} s`));
    this.data = data;
    this.draw();
  }
  // The turn has ended, and this call with it, whatever was told of it last.
  end() {
    if (["running", "pending"].includes(this.data?.status)) this.set({ ...this.data, status: "unfinished" });
  }
  drawBody() {
    if (!this.node.open || this.shown === this.data) return;
    this.shown = this.data;
    const { tool, input = {}, output, error, metadata = {} } = this.data;
    const diff = metadata.diff ?? metadata.filediff?.patch;
    const shown = EDITS.includes(tool) && diff ? patchView(diff, typeof input.filePath === "string" ? input.filePath : undefined)
      : tool === "write" && typeof input.content === "string" && typeof input.filePath === "string" ? newFile(input.filePath, input.content)
      : [tool === "bash" && typeof input.command === "string" ? long(`$ ${input.command}`.split("\n")) : Object.keys(input).length ? long(JSON.stringify(input, null, 2).split("\n")) : null,
        output && long(output.replace(/\n$/, "").split("\n"))];
    fill(this.body, shown, error && h("p", { class: "bad" }, error));
  }
}

const plan = (todos) => h("ul", { class: "plan" }, todos.map((todo) => h("li", { class: todo.status },
  h("span", { class: "sr" }, `${todo.status.replace("_", " ")}: `), todo.content)));

// `shown` is called with a card that waits, `answered` when a person has answered one, `updated` when the status changed.
export function turnView(first, { signal, announce, changed, failed, connected, shown, answered, updated }) {
  const { id } = first;
  const log = h("div", { class: "log" });
  const note = h("p", { class: "progress", hidden: true });
  const tail = h("div", { class: "tail" });
  const root = h("section", { class: "turn unread" }, log, note, tail);

  let task = first, state = stateOf(first), open, planNode, started = false, opened, unsigned;
  let tools, cards, prose, messages;
  const reset = () => {
    [tools, cards, prose, messages, open, planNode, unsigned] = [new Map(), new Map(), [], new Map(), undefined, undefined, undefined];
    log.replaceChildren();
  };
  reset();

  const put = (node) => log.append(node);
  const ask = (asked) => {
    open = undefined;
    // A plan is read and approved in its card, with all that was said of it between tool calls.
    const plan = asked.type === "plan" ? prose.filter((one) => one.kind === "plan") : [];
    prose = prose.filter((one) => !plan.includes(one));
    const card = askCard(asked, { answered, taskId: id, plan: plan.map((one) => one.text.node) });
    cards.get(asked.request_id)?.remove(); // what it is for has changed since it was shown
    cards.set(asked.request_id, card);
    put(card);
    shown(card);
  };

  function foot() {
    const { shared = {}, opencode = {} } = task.metadata ?? {};
    if (state === "auth required" && !unsigned) {
      put((unsigned = signInCard(task, null, answered)));
      shown(unsigned);
    } else if (state !== "auth required") unsigned = unsigned?.remove();
    if (!ended(state)) return fill(tail);
    tools.forEach((tool) => tool.end());
    const session = shared.session?.id;
    // The message of a completed task is its answer, which is there already.
    const words = state !== "completed" && task.status.message;
    const cut = state === "completed" && opencode.finish === "length";
    fill(tail, cut && h("p", { class: "note" }, "The answer may be cut off: the model reached the limit of its output."),
      words && h("p", { class: state === "failed" ? "bad box" : "note" }, textOf(words)),
      h("p", { class: "ids" }, opencode.directory && h("span", {}, opencode.directory), copyButton(id, "Copy task id"),
        session && [h("a", { href: `#/session/${session}` }, "Session"), copyButton(session, "Copy session id")]));
  }

  function artifact({ artifact: made }) {
    const hints = made.metadata?.shared?.stream ?? {};
    const [part] = made.parts ?? [];
    if (hints.block_type === "tool_call") {
      open = undefined;
      const data = part.data ?? {};
      if (data.tool === "todowrite" && data.input?.todos) return showPlan(data.input.todos);
      let tool = tools.get(made.artifactId);
      if (!tool) put((tools.set(made.artifactId, (tool = new Tool(Date.now() - opened > REPLAY_MS))), tool.node));
      tool.set(data);
    } else if (hints.block_type === "text" || hints.block_type === "reasoning") text(made, hints, part);
    else if (made.name === "diff") {
      open = undefined;
      const patch = made.parts.find(({ raw }) => raw), files = made.parts.find(({ data }) => data);
      put(h("section", { class: "changes" }, h("h3", {}, "Changes"), patch && patchView(decoded(patch.raw), undefined, (file, rows, many) => fileView(file, rows, many, wholeFile(file))), files?.data.truncated && h("p", { class: "note" }, "The diff was cut.")));
    } else (made.parts ?? []).filter(isPicture).forEach((one) => put(picture(one)));
  }

  function text(made, hints, part) {
    const kind = made.name === "plan" ? "plan" : hints.block_type;
    if (hints.source === "final_snapshot") {
      // What a provider had begun is void: this is the whole text anew.
      const [begun, ...others] = prose.filter((one) => one.kind === kind);
      others.forEach((one) => one.text.node.remove());
      if (begun) {
        const anew = new Prose(kind);
        begun.text.node.replaceWith(anew.node);
        begun.text = anew;
        prose = prose.filter((one) => !others.includes(one));
        open = undefined;
        return anew.grow(part?.text ?? "");
      }
    }
    if (!part?.text) return;
    if (note.dataset.type === "text") note.hidden = true; // it said that this text has to wait
    if (open?.kind !== kind) {
      prose.push((open = { kind, text: new Prose(kind) }));
      put(open.text.node);
    }
    open.text.grow(part.text);
  }

  function showPlan(todos) {
    const made = plan(todos);
    if (planNode) planNode.replaceWith(made);
    else put(made);
    planNode = made;
  }

  // What was said while the task worked stands where the agent got it, with what became of it.
  async function message({ part_id: messageId, status: fate, title, subtitle, reason }) {
    let bubble = messages.get(messageId);
    if (!bubble) {
      bubble = { words: person([{ text: title ?? "" }]), fate: h("p", { class: "note fate" }) };
      messages.set(messageId, bubble);
      open = undefined;
      put(h("div", { class: "added" }, bubble.words, bubble.fate));
      const known = () => task.history?.find((one) => one.messageId === messageId);
      if (!known()) task = { ...task, history: (await get(`tasks/${encodeURIComponent(id)}`, { signal }).catch(() => task)).history };
      if (known()) fill(bubble.words, h("span", { class: "sr" }, "You: "), said(known().parts));
    }
    const told = fate === "accepted" ? FATES.accepted[subtitle] : FATES[fate];
    bubble.fate.textContent = [told, told && fate !== "accepted" && reason].filter(Boolean).join(": ");
  }

  function status(update) {
    const { shared = {}, opencode } = update.metadata ?? {};
    const { progress, interrupt } = shared;
    task = { ...task, status: update.status, metadata: { shared: { ...task.metadata?.shared, ...shared }, opencode: { ...task.metadata?.opencode, ...opencode } } };
    const before = state;
    state = stateOf(task);
    if (progress?.type === "todo") showPlan(progress.todos ?? []);
    else if (progress?.type === "message") message(progress);
    else if (progress && !progress.type.startsWith("step")) {
      const words = [progress.title ?? progress.type, progress.subtitle, progress.reason].filter(Boolean).join(" · ");
      note.hidden = ["completed", "error"].includes(progress.status);
      note.dataset.type = progress.type;
      note.textContent = progress.type === "recovered" ? "The service was restarted; the task went on." : words;
    } else if (!progress) note.hidden = true;
    if (interrupt?.phase === "asked") ask(interrupt);
    else if (interrupt) {
      const card = cards.get(interrupt.request_id);
      const line = settled(card, interrupt, update.status.timestamp);
      if (!card) put(line);
      cards.delete(interrupt.request_id);
    }
    if (before !== state) announce(`${titleOf(task)}: ${called(state)}`);
    if (ended(state)) cards.forEach((card) => card.remove());
    foot();
    updated();
    changed(task);
  }

  function hear(event) {
    root.classList.remove("unread");
    if (event.task) {
      // The log is gone, or was rewritten: the task as it is.
      task = { ...event.task };
      reset();
      begin();
      for (const made of task.artifacts ?? []) artifact({ artifact: made });
      state = stateOf(task);
      const asked = task.metadata?.shared?.interrupt;
      if (asked?.phase === "asked") ask(asked);
      foot();
      updated();
    } else if (event.artifactUpdate) artifact(event.artifactUpdate);
    else if (event.statusUpdate) status(event.statusUpdate);
    return ended(state) && Boolean(event.statusUpdate ?? event.task);
  }

  const begin = () => task.history?.[0] && put(person(task.history[0].parts));

  async function start() {
    if (started) return;
    started = true;
    try {
      task = await get(`tasks/${encodeURIComponent(id)}`, { signal });
      state = stateOf(task);
      begin();
      foot();
      updated();
      opened = Date.now();
      await follow(id, signal, hear, connected);
    } catch (error) {
      if (!signal.aborted) failed(error);
    }
  }

  return {
    node: root, start,
    get task() {
      return task;
    },
  };
}

// A file as it is now, in place of the button.
function wholeFile(path) {
  const shown = h("div", { class: "whole" });
  fill(shown, button("Whole file", async ({ target }) => {
    target.disabled = true;
    const { content, encoding, truncated, message } = await call("opencode.files.read", { path }).catch((error) => error);
    fill(shown, message ? h("p", { class: "bad" }, message) : encoding ? h("p", { class: "note" }, "Not a text.") : [long(content.split("\n")), truncated && h("p", { class: "note" }, "The file was cut.")]);
  }, "small"));
  return shown;
}

const decoded = (base64) => new TextDecoder().decode(Uint8Array.from(atob(base64), (one) => one.charCodeAt(0)));
