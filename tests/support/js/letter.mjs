// Which of the cards on stdin are signed by the letter of the specification: [card, ...].
//
// Nothing of the SDK is used. RFC 8785 is what ECMAScript writes, with sorted names; the keys are
// fetched from where the signature says.

import { text } from "node:stream/consumers";

function canonical(value) {
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  const names = Object.keys(value).sort();
  return `{${names.map((name) => `${JSON.stringify(name)}:${canonical(value[name])}`).join(",")}}`;
}

async function verifies(payload, { protected: header, signature }) {
  const { alg, kid, jku } = JSON.parse(Buffer.from(header, "base64url").toString());
  if (alg !== "ES256") return false;
  const { keys } = await (await fetch(jku)).json();
  const algorithm = { name: "ECDSA", namedCurve: "P-256", hash: "SHA-256" };
  const jwk = keys.find((key) => key.kid === kid);
  const key = await crypto.subtle.importKey("jwk", jwk, algorithm, false, ["verify"]);
  const signed = Buffer.from(`${header}.${Buffer.from(payload).toString("base64url")}`);
  return crypto.subtle.verify(algorithm, key, Buffer.from(signature, "base64url"), signed);
}

const cards = JSON.parse(await text(process.stdin));
const accepted = cards.map(async ({ signatures = [], ...card }) => {
  const payload = canonical(card);
  const found = await Promise.all(signatures.map((one) => verifies(payload, one)));
  return found.includes(true);
});
console.log(JSON.stringify(await Promise.all(accepted)));
