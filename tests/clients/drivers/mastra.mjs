// Mastra: a remote agent as a sub-agent. A run that waits for a person is resumed with the answer.
//
// usage: node mastra.mjs URL TOKEN {0.3,1.0} {blocking,streaming}

import { A2AAgent } from "@mastra/core/a2a";
import { converse } from "./talk.mjs";

const [url, token, protocolVersion, delivery] = process.argv.slice(2);

await converse(async () => {
  const agent = new A2AAgent({ url, protocolVersion, headers: { Authorization: `Bearer ${token}` } });
  let waiting;
  return async (text) => {
    const runId = waiting ?? crypto.randomUUID();
    const options = { runId };
    if (delivery === "blocking") {
      const result = await (waiting ? agent.resumeGenerate(text, options) : agent.generate(text, options));
      waiting = result.resumePayload ? runId : undefined;
      return result.text;
    }
    const stream = await (waiting ? agent.resumeStream(text, options) : agent.stream(text, options));
    let shown = "";
    let suspended;
    for await (const { type, payload } of stream.fullStream) {
      if (type === "text-delta") shown += payload.text;
      if (type === "tool-call-suspended") suspended = payload.suspendPayload;
    }
    waiting = suspended ? runId : undefined;
    // A run that is suspended is shown with the task that it waits for.
    const asked = suspended?.task?.status?.message?.parts ?? [];
    return [shown, ...asked.map((part) => part.text)].filter(Boolean).join("\n");
  };
});
