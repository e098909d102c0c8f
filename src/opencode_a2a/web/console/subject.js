// What a person approves: from OpenCode's record of the request, then from the input of its tool. All of it, since whatever is
// left out could be what matters.
import { patchView, wholeFile } from "./diff.js";
import { h } from "./dom.js";
import { marked } from "./odd.js";

// The fields that say most, which come first; what the tool of some version does not use may be among them.
const FIRST = {
  bash: ["command", "workdir", "timeout", "background"], shell: ["command", "workdir", "timeout", "background"],
  edit: ["filePath", "oldString", "newString", "replaceAll"], write: ["filePath", "content"], multiedit: ["filePath", "edits"],
  patch: ["patchText"], apply_patch: ["patchText"],
  read: ["filePath", "offset", "limit"], list: ["path", "ignore"], glob: ["pattern", "path", "limit"], grep: ["pattern", "path", "include", "limit"],
  webfetch: ["url", "format", "timeout"], websearch: ["query", "numResults", "livecrawl", "type", "contextMaxCharacters"],
  task: ["prompt", "subagent_type", "background"], todowrite: ["todos"], skill: ["name", "id"],
};
// What these tools say about their call is not what they do.
const SAYS = ["bash", "shell", "task"];
const COMMANDS = ["bash", "shell"];
const IN_DIFF = ["filePath", "replaceAll"];
// The same, if the diff has each of their lines: OpenCode takes common indentation away.
const LINES_IN_DIFF = ["oldString", "newString", "content"];
// The tool that runs programs of the model, which can call other tools.
const PROGRAM = "execute";
const LABELS = {
  command: "Command", workdir: "In the directory", timeout: "Time limit", url: "URL", filepath: "File", filePath: "File", path: "In", query: "Query",
  parentDir: "Directory", directories: "Directories", pattern: "Pattern", include: "Only in", subagent_type: "Sub-agent", prompt: "Its task", name: "Name", patchText: "The patch, as it was sent",
};
const PATTERNS = {
  bash: "Command", shell: "Command", edit: "File", write: "File", read: "File", external_directory: "Outside of its directory", webfetch: "URL",
  task: "Sub-agent", skill: "Skill", glob: "Pattern", grep: "Pattern", websearch: "Query",
};

const written = (value) => typeof value === "string" ? value : JSON.stringify(value, null, 2);

// The field of a tool call that says most, on one line.
export function gist(name, input) {
  const value = Object.hasOwn(FIRST, name) ? input[FIRST[name][0]] : Object.values(input)[0];
  const said = name === "question" ? value?.[0]?.question ?? value : value;
  return said === undefined ? undefined : typeof said === "string" ? said.split("\n")[0] : JSON.stringify(said);
}

function field(label, value) {
  const text = written(value);
  return h("div", { class: `field${text.length < 60 && !text.includes("\n") ? " short" : ""}` }, h("span", { class: "label" }, marked(label)), h("pre", {}, marked(text)));
}

