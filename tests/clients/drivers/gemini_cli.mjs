// Gemini CLI: a remote agent as one of its tools; shown is what the tool returns to the model.
//
// usage: node gemini_cli.mjs URL TOKEN

import { A2AClientManager } from "@google/gemini-cli-core/dist/src/agents/a2a-client-manager.js";
import { RemoteAgentInvocation } from "@google/gemini-cli-core/dist/src/agents/remote-invocation.js";
import { converse } from "./talk.mjs";

const [url, token] = process.argv.slice(2);
const config = { getProxy: () => undefined };
const manager = new A2AClientManager(config);
config.getA2AClientManager = () => manager;
let conversations = 0;

await converse(async () => {
  const definition = {
    kind: "remote",
    name: `opencode-${++conversations}`,
    agentCardUrl: `${url}/.well-known/agent-card.json`,
    auth: { type: "http", scheme: "Bearer", token },
  };
  return async (query) => {
    const invocation = new RemoteAgentInvocation(definition, { config }, { query }, {});
    const { llmContent } = await invocation.execute({ abortSignal: new AbortController().signal });
    return llmContent.map((part) => part.text).join("");
  };
});
