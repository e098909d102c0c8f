// Colours for code. A few expressions serve many languages: they are wrong at times, and only ever about a colour.
import { h } from "./dom.js";

const LONGEST = 30000;
const COMMENTS = { hash: "(?<!\\S)#.*", slash: "\\/\\/.*|\\/\\*[^]*?(?:\\*\\/|$)", dash: "--.*", markup: "<!--[^]*?(?:-->|$)", none: "$^" };
const KINDS = {
  hash: "bash dockerfile elixir fish ini make makefile perl php powershell ps1 py python r rb ruby sh shell toml yaml yml zsh",
  slash: "c cc cpp cs csharp css dart go groovy h hpp java javascript js json5 jsonc jsx kotlin kt less objc proto rs rust sass scala scss swift ts tsx typescript zig",
  dash: "ada haskell hs lua sql", markup: "html svelte svg vue xml", none: "graphql json",
};
const KIND = new Map(Object.entries(KINDS).flatMap(([kind, names]) => names.split(" ").map((name) => [name, kind])));
// What is not closed is a text to its end, so that nothing is looked through twice; an apostrophe may stand alone.
const TEXTS = '"""[^]*?(?:"""|$)|\'\'\'[^]*?(?:\'\'\'|$)|"(?:[^"\\\\\\n]|\\\\.)*"?|\'(?:[^\'\\\\\\n]|\\\\.){0,200}\'|`(?:[^`\\\\]|\\\\[^])*`?';
const WORDS = new Set(("abstract and as assert async await begin boolean break case catch char class const continue create def default defer delete do done double drop elif else end " +
  "enum esac except export extends extern false fi final finally float fn for foreach from func function global go goto group having if impl implements import in inner insert instanceof int " +
  "interface into is join lambda left let limit local long loop match mod module move mut namespace new nil none not null on or order package pass private protected pub public raise return " +
  "right select self set short static struct super switch table then this throw true try type typedef typeof undefined union unless until update use using values var virtual void when where while with yield").split(" "));
const made = new Map();

function expression(kind) {
  if (!made.has(kind)) made.set(kind, new RegExp(`(${COMMENTS[kind]})|(${TEXTS})|((?<![\\w.])\\d[\\w.]*)|([A-Za-z_$][\\w$]*)`, "g"));
  return made.get(kind);
}

export function coloured(text, lang = "") {
  const name = /^[\w+#-]*/.exec(lang.toLowerCase())[0];
  if (name === "diff" || name === "patch") return text.split("\n").map((line) => h("span", { class: { "+": "add", "-": "del", "@": "hunk" }[line[0]] ?? "same" }, `${line}\n`));
  if (!KIND.has(name) || text.length > LONGEST) return [text];
  const out = [];
  let from = 0;
  for (const { 0: found, 1: comment, 2: words, 3: number, index } of text.matchAll(expression(KIND.get(name)))) {
    const kind = comment ? "comment" : words ? "text" : number ? "number" : WORDS.has(name === "sql" ? found.toLowerCase() : found.replace(/^(?:True|False|None)$/, "true")) ? "key" : null;
    if (!kind) continue;
    out.push(text.slice(from, index), h("span", { class: kind }, found));
    from = index + found.length;
  }
  return [...out, text.slice(from)];
}
