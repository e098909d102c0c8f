// Markdown to nodes: what the lexer of `marked` finds, without raw HTML and without images, which
// would tell other servers that somebody reads.
import { coloured } from "./colour.js";
import { copyButton, h } from "./dom.js";
import { Lexer, lexer } from "./marked.js";
import { visible } from "./odd.js";

const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", reg: "®", trade: "™", hellip: "…", mdash: "—", ndash: "–", laquo: "«", raquo: "»", times: "×", rarr: "→", larr: "←" };
const LONGEST = 100000;

// Return the blocks of a text from a place on: the node of each, and where it starts.
export function blocks(text, from = 0) {
  const found = [];
  let at = from;
  for (const token of lexed(text.slice(from))) {
    const node = block(token);
    if (node) found.push({ node, at });
    at += token.raw.length;
  }
  return found;
}

export const markdown = (text) => blocks(text.replace(/\r\n?/g, "\n")).map((one) => one.node);
export const inline = (text) => (text.length > LONGEST ? text : Lexer.lexInline(text).map(piece));

// A text that is too long for one block, or nested too deeply, is shown as it is.
function lexed(text) {
  try {
    return lexer(text);
  } catch {
    return [{ type: "html", raw: text }];
  }
}

function block(token) {
  const { type, raw } = token;
  if (type === "space") return null;
  if (type === "hr") return h("hr");
  if (type === "code") return codeView(token);
  if (raw.length > LONGEST && type !== "list") return h("p", { class: "raw" }, raw);
  if (type === "heading") return h(`h${Math.min(6, token.depth + 2)}`, {}, pieces(token)); // the page has an h1 and the task an h2
  if (type === "paragraph") return h("p", {}, pieces(token));
  if (type === "blockquote") return h("blockquote", {}, token.tokens.map(block));
  if (type === "list") return h(token.ordered ? "ol" : "ul", token.ordered && token.start !== 1 ? { start: token.start } : {}, token.items.map((item) => h("li", {}, item.tokens.map(inItem))));
  if (type === "table") return tableView(token);
  return h("p", { class: "raw" }, raw.trimEnd()); // also what links refer to: nothing is hidden
}

// The text of a tight list stands in its item without a paragraph.
const inItem = (token) => token.type === "text" || token.type === "checkbox" ? piece(token) : block(token);

function codeView({ text, lang }) {
  return h("div", { class: "code" }, h("div", { class: "head" }, h("span", { class: "muted" }, lang ?? ""), copyButton(text)), h("pre", { tabindex: "0" }, h("code", {}, coloured(text, lang))));
}

function tableView({ header, rows }) {
  const cells = (tag, row, props) => h("tr", {}, row.map((cell) => h(tag, props, pieces(cell))));
  return h("div", { class: "scroll", tabindex: "0" }, h("table", { class: header.length > 6 ? "many" : "" }, h("thead", {}, cells("th", header, { scope: "col" })), h("tbody", {}, rows.map((row) => cells("td", row, {})))));
}

const pieces = ({ tokens = [] }) => tokens.map(piece);

function piece(token) {
  switch (token.type) {
    case "strong": return h("strong", {}, pieces(token));
    case "em": return h("em", {}, pieces(token));
    case "del": return h("del", {}, pieces(token));
    case "codespan": return h("code", {}, token.text);
    case "br": return h("br");
    case "link": return link(token, pieces(token));
    case "image": return link(token, [token.text]);
    case "checkbox": return token.checked ? "☑ " : "☐ ";
    case "text": return token.tokens ? pieces(token) : decoded(token.raw); // the lexer decodes numbers, and would hide what they mean
    case "escape": return token.text;
    default: return token.raw;
  }
}

const decoded = (text) => text.replace(/&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|(\w{2,8}));/g, (whole, decimal, hex, name) => {
  if (name) return Object.hasOwn(NAMED, name) ? NAMED[name] : whole;
  const point = decimal ? Number(decimal) : parseInt(hex, 16);
  return point && point < 0x110000 ? visible(String.fromCodePoint(point)) : "\ufffd";
});

// Nothing is hidden: where a person decides, the style sheet shows the address beside the words that stand for it.
function link({ href, title }, label) {
  const more = title ? ` “${title}”` : "";
  if (!/^(https?:\/\/|mailto:)/i.test(href)) return [label, ` (${href})${more}`];
  const made = h("a", { href, target: "_blank", rel: "noopener noreferrer" }, label.length ? label : href);
  if (made.textContent !== href) made.dataset.to = href;
  return [made, more];
}
