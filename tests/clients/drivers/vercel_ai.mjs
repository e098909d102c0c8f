// The provider of the Vercel AI SDK. It has no setting for a credential, so that fetch adds it.
//
// usage: node vercel_ai.mjs URL TOKEN {blocking,streaming}

import { a2a } from "a2a-ai-provider";
import { generateText, streamText } from "ai";
import { converse } from "./talk.mjs";

const [url, token, delivery] = process.argv.slice(2);
const plain = globalThis.fetch;
globalThis.fetch = (input, init = {}) => {
  const headers = new Headers(init.headers);
  headers.set("Authorization", `Bearer ${token}`);
  return plain(input, { ...init, headers });
};

await converse(async () => {
  const messages = [];
  const contextId = crypto.randomUUID();
  return async (text) => {
    messages.push({ role: "user", content: text });
    const asked = {
      model: a2a(`${url}/.well-known/agent-card.json`),
      messages,
      providerOptions: { a2a: { contextId } },
      maxRetries: 0,
    };
    const answer =
      delivery === "streaming" ? await streamText(asked).text : (await generateText(asked)).text;
    messages.push({ role: "assistant", content: answer || "(nothing)" });
    return answer;
  };
});
