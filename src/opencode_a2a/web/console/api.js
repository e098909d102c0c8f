// The public API: A2A 1.0 over HTTP+JSON, and the methods beyond it over JSON-RPC.
const ROOT = new URL("../", import.meta.url).href;
const KEY = "opencode-a2a.authorization";
const SHARED = "opencode-a2a.shared";

export class ApiError extends Error {
  constructor(status, message, reason) {
    super(message);
    Object.assign(this, { status, reason });
  }
}

export const session = {
  get known() {
    return sessionStorage.getItem(KEY) !== null;
  },
  keep: (authorization) => sessionStorage.setItem(KEY, authorization),
  forget: () => (sessionStorage.removeItem(KEY), (session.shared = false), (session.principal = undefined)),
  refused: () => {},
  // Who is signed in, as the service names them.
  principal: undefined,
  // Whether new tabs get the session from this one.
  get shared() {
    return sessionStorage.getItem(SHARED) !== null;
  },
  set shared(wanted) {
    if (wanted) sessionStorage.setItem(SHARED, "yes");
    else sessionStorage.removeItem(SHARED);
  },
};

// Tabs talk to each other without anything being stored beyond them. What is handed over is a session
// of the console, which ends after 12 hours and with a sign-out, never a token.
const tabs = new BroadcastChannel("opencode-a2a");

export function askTabs(given) {
  tabs.onmessage = async ({ data }) => {
    if (data.given && !session.known) {
      session.keep(data.given);
      session.shared = true;
      given();
    } else if (data.asked && session.known && session.shared) {
      const held = sessionStorage.getItem(KEY);
      const own = held.startsWith("Bearer console.") ? held : await exchanged().catch(() => undefined);
      if (own) tabs.postMessage({ given: own });
    }
  };
  if (!session.known) tabs.postMessage({ asked: true });
}

// A session of the console for the token that this tab has.
async function exchanged() {
  const { code } = await post("console/codes");
  const { token } = await post("console/session", undefined, { authorization: `Bearer ${code}` });
  return `Bearer ${token}`;
}

export const who = async (more) => (await get("console/session", more)).principal;

export async function send(method, path, { body, headers, signal, authorization } = {}) {
  const credential = authorization ?? sessionStorage.getItem(KEY);
  let response;
  try {
    response = await fetch(ROOT + path, {
      method,
      signal,
      cache: "no-store",
      credentials: "omit",
      headers: {
        "A2A-Version": "1.0",
        ...(credential && { Authorization: credential }),
        ...(body && { "Content-Type": "application/json" }),
        ...headers,
      },
      body: body && JSON.stringify(body),
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "The service cannot be reached");
  }
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({}));
  const reason = error?.details?.[0]?.reason;
  if (response.status === 401 && !authorization) session.refused();
  if (response.status === 413) throw new ApiError(413, "This is too large for one message. Send less text, or fewer or smaller files.");
  throw new ApiError(response.status, error?.message ?? `The service answered ${response.status}`, reason);
}

export const get = async (path, more) => (await send("GET", path, more)).json();
export const post = async (path, body, more) => (await send("POST", path, { body, ...more })).json();

export async function call(method, params = {}) {
  const answer = await post("", { jsonrpc: "2.0", id: 1, method, params });
  if (answer.error) throw new ApiError(400, answer.error.message, answer.error.data?.[0]?.reason);
  return answer.result;
}

export const cancel = (id) => post(`tasks/${encodeURIComponent(id)}:cancel`);

// A message of the same id is the same message: whoever does not know whether it arrived may send it again.
export const newId = () => crypto.randomUUID?.() ?? String(Math.random());

export function say(text, { files = [], messageId = newId(), taskId, contextId, metadata } = {}) {
  const message = { messageId, role: "ROLE_USER" };
  Object.assign(message, { parts: [...(text ? [{ text }] : []), ...files] }, taskId && { taskId }, contextId && { contextId });
  return post("message:send", { message, metadata, configuration: { returnImmediately: true } });
}

// Another try counts only for the sign-in that the person saw.
export const tryAgain = (task, text, more) => say(text, { ...more, taskId: task.id, metadata: { opencode: { sign_in: task.status.timestamp } } });

// All tasks in a state: those that wait may be older than everything that a page holds.
export async function inState(state) {
  const found = [];
  for (let token = ""; ; ) {
    const page = await get(`tasks?status=TASK_STATE_${state}&pageSize=100&historyLength=0&pageToken=${encodeURIComponent(token)}`);
    found.push(...page.tasks);
    if (!(token = page.nextPageToken)) return found;
  }
}

const pause = (ms, signal) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });

// Follow a task from its beginning to its end, through lost connections. `hear` returns true at the end.
export async function follow(id, signal, hear, connected) {
  let last = "0";
  for (let wait = 500; !signal.aborted; wait = Math.min(wait * 2, 8000)) {
    try {
      const headers = { "Last-Event-ID": last, Accept: "text/event-stream" };
      const response = await send("GET", `tasks/${encodeURIComponent(id)}:subscribe`, { headers, signal });
      connected(true);
      for await (const event of events(response.body)) {
        wait = 500;
        if (event.name === "error") throw new ApiError(503, event.data.error?.message);
        last = event.id || last;
        if (hear(event.data)) return;
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && error.status >= 400 && error.status < 500 && error.status !== 429) throw error;
    }
    connected(false);
    await pause(wait, signal);
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      const event = { data: "" };
      for (const line of frame.split("\n")) {
        if (line.startsWith("id: ")) event.id = line.slice(4);
        else if (line.startsWith("event: ")) event.name = line.slice(7);
        else if (line.startsWith("data: ")) event.data += line.slice(6);
      }
      if (event.data) yield { ...event, data: JSON.parse(event.data) };
    }
  }
}
