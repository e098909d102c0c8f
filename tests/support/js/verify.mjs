// Which of the cards on stdin the JavaScript SDK accepts: {"keys": [...], "cards": [...]}.

import { text } from "node:stream/consumers";
import { verifyAgentCardSignature } from "a2a-sdk-1.0";

const { keys, cards } = JSON.parse(await text(process.stdin));
const verify = verifyAgentCardSignature(async (kid) => keys.find((key) => key.kid === kid));
const accepted = cards.map((card) =>
  verify(card).then(
    () => true,
    () => false,
  ),
);
console.log(JSON.stringify(await Promise.all(accepted)));
