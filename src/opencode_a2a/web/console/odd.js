// Text whose characters can all be seen: what an agent wants to have approved must not contain
// anything that is drawn elsewhere, or not at all. `printable.py` has the same rule for terminals.
import { h } from "./dom.js";

// Letters of Greek, Cyrillic, Armenian, Cherokee and Lisu that look like those of Latin.
const TWINS = "[\\u0391\\u0392\\u0395-\\u0397\\u0399\\u039a\\u039c\\u039d\\u039f\\u03a1\\u03a4\\u03a5\\u03a7\\u03b1" +
  "\\u03b9\\u03ba\\u03bd\\u03bf\\u03c1\\u03c5\\u03f2\\u03f3\\u0405\\u0406\\u0408\\u0410\\u0412\\u0415" +
  "\\u041a\\u041c-\\u041e\\u0420-\\u0423\\u0425\\u0430\\u0435\\u043e\\u0440\\u0441\\u0443\\u0445\\u0455" +
  "\\u0456\\u0458\\u0474\\u0475\\u04ae\\u04af\\u04bb\\u04c0\\u04cf\\u0501\\u051b\\u051d\\u054d\\u0555" +
  "\\u0570\\u0578\\u057d\\u0581\\u0585\\u0589\\u13a0-\\u13f5\\ua4d0-\\ua4ff]+";
// Long runs of blanks and of marks above letters, which would cover the lines before them; controls, marks of direction,
// invisible letters, blanks that are no space, what looks like | ! g ` ; : - . / and letters of Latin, and words of such letters beside others of Latin.
const ODD = new RegExp(
  "(?<lines>\\n(?:[ \\t]{0,39}\\n){19,})|(?<spaces>[ \\t]{40,})" +
  "|(?<marks>[\\u0300-\\u036f\\u0483-\\u0489\\u0591-\\u05bd\\u0610-\\u061a\\u064b-\\u065f\\u0e31" +
  "\\u0e34-\\u0e3a\\u0e47-\\u0e4e\\u1ab0-\\u1aff\\u1dc0-\\u1dff\\u20d0-\\u20ff\\ufe20-\\ufe2f]{5,})" +
  "|[\\0-\\x08\\x0b-\\x1f\\x7f-\\xa0\\xad\\u034f\\u061c\\u115f\\u1160\\u1680\\u17b4\\u17b5\\u180b-\\u180f\\u2000-\\u200f\\u2028-\\u202f" +
  "\\u205f-\\u206f\\u2800\\u3000\\u3164\\ufe00-\\ufe0f\\ufeff\\uffa0\\ufff0-\\ufffb\\ud800-\\udfff" +
  "\\u{13430}-\\u{1343f}\\u{1bca0}-\\u{1bca3}\\u{1d159}\\u{1d173}-\\u{1d17a}\\u{e0000}-\\u{e0fff}" +
  "\\u01c0\\u01c3\\u0251\\u0261\\u037e\\u05c3\\u1fef\\u2010\\u2011\\u2024\\u2044\\u212a\\u2160-\\u217f\\u2215\\u2223\\u2236\\u29f8\\ua4f8\\ua789\\ufe50-\\ufe6b\\u{1d400}-\\u{1d7ff}]" +
  `|(?:(?<=[A-Za-z0-9])|(?<=[A-Za-z0-9][./:@_\\-])|(?<=//))${TWINS}(?![\\u0370-\\u058f])|(?<![\\u0370-\\u058f\\u13a0-\\u13f5\\ua4d0-\\ua4ff])${TWINS}(?=[./:@_\\-]?[A-Za-z0-9])`, "gu");

const name = (run, { lines, spaces, marks }) => lines ? `\n⟨${run.split("\n").length - 2} empty lines⟩\n` : spaces ? `⟨${run.length} spaces⟩` : marks ? `⟨${run.length} marks⟩`
  : [...run].map((one) => `⟨U+${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`).join("");

export const visible = (text) => text.replace(ODD, (run, ...rest) => name(run, rest.at(-1)));

// The same as nodes, in which a name differs from text that only looks like one.
export function marked(text) {
  const out = [];
  let from = 0;
  for (const { 0: found, index, groups } of text.matchAll(ODD)) {
    out.push(text.slice(from, index), h("mark", {}, name(found, groups)));
    from = index + found.length;
  }
  return [...out, text.slice(from)];
}
