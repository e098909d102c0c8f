// A plugin of the OpenCode that this program starts. OpenCode has read its password by the time
// plugins are loaded; every process that it starts would inherit it. The agent could then answer
// its own permissions.
const name = "OPENCODE_SERVER_PASSWORD"
process.env[name] = ""

// The variables that the process was started with stay readable under /proc, and native code
// passes them on. Where they cannot be overwritten, a tool has to look there on purpose.
try {
  const { dlopen, toArrayBuffer } = await import("bun:ffi")
  const library = process.platform === "darwin" ? "libSystem.dylib" : "libc.so.6"
  const { symbols } = dlopen(library, { getenv: { args: ["cstring"], returns: "ptr" } })
  const value = symbols.getenv(Buffer.from(name + "\0"))
  if (value) new Uint8Array(toArrayBuffer(value)).fill(0)
} catch {}

console.log("opencode-a2a: the password is withheld from tools")

export const Withhold = async () => ({})
