// What a person sends: text, and files that are chosen, pasted or dropped.
import { button, h } from "./dom.js";

const PICTURES = ["image/png", "image/jpeg", "image/gif", "image/webp"];
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

// Files that go along with the next message; `box` is where they can be pasted and dropped.
export function attachments(box, failed) {
  const held = new Map();
  const tray = h("ul", { class: "files", "aria-label": "Attached files", hidden: true });
  const picker = h("input", { type: "file", multiple: true, hidden: true, "aria-label": "Files to attach", onchange: () => take([...picker.files]) });
  const take = async (files) => {
    picker.value = "";
    for (const file of files) {
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
  box.addEventListener("drop", (event) => given(event.dataTransfer, event));
  box.addEventListener("dragover", (event) => event.dataTransfer?.types.includes("Files") && event.preventDefault());
  return {
    tray, button: [picker, button("Attach", () => picker.click(), "", { title: "Files can also be pasted and dropped" })],
    get parts() {
      return [...held.values()];
    },
    clear: () => (held.clear(), tray.replaceChildren(), (tray.hidden = true)),
  };
}

// One line that grows, with the button that sends it. `send` gets the text and the files; what it throws is shown.
export function composer(label, send, more = null) {
  const input = h("textarea", { rows: "1", "aria-label": label, placeholder: label });
  const submit = h("button", { class: "primary" }, "Send");
  const refusal = h("p", { class: "bad", role: "alert" });
  const form = h("form", { class: "composer", onsubmit: async (event) => {
    event.preventDefault();
    const text = input.value.trim(), files = attached.parts;
    if (!text && !files.length) return input.focus();
    submit.disabled = true;
    refusal.textContent = "";
    try {
      await send(text, files);
      input.value = "";
      attached.clear();
    } catch (error) {
      refusal.textContent = error.message;
    }
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
