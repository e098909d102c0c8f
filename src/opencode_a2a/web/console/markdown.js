// Markdown to nodes: what models write, without raw HTML and without images, which would tell
// other servers that somebody reads.
import { h } from "./dom.js";

const FENCE = /^ {0,3}(```+|~~~+)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])\s+/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE =
  /(`+)(.+?)\1(?!`)|\*\*(?=\S)(.+?)\*\*|__(?=\S)(.+?)__|~~(?=\S)(.+?)~~|\*(?=[^\s*])(.+?)\*|\b_(?=[^\s_])(.+?)_\b|!?\[([^\][]*)\]\(([^\s()]+)\)|(https?:\/\/[^\s<>()[\]]*[^\s<>()[\].,;:!?'"])|\\([\\`*_{}[\]()#+.!|~>-])/s;
const LONGEST = 20000;

// Return the blocks of a text from a place on: the node of each, and where it starts.
export function blocks(text, from = 0) {
  const lines = text.slice(from).split("\n");
  const found = [];
  let at = from;
  for (let i = 0; i < lines.length; ) {
    const first = i;
    let node;
    [node, i] = block(lines, i);
    if (node) found.push({ node, at });
    for (let j = first; j < i; j++) at += lines[j].length + 1;
  }
  return found;
}

export const markdown = (text) => blocks(text).map((block) => block.node);

function block(lines, i) {
  const line = lines[i];
  let found;
  if (!line.trim()) return [null, i + 1];
  if ((found = FENCE.exec(line))) {
    const mark = found[1];
    const end = lines.findIndex((l, j) => j > i && l.trim().startsWith(mark) && !l.trim().slice(mark.length));
    const code = lines.slice(i + 1, end < 0 ? undefined : end).join("\n");
    return [h("pre", { tabindex: "0" }, h("code", {}, code)), end < 0 ? lines.length : end + 1];
  }
  if ((found = HEADING.exec(line))) {
    // The page has an h1 and the task an h2.
    const level = Math.min(6, found[1].length + 2);
    return [h(`h${level}`, {}, inline(found[2])), i + 1];
  }
  if (RULE.test(line)) return [h("hr"), i + 1];
  if (QUOTE.test(line)) {
    const inner = [];
    for (; i < lines.length && QUOTE.test(lines[i]); i++) inner.push(lines[i].replace(QUOTE, ""));
    return [h("blockquote", {}, markdown(inner.join("\n"))), i];
  }
  if (ITEM.test(line)) return list(lines, i);
  if (line.includes("|") && DIVIDER.test(lines[i + 1] ?? "") && lines[i + 1].includes("-")) return table(lines, i);
  const words = [];
  for (; i < lines.length && lines[i].trim(); i++) {
    if (words.length && [FENCE, HEADING, RULE, QUOTE, ITEM].some((kind) => kind.test(lines[i]))) break;
    words.push(lines[i].trim());
  }
  return [h("p", {}, inline(words.join("\n"))), i];
}

function list(lines, i) {
  const ordered = /\d/.test(ITEM.exec(lines[i])[2]);
  const start = parseInt(lines[i], 10);
  const items = [];
  while (i < lines.length) {
    const mark = ITEM.exec(lines[i]);
    if (!mark || /\d/.test(mark[2]) !== ordered) break;
    const inner = [lines[i].slice(mark[0].length)];
    for (i++; i < lines.length; i++) {
      const line = lines[i];
      const deeper = /^( {2,}|\t)/.test(line);
      if (!line.trim() ? !/^( {2,}|\t)/.test(lines[i + 1] ?? "") : !deeper) break;
      inner.push(line.replace(new RegExp(`^(\t| {1,${mark[0].length}})`), ""));
    }
    const made = markdown(inner.join("\n"));
    items.push(h("li", {}, made[0]?.tagName === "P" ? [[...made[0].childNodes], made.slice(1)] : made));
    while (i < lines.length - 1 && !lines[i].trim() && ITEM.test(lines[i + 1])) i++;
  }
  return [h(ordered ? "ol" : "ul", ordered && start !== 1 ? { start } : {}, items), i];
}

function table(lines, i) {
  const cells = (line) =>
    line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim()));
  const head = cells(lines[i]);
  const rows = [];
  for (i += 2; i < lines.length && lines[i].includes("|"); i++) rows.push(cells(lines[i]));
  return [h("div", { class: "scroll", tabindex: "0" }, h("table", {},
    h("thead", {}, h("tr", {}, head.map((cell) => h("th", { scope: "col" }, cell)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell))))))), i];
}

export function inline(text) {
  const out = [];
  for (let found; text.length < LONGEST && (found = INLINE.exec(text)); text = text.slice(found.index + found[0].length)) {
    if (found.index) out.push(text.slice(0, found.index));
    const [whole, , code, bold, bold2, gone, em, em2, label, href, url, escaped] = found;
    if (code) out.push(h("code", {}, code));
    else if (bold ?? bold2) out.push(h("strong", {}, inline(bold ?? bold2)));
    else if (gone) out.push(h("del", {}, inline(gone)));
    else if (em ?? em2) out.push(h("em", {}, inline(em ?? em2)));
    else if (href ?? url) out.push(link(href ?? url, label ?? url));
    else out.push(escaped ?? whole);
  }
  out.push(text);
  return out;
}

function link(href, label) {
  if (!/^(https?:\/\/|mailto:)/i.test(href)) return `${label} (${href})`;
  return h("a", { href, target: "_blank", rel: "noopener noreferrer" }, label || href);
}
