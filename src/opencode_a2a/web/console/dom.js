// Every node is made here. Text becomes text nodes, so nothing that a model says can become markup.
export function h(tag, props, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  add(node, children);
  return node;
}

export function add(node, ...children) {
  node.append(...children.flat(Infinity).filter((child) => child || child === 0));
}

export function fill(node, ...children) {
  node.replaceChildren();
  add(node, children);
  return node;
}

export const button = (label, onclick, kind = "", more = {}) =>
  h("button", { type: "button", class: kind, onclick, ...more }, label);

export function copyButton(text, label = "Copy") {
  return button(label, async (event) => {
    const { target } = event;
    try {
      await navigator.clipboard.writeText(text);
      target.textContent = "Copied";
    } catch {
      target.textContent = "Not allowed";
    }
    setTimeout(() => (target.textContent = label), 1500);
  }, "small");
}

// Numbers and times, as short as they can be read

export const count = (n) =>
  n < 1000 ? String(n ?? 0) : n < 1e6 ? `${(n / 1000).toFixed(n < 1e5 ? 1 : 0)}k` : `${(n / 1e6).toFixed(1)}M`;
export const money = (cost) =>
  !cost ? "$0" : cost < 0.0001 ? "<$0.0001" : `$${cost.toFixed(cost < 0.1 ? 4 : 2)}`;
export const clock = (time) => new Date(time).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });

function span(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d`;
}

const KINDS = {
  ago: (ms) => `${span(-ms / 1000)} ago`,
  left: (ms) => (ms > 0 ? `${span(ms / 1000)} left` : "time is up"),
  took: (ms) => span(-ms / 1000),
};

// A time that keeps itself up to date: "ago", "left" or "took".
export function when(time, kind = "ago") {
  const node = h("time", { datetime: time, title: new Date(time).toLocaleString(), "data-kind": kind });
  refresh(node);
  return node;
}

export const duration = (from, to) => span((new Date(to) - new Date(from)) / 1000);

function refresh(node) {
  const text = KINDS[node.dataset.kind](new Date(node.dateTime) - Date.now());
  if (node.textContent !== text) node.textContent = text;
}

setInterval(() => {
  if (!document.hidden) document.querySelectorAll("time[data-kind]").forEach(refresh);
}, 1000);

// Draw at most once per frame, however many changes there are.
export function perFrame(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    // A hidden tab has no frames.
    (document.hidden ? setTimeout : requestAnimationFrame)(() => {
      asked = false;
      draw();
    });
  };
}
