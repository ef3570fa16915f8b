// Plays a caller of the client: carries out the commands of clients/conformance/README.md.
import { createInterface } from "node:readline";
import { Caller, type Command } from "./caller.js";

const caller = new Caller((line) => {
  process.stdout.write(`${JSON.stringify(line)}\n`);
});
for await (const line of createInterface({ input: process.stdin })) {
  if (line.trim() !== "") caller.begin(JSON.parse(line) as Command);
}
await caller.close();
