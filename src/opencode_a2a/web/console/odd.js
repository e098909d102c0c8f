// Text whose characters can all be seen: what an agent wants to have approved must not contain
// anything that is drawn elsewhere, or not at all. `printable.py` has the same rule for terminals.
import { h } from "./dom.js";

// Controls, marks of direction, invisible letters, blanks that are no space, and long runs of spaces.
const ODD = new RegExp(
  "[\\0-\\x08\\x0b-\\x1f\\x7f-\\xa0\\xad\\u034f\\u061c\\u115f\\u1160\\u1680\\u17b4\\u17b5\\u180b-\\u180f\\u2000-\\u200f\\u2028-\\u202f" +
  "\\u205f-\\u206f\\u2800\\u3000\\u3164\\ufe00-\\ufe0f\\ufeff\\uffa0\\ufff0-\\ufffb\\ud800-\\udfff" +
  "\\u{1bca0}-\\u{1bca3}\\u{1d159}\\u{1d173}-\\u{1d17a}\\u{e0000}-\\u{e0fff}]|[ \\t]{40,}", "gu");

const named = (found) => found.length > 2 ? `⟨${found.length} spaces⟩` : `⟨U+${found.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;

export const visible = (text) => text.replace(ODD, named);

// The same as nodes, in which a name differs from text that only looks like one.
export function marked(text) {
  const out = [];
  let from = 0;
  for (const { 0: found, index } of text.matchAll(ODD)) {
    out.push(text.slice(from, index), h("mark", {}, named(found)));
    from = index + found.length;
  }
  return [...out, text.slice(from)];
}
