// A conversation through somebody else's client, driven by lines of JSON: see talk.py.

import { createInterface } from "node:readline";

/**
 * Answer the lines, one after the other.
 * @param {() => Promise<(text: string) => Promise<string>>} begin begins a new conversation
 */
export async function converse(begin) {
  // Frameworks print what they like; only the lines of the conversation belong on stdout.
  const write = process.stdout.write.bind(process.stdout);
  console.log = console.info = console.debug = console.error;
  const tell = (value) => write(`${JSON.stringify(value)}\n`);
  let say;
  tell({ ready: true });
  for await (const line of createInterface({ input: process.stdin })) {
    const { text, fresh } = JSON.parse(line);
    try {
      if (!say || fresh) say = await begin();
      tell({ shown: await say(text) });
    } catch (error) {
      tell({ error: `${error.name}: ${error.message}` });
    }
  }
}
