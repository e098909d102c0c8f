// Unified diffs to nodes, one foldable block for each file.
import { add, copyButton, h } from "./dom.js";

const CUT = 200;

export function patchView(patch, name) {
  return files(patch).map(({ file, lines }) => fileView(name ?? file, lines));
}

// A new file, as the diff that it is.
export const newFile = (name, text) => fileView(name, text.replace(/\n$/, "").split("\n").map((line) => `+${line}`));

function files(patch) {
  const found = [];
  let current;
  const begin = (file) => found.push((current = { file, lines: [] }));
  const lines = patch.replace(/\n$/, "").split("\n");
  lines.forEach((line, i) => {
    if (/^(diff --git |Index: )/.test(line)) begin(line.replace(/^(diff --git a\/\S+ b\/|Index: )/, ""));
    else if (line.startsWith("--- ") && lines[i + 1]?.startsWith("+++ ")) {
      if (!current || current.lines.length) begin("");
      const old = line.slice(4).split("\t")[0];
      const now = lines[i + 1].slice(4).split("\t")[0];
      current.file ||= (now === "/dev/null" ? old : now).replace(/^[ab]\//, "");
    } else if (!/^(\+\+\+ |=====|index |new file|deleted file|old mode|new mode|similarity|rename )/.test(line)) {
      if (!current) begin("");
      current.lines.push(line);
    } else if (line.startsWith("+++ ") && !lines[i - 1]?.startsWith("--- ")) current?.lines.push(line);
  });
  return found;
}

function fileView(file, lines) {
  const added = lines.filter((line) => line.startsWith("+")).length;
  const removed = lines.filter((line) => line.startsWith("-")).length;
  return h("details", { class: "diff", open: true },
    h("summary", {}, h("span", { class: "path" }, file || "changes"),
      h("span", { class: "counts" }, h("span", { class: "ok" }, `+${added}`), " ", h("span", { class: "bad" }, `−${removed}`))),
    long(lines, row), h("div", { class: "foot" }, copyButton(lines.join("\n"), "Copy diff")));
}

const KINDS = { "+": "add", "-": "del", "@": "hunk" };
const row = (line) => h("span", { class: KINDS[line[0]] ?? "same" }, `${line}\n`);

// A scrolling block of lines that begins short.
export function long(lines, draw = (line) => `${line}\n`) {
  const block = h("pre", { tabindex: "0" }, lines.slice(0, CUT).map(draw));
  if (lines.length <= CUT) return block;
  const more = h("button", { type: "button", class: "small", onclick: () => {
    add(block, lines.slice(CUT).map(draw));
    more.remove();
    block.focus();
  } }, `Show all ${lines.length} lines`);
  return [block, h("div", { class: "foot" }, more)];
}
