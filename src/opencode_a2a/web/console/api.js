// The public API: A2A 1.0 over HTTP+JSON, and the methods beyond it over JSON-RPC.
const ROOT = new URL("../", import.meta.url).href;
const KEY = "opencode-a2a.authorization";

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
  forget: () => sessionStorage.removeItem(KEY),
  refused: () => {},
};

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
  throw new ApiError(response.status, error?.message ?? `The service answered ${response.status}`, reason);
}

export const get = async (path, more) => (await send("GET", path, more)).json();
export const post = async (path, body, more) => (await send("POST", path, { body, ...more })).json();

export async function call(method, params = {}) {
  const answer = await post("", { jsonrpc: "2.0", id: 1, method, params });
  if (answer.error) throw new ApiError(400, answer.error.message, answer.error.data?.[0]?.reason);
  return answer.result;
}

export const cancel = (id) => post(`tasks/${id}:cancel`);

export function say(text, { taskId, contextId, metadata } = {}) {
  const message = { messageId: crypto.randomUUID?.() ?? String(Math.random()), role: "ROLE_USER" };
  Object.assign(message, { parts: [{ text }] }, taskId && { taskId }, contextId && { contextId });
  return post("message:send", { message, metadata, configuration: { returnImmediately: true } });
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
      const response = await send("GET", `tasks/${id}:subscribe`, { headers, signal });
      connected(true);
      for await (const event of events(response.body)) {
        wait = 500;
        if (event.name === "error") throw new ApiError(503, event.data.error?.message);
        last = event.id || last;
        if (hear(event.data)) return;
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && error.status >= 400 && error.status < 500) throw error;
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
