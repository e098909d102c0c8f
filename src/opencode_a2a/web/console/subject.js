// What a person approves: from OpenCode's record of the request, then from the fields that its tool
// is known to use. All of it, since whatever is left out could be what matters.
import { patchView, wholeFile } from "./diff.js";
import { h } from "./dom.js";
import { marked } from "./odd.js";

const USES = {
  bash: ["command", "workdir", "timeout", "background"], shell: ["command", "workdir", "timeout", "background"],
  edit: ["filePath", "oldString", "newString", "replaceAll"], write: ["filePath", "content"], multiedit: ["filePath", "edits"],
  patch: ["patchText"], apply_patch: ["patchText"],
  read: ["filePath", "offset", "limit"], list: ["path", "ignore"], glob: ["pattern", "path"], grep: ["pattern", "path", "include"],
  webfetch: ["url", "format", "timeout"], websearch: ["query", "numResults", "livecrawl", "type", "contextMaxCharacters"],
  task: ["prompt", "subagent_type", "task_id", "command", "background"], todowrite: ["todos"], skill: ["name"],
};
// What these tools say about their call is not what they do.
const SAYS = ["bash", "shell", "task"];
const IN_DIFF = ["filePath", "oldString", "newString", "replaceAll", "content", "edits", "patchText"];
const LABELS = {
  command: "Command", workdir: "In the directory", timeout: "Time limit", url: "URL", filepath: "File", filePath: "File", path: "In", query: "Query",
  parentDir: "Directory", directories: "Directories", pattern: "Pattern", include: "Only in", subagent_type: "Sub-agent", prompt: "Its task", name: "Name",
};
const PATTERNS = {
  bash: "Command", shell: "Command", edit: "File", write: "File", read: "File", external_directory: "Outside of its directory", webfetch: "URL",
  task: "Sub-agent", skill: "Skill", glob: "Pattern", grep: "Pattern", websearch: "Query",
};

const written = (value) => typeof value === "string" ? value : JSON.stringify(value, null, 2);

// The field of a tool call that says most, on one line.
export function gist(name, input) {
  const value = Object.hasOwn(USES, name) ? input[USES[name][0]] : Object.values(input)[0];
  const said = name === "question" ? value?.[0]?.question ?? value : value;
  return said === undefined ? undefined : typeof said === "string" ? said.split("\n")[0] : JSON.stringify(said);
}

function field(label, value) {
  const text = written(value);
  return h("div", { class: `field${text.length < 60 && !text.includes("\n") ? " short" : ""}` }, h("span", { class: "label" }, marked(label)), h("pre", {}, marked(text)));
}

export function subject({ permission, patterns = [], metadata = {}, tool, links = {} }) {
  // A repeated call is told as the tool and its input.
  const repeated = permission === "doom_loop" && metadata.input;
  const { name, input = {} } = repeated ? { name: metadata.tool, input: metadata.input } : tool ?? {};
  const { diff, files, filepath, description, ...record } = repeated ? {} : metadata;
  const nodes = [], shown = new Map();
  const put = (key, value) => {
    const same = shown.get(key.toLowerCase()) === written(value);
    if (value === undefined || value === null || value === "" || same) return;
    shown.set(key.toLowerCase(), written(value));
    nodes.push(field(Object.hasOwn(LABELS, key) ? LABELS[key] : key, value));
  };
  const parts = Array.isArray(files) && files.length && files.every((one) => typeof one?.patch === "string") && files;
  const patch = !parts && typeof diff === "string" && diff;
  const changes = parts ? parts.flatMap((one) => patchView(one.patch, changed(one), wholeFile))
    : patch ? patchView(patch, typeof filepath === "string" ? filepath : undefined, wholeFile) : [];
  if (name && name !== permission) put("Tool", name);
  if (changes.length !== 1) put("filepath", filepath);
  Object.entries(record).forEach(([key, value]) => put(key, value));
  if (files && !parts) put("files", files);
  if (diff && !parts && !patch) put("diff", diff);
  // The commands of a compound one are patterns, and a file is one by its relative path.
  const told = [...Object.values(record), filepath].filter((one) => typeof one === "string");
  const uses = Object.hasOwn(USES, name ?? "") ? USES[name] : [];
  const used = uses.filter((key) => !(changes.length && IN_DIFF.includes(key)));
  const more = repeated ? [] : patterns.filter((one) => one !== "*" && !told.some((text) => text.includes(one)) && !used.some((key) => input[key] === one));
  if (more.length) nodes.push(field(PATTERNS[permission] ?? "For", more.join("\n")));
  used.forEach((key) => put(key, input[key]));
  if (!repeated && tool?.call_id && !tool.input) nodes.push(h("p", { class: "bad" }, "The input of this call is not known: OpenCode did not tell it."));
  Object.entries(links).forEach(([path, real]) => nodes.push(h("p", { class: "bad" }, "A symbolic link leads from ", h("code", {}, marked(path)), " to ", h("code", {}, marked(real)))));
  nodes.push(...changes);
  const says = SAYS.includes(name);
  const words = new Set([description, says && input.description].filter(Boolean).map(written));
  words.forEach((text) => nodes.push(field("The agent says", text)));
  const rest = Object.entries(input).filter(([key]) => !uses.includes(key) && !(says && key === "description"));
  if (uses.length && rest.length) nodes.push(h("p", { class: "note" }, `The agent also sent what ${name} does not use:`));
  rest.forEach(([key, value]) => nodes.push(field(key, value)));
  if (!nodes.length) nodes.push(h("p", { class: "note" }, "OpenCode says nothing more about it."));
  return h("div", { class: "subject" }, nodes);
}

// The relative path of a file that is moved is where it goes to.
function changed({ filePath, relativePath, file, type, status, movePath }) {
  const kind = type ?? status;
  return `${file ?? (movePath ? filePath : relativePath) ?? filePath ?? ""}${movePath ? ` → ${movePath}` : ""}${kind && kind !== "update" && kind !== "modified" ? ` (${kind})` : ""}`;
}
