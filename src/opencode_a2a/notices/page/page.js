// The page behind a link: shows one request as the console does, and sends the answer to it.
// It has no session. All that it knows is behind the "#", which the browser keeps to itself.
import { askCard, settled, signInCard } from "../console/ask.js";
import { add, fill, h } from "../console/dom.js";
import { visible } from "../console/odd.js";

const main = document.querySelector("main");
const link = location.hash.slice(1);

async function post(path, body) {
  let response;
  try {
    response = await fetch(new URL(path, import.meta.url), {
      method: "POST", credentials: "omit", cache: "no-store", headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ link, ...body }),
    });
  } catch {
    throw new Error("The service cannot be reached. Try again.");
  }
  const answer = await response.json().catch(() => ({}));
  if (response.ok) return answer;
  throw Object.assign(new Error(answer.error?.message ?? `The service answered ${response.status}`), { over: answer.over });
}

const OVER = { retried: "Somebody has tried again.", void: "The task has gone on or ended without it." };

// How it ended: the line that takes the place of the card, and what that means here.
function end({ resolution, by, at }, said) {
  document.title = "Answered";
  const card = main.querySelector(".ask");
  const line = OVER[resolution] && !by ? h("p", { class: "note settled" }, OVER[resolution]) : settled(card?.querySelector(".subject") && card, { resolution, by }, at);
  // What was read stays readable; the rest of the card is no longer needed.
  if (!line.isConnected) {
    card?.remove();
    add(main, line);
  }
  line.setAttribute("role", "status");
  add(main, said && h("p", { class: "bad", role: "alert" }, said), h("p", { class: "note" }, "You can close this page."));
}

async function open() {
  const { about, page, asked, plan, task, over } = await post("show", {});
  fill(main, h("h1", {}, [about.title, about.project].filter(Boolean).join(" · ")));
  if (over) {
    add(main, h("h2", {}, "This is over"));
    return end(over);
  }
  add(main, h("h2", {}, "A request for you"));
  const send = async (method, params) => {
    try {
      const { settled: given } = await post("answer", { page, method, ...params });
      end({ ...given, by: "you" });
    } catch (raised) {
      if (!raised.over) throw raised;
      end(raised.over, raised.message);
    }
  };
  if (task) return add(main, signInCard(task, null, undefined, () => send("retry")));
  const { markdown } = plan === undefined ? {} : await import("../console/markdown.js");
  add(main, askCard(asked, { send, plan: markdown && h("div", { class: "prose" }, markdown(visible(plan))) }));
}

// Another link in the same tab.
addEventListener("hashchange", () => location.reload());
open().catch((raised) => fill(main, h("h1", {}, "A request for you"), h("p", { class: "bad box", role: "alert" }, raised.message)));
