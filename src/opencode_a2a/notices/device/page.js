// Subscribes this browser to messages, in a page of its own: only here may a script be named to the
// browser that is not in the page, the worker, and only that one.
import { ApiError, get, send, session } from "../console/api.js";
import { add, button, fill, h } from "../console/dom.js";

const main = document.querySelector("main");
const scripts = self.trustedTypes?.createPolicy("worker", { createScriptURL: () => new URL("worker.js", import.meta.url).href });
const PATH = "notices/subscription";

export async function worker() {
  const registration = await navigator.serviceWorker.register(scripts ? scripts.createScriptURL("") : new URL("worker.js", import.meta.url).href);
  const starting = registration.installing ?? registration.waiting;
  if (starting) await new Promise((ready) => starting.addEventListener("statechange", () => registration.active && ready()));
  return registration;
}

async function subscribe() {
  if ((await Notification.requestPermission()) !== "granted") throw new Error("The browser does not allow messages of this site. Change that in its settings.");
  const { public_key: applicationServerKey } = await get(PATH);
  const { pushManager } = await worker();
  let subscription;
  try {
    subscription = await pushManager.subscribe({ userVisibleOnly: true, applicationServerKey });
  } catch {
    throw new Error("This browser cannot reach its push service. Try another browser or network.");
  }
  await send("POST", PATH, { body: subscription.toJSON() });
}

async function unsubscribe(subscription) {
  await send("DELETE", `${PATH}?endpoint=${encodeURIComponent(subscription.endpoint)}`);
  await subscription.unsubscribe();
}

async function draw() {
  fill(main, h("h1", {}, "Messages to this device"));
  if (!session.known) return add(main, h("p", {}, "First ", h("a", { href: "console" }, "sign in to the console"), " in this tab, and then open “Messages to this device” in its About page."));
  if (!("serviceWorker" in navigator) || !("PushManager" in window)) return add(main, h("p", { class: "bad box" }, "This browser takes no messages from this address. It needs https, and on an iPhone the page on the home screen."));
  const known = await navigator.serviceWorker.getRegistration(new URL(".", import.meta.url));
  const subscription = await known?.pushManager.getSubscription();
  const error = h("p", { class: "bad", role: "alert" });
  const act = (label, work, kind) => button(label, async ({ target }) => {
    target.disabled = true;
    error.textContent = "";
    try {
      await work();
      await draw();
    } catch (raised) {
      error.textContent = raised instanceof ApiError && raised.status === 401 ? "Your session has ended. Sign in to the console again." : raised.message;
      target.disabled = false;
    }
  }, kind);
  add(main, h("p", {}, "When a task waits for you or ends, this browser shows a message, also while the console is closed. Its text is encrypted on the way."),
    h("div", { class: "buttons" }, subscription ? [h("span", { class: "ok", role: "status" }, "This device gets messages."), act("Stop", () => unsubscribe(subscription))] : act("Get messages on this device", subscribe, "primary")),
    error, h("p", {}, h("a", { href: "console" }, "Back to the console")));
}

draw();