export function subject({ permission, patterns = [], metadata = {}, tool, links = {}, links_unknown: unknown, changes = [] }) {
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
  const diffs = parts ? parts.flatMap((one) => patchView(one.patch, changed(one), wholeFile))
    : patch ? patchView(patch, typeof filepath === "string" ? filepath : undefined, wholeFile) : [];
  if (name && name !== permission) put("Tool", name);
  if (changes.length) nodes.push(h("div", { class: "field" }, h("span", { class: "label" }, "Files"), h("ul", { class: "changes" }, changes.map((one) => h("li", {}, change(one))))));
  else if (diffs.length !== 1) put("filepath", filepath);
  Object.entries(record).forEach(([key, value]) => put(key, value));
  if (files && !parts && !changes.length) put("files", files);
  if (diff && !parts && !patch) put("diff", diff);
  const first = Object.hasOwn(FIRST, name ?? "") ? FIRST[name] : [];
  const lines = new Set((typeof diff === "string" ? diff : "").split("\n").map((line) => line.slice(1)));
  const shows = first.filter((key) => !(diffs.length && (IN_DIFF.includes(key) || (LINES_IN_DIFF.includes(key) && allIn(lines, input[key])))));
  const told = [...Object.values(record), filepath, ...changes.flatMap(({ path, to }) => [path, to]), ...shows.map((key) => input[key])];
  // The commands of a compound one are patterns, and of a file whose whole path is told its relative path is one.
  const command = COMMANDS.includes(permission) ? String(record.command ?? input.command ?? "") : "";
  const isTold = (one) => told.includes(one) || command.includes(one) || (/^\//.test(filepath) && filepath.endsWith(`/${one}`));
  const more = repeated ? [] : patterns.filter((one) => one !== "*" && !isTold(one));
  if (more.length) nodes.push(field(PATTERNS[permission] ?? "For", more.join("\n")));
  if (!patterns.length) nodes.push(h("p", { class: "bad" }, "What this is for could not be read: look at it in OpenCode before you allow it."));
  shows.forEach((key) => put(key, input[key]));
  if (name === PROGRAM && permission !== PROGRAM) nodes.push(h("p", { class: "bad" }, "The arguments of this call are not known: OpenCode tells only the program that makes it, and that may make it with any arguments."));
  if (!repeated && tool?.call_id && !tool.input) nodes.push(h("p", { class: "bad" }, "The input of this call is not known: OpenCode did not tell it."));
  Object.entries(links).forEach(([path, real]) => nodes.push(h("p", { class: "bad" }, "A symbolic link leads from ", h("code", {}, marked(path)), " to ", h("code", {}, marked(real)))));
  if (unknown) nodes.push(h("p", { class: "bad" }, "Where these files really are could not be found out."));
  nodes.push(...diffs);
  const says = SAYS.includes(name);
  const words = new Set([description, says && input.description].filter(Boolean).map(written));
  words.forEach((text) => nodes.push(field("The agent says", text)));
  const rest = Object.entries(input).filter(([key]) => !first.includes(key) && !(says && key === "description"));
  if (first.length && rest.length) nodes.push(h("p", { class: "note" }, "The agent also sent:"));
  rest.forEach(([key, value]) => nodes.push(field(key, value)));
  if (!nodes.length) nodes.push(h("p", { class: "note" }, "OpenCode says nothing more about it."));
  return h("div", { class: "subject" }, nodes);
}

// What a patch does to a file; one that OpenCode calls new may be there already.
function change({ kind, path, to, replaces }) {
  const [file, target] = [path, to].map((one) => h("code", {}, marked(one ?? "")));
  if (kind === "delete") return ["deletes ", file];
  if (kind === "change") return ["changes ", file];
  if (kind === "move" && to === path) return ["moves ", file, " to itself, which OpenCode does by deleting it"];
  if (kind === "move") return ["moves ", file, " to ", target, replaces ? ", which exists and is replaced" : replaces === undefined && ", whether that exists or not"];
  return replaces ? ["replaces ", file, ", which exists"] : replaces === undefined ? ["writes ", file, ", whether it exists or not"] : ["adds ", file];
}

// Whether a text is in these lines; it may begin and end within one.
function allIn(lines, text) {
  if (typeof text !== "string") return text === undefined;
  const [begin, ...rest] = text.split("\n");
  return rest.slice(0, -1).every((line) => lines.has(line)) && [begin, ...rest.slice(-1)].every((end) => [...lines].some((line) => line.includes(end)));
}

// The relative path of a file that is moved is where it goes to.
function changed({ filePath, relativePath, file, type, status, movePath }) {
  const kind = type ?? status;
  // One that OpenCode calls new may be there already: the list of the files says it.
  const said = ["delete", "deleted", "move"].includes(kind) ? ` (${kind})` : "";
  return `${file ?? (movePath ? filePath : relativePath) ?? filePath ?? ""}${movePath ? ` → ${movePath}` : ""}${said}`;
}
