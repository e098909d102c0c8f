// Unified diffs to nodes, one block for each file.
import { add, copyButton, h } from "./dom.js";
import { marked } from "./odd.js";

const CUT = 200;
const PIECE = 1000;
const FOLDED = 60;
const HUNK = /^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@/;
const BEGINS = /^(?:diff --git a\/.* b\/|Index: )(.*)/;
const KINDS = { "+": "add", "-": "del" };
const coloured = (line) => ({ kind: KINDS[line[0]] ?? "same", line });

// `draw` makes the block of a file: foldable and beginning short, or whole. A name of several lines
// could be made to look like a part of the patch, so that one is not taken apart.
export function patchView(patch, name, draw = fileView) {
  const found = name?.includes("\n") ? [{ rows: patch.replace(/\n$/, "").split("\n").map(coloured) }] : files(patch);
  return found.map(({ file, rows }) => draw(found.length > 1 ? file : name ?? file, rows, found.length > 3));
}

export const wholeFile = (file, rows) => h("div", { class: "diff" }, h("div", { class: "head" }, head(file, rows)), h("pre", {}, rows.map(row)));

// A new file, as the diff that it is.
export const newFile = (name, text) => fileView(name, text.replace(/\n$/, "").split("\n").map((line) => ({ kind: "add", line: `+${line}` })));

// Which lines belong to the text is told by the counts of a hunk, since a line that is taken away or
// added can look like the head of a file. Outside of hunks only heads are left out.
function files(patch) {
  const found = [];
  let current, old = 0, now = 0, begins;
  const lines = patch.replace(/\n$/, "").split("\n");
  const begin = (file) => found.push((current = { file, rows: [] }));
  const push = (kind, line) => ((current ?? (begin(""), current)).rows.push({ kind, line }));
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i], [mark] = line;
    const hunk = old > 0 || now > 0 ? null : HUNK.exec(line);
    if (old > 0 || now > 0) {
      if (mark !== "+" && mark !== "\\") old--;
      if (mark !== "-" && mark !== "\\") now--;
      push(KINDS[mark] ?? "same", line);
    } else if (hunk) {
      [old, now] = [Number(hunk[1] ?? 1), Number(hunk[2] ?? 1)];
      push("hunk", line);
    } else if ((begins = BEGINS.exec(line))) begin(begins[1]);
    else if (mark === "-" && isHead(lines, i)) {
      const [from, to] = [line, lines[++i]].map((one) => one.slice(4).split("\t")[0].replace(/^[ab]\//, ""));
      if (!current || current.rows.some((one) => one.kind === "hunk")) begin("");
      current.file ||= from === "/dev/null" || from === to ? to : to === "/dev/null" ? from : `${from} → ${to}`;
    } else if (!/^(={60,}|index [0-9a-f.]+( \d+)?|)$/.test(line)) push(KINDS[mark] ?? "same", line);
  }
  return found;
}

const isHead = (lines, i) => lines[i].startsWith("--- ") && lines[i + 1]?.startsWith("+++ ") &&
  (lines[i + 2] === undefined || HUNK.test(lines[i + 2]) || BEGINS.test(lines[i + 2]));

function head(file, rows) {
  const count = (kind) => rows.filter((one) => one.kind === kind).length;
  return [h("span", { class: "path" }, marked(file || "changes")),
    h("span", { class: "counts" }, h("span", { class: "ok" }, `+${count("add")}`), " ", h("span", { class: "bad" }, `−${count("del")}`))];
}

// Of many files, and of a long one, the beginning is their names.
export function fileView(file, rows, many = false, ...more) {
  return h("details", { class: "diff", open: !many && rows.length <= FOLDED }, h("summary", {}, head(file, rows)),
    long(rows, row), h("div", { class: "foot" }, copyButton(rows.map(({ line }) => line).join("\n"), "Copy diff"), more));
}

const row = ({ kind, line }) => h("span", { class: kind }, marked(line));

// A scrolling block of lines that begins short, and grows by pieces.
export function long(lines, draw = (line) => [marked(line), "\n"]) {
  const block = h("pre", { tabindex: "0" }, lines.slice(0, CUT).map(draw));
  if (lines.length <= CUT) return block;
  let shown = CUT;
  const next = () => (more.textContent = lines.length - shown > PIECE ? `Show ${PIECE} of ${lines.length - shown} more lines` : `Show all ${lines.length} lines`);
  const more = h("button", { type: "button", class: "small", onclick: () => {
    add(block, lines.slice(shown, shown + PIECE).map(draw));
    if ((shown += PIECE) < lines.length) return next();
    more.remove();
    block.focus();
  } });
  next();
  return [block, h("div", { class: "foot" }, more)];
}
