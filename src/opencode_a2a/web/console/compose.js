// What a person sends: text, and files that are chosen, pasted or dropped.
import { newId } from "./api.js";
import { button, h } from "./dom.js";

const PICTURES = ["image/png", "image/jpeg", "image/gif", "image/webp"];
const LARGE = 400000, EDGE = 2000;
const size = (bytes) => bytes < 1000 ? `${bytes} B` : bytes < 1e6 ? `${Math.round(bytes / 1000)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;

export const isPicture = ({ raw, mediaType }) => Boolean(raw) && PICTURES.includes(mediaType);

export function picture({ raw, mediaType, filename }) {
  const bytes = Uint8Array.from(atob(raw), (one) => one.charCodeAt(0));
  const url = URL.createObjectURL(new Blob([bytes], { type: mediaType }));
  const forget = () => URL.revokeObjectURL(url);
  return h("img", { src: url, alt: filename ?? "A picture", onload: forget, onerror: forget });
}

// A message in the log: its words, its pictures, and the names of its other files.
export const said = (parts = []) => parts.map((part) =>
  part.text !== undefined ? h("span", { class: "words" }, part.text) : isPicture(part) ? picture(part) : h("span", { class: "file" }, `[${part.filename ?? part.mediaType ?? "data"}]`));

const base64 = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

// A photo is larger than a message may be, and than what a model looks at.
async function smaller(file) {
  if (file.size < LARGE || !["image/png", "image/jpeg", "image/webp"].includes(file.type)) return file;
  const whole = await createImageBitmap(file);
  const scale = Math.min(1, EDGE / Math.max(whole.width, whole.height));
  const canvas = h("canvas", { width: Math.round(whole.width * scale), height: Math.round(whole.height * scale) });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "white";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(whole, 0, 0, canvas.width, canvas.height);
  const made = await new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.85));
  return made && made.size < file.size ? new File([made], file.name.replace(/(\.\w+)?$/, ".jpg"), { type: made.type }) : file;
}

// Files that go along with the next message; `box` is where they can be pasted. They can be dropped anywhere in the page.
export function attachments(box, failed) {
  const held = new Map();
  const tray = h("ul", { class: "files", "aria-label": "Attached files", hidden: true });
  const picker = h("input", { type: "file", multiple: true, hidden: true, "aria-label": "Files to attach", onchange: () => take([...picker.files]) });
  const take = async (files) => {
    picker.value = "";
    for (const given of files) {
      const file = await smaller(given).catch(() => given);
      const raw = await base64(file).catch(() => failed(`${file.name} cannot be read`));
      if (raw === undefined) continue;
      const part = { raw, mediaType: file.type || "application/octet-stream", filename: file.name || "pasted" };
      const row = h("li", {}, isPicture(part) && picture(part), h("span", {}, `${part.filename} (${size(file.size)})`),
        button("×", () => (held.delete(row), row.remove(), (tray.hidden = !held.size)), "small", { "aria-label": `Remove ${part.filename}` }));
      held.set(row, part);
      tray.append(row);
      tray.hidden = false;
    }
  };
  const given = (transfer, event) => {
    if (!transfer?.files.length) return;
    event.preventDefault();
    take([...transfer.files]);
  };
  box.addEventListener("paste", (event) => given(event.clipboardData, event));
  box.classList.add("takes-files");
  box.addEventListener("files", ({ detail }) => take(detail));
  return {
    tray, button: [picker, button("Attach", () => picker.click(), "", { title: "Files can also be pasted and dropped" })],
    get parts() {
      return [...held.values()];
    },
    // Takes the files away; they are put back if they were not sent.
    take: () => {
      const taken = [...held];
      held.clear();
      tray.replaceChildren();
      tray.hidden = true;
      return taken;
    },
    put: (taken) => {
      taken.forEach(([row, part]) => (held.set(row, part), tray.append(row)));
      tray.hidden = !held.size;
    },
  };
}

// Dropped beside a composer, a file would take the place of the page.
export function takeDrops(page) {
  addEventListener("dragover", (event) => event.dataTransfer?.types.includes("Files") && event.preventDefault());
  addEventListener("drop", (event) => {
    if (!event.dataTransfer?.files.length) return;
    event.preventDefault();
    page.querySelector(".takes-files")?.dispatchEvent(new CustomEvent("files", { detail: [...event.dataTransfer.files] }));
  });
}

// What was written and not sent, by the place where it was written: whoever looks at something else finds it again.
const drafts = new Map();
export const forgetDrafts = () => drafts.clear();

export function draft(input, place) {
  const keep = () => input.value ? drafts.set(place, input.value) : drafts.delete(place);
  input.value = drafts.get(place) ?? "";
  input.addEventListener("input", keep);
  return keep;
}

// One line that grows, with the button that sends it. `send` gets the text, the files and the id of the message;
// what it throws is shown. Until it is sent, a message has the same id.
export function composer(label, place, send, more = null) {
  const input = h("textarea", { rows: "1", "aria-label": label, placeholder: label });
  const keep = draft(input, place);
  const submit = h("button", { class: "primary" }, "Send");
  const refusal = h("p", { class: "bad", role: "alert" });
  let id = newId(), sending = false;
  const form = h("form", { class: "composer", onsubmit: async (event) => {
    event.preventDefault();
    const text = input.value.trim(), files = attached.parts;
    if (sending) return;
    if (!text && !files.length) return input.focus();
    sending = submit.disabled = true;
    refusal.textContent = "";
    // What is written meanwhile is the next message.
    input.value = "";
    const taken = attached.take();
    try {
      await send(text, files, id);
      id = newId();
    } catch (error) {
      refusal.textContent = error.message;
      input.value = [text, input.value].filter(Boolean).join("\n");
      attached.put(taken);
    }
    keep();
    sending = false;
    submit.disabled = input.disabled;
  }, onkeydown: (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target === input) (event.preventDefault(), form.requestSubmit());
  } });
  const attached = attachments(form, (text) => (refusal.textContent = text));
  form.append(attached.tray, input, ...attached.button, ...(more ? [more] : []), submit, refusal);
  return {
    node: form,
    // `why` says why nothing can be sent now, or what is sent.
    set: (enabled, why) => {
      input.disabled = submit.disabled = !enabled;
      input.placeholder = why;
    },
    refuse: (text) => (refusal.textContent = text),
  };
}
