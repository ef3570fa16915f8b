// Generates src/gen with buf, and src/gen/index.ts, which exports the whole public contract.
import { execFileSync } from "node:child_process";
import { readdirSync, writeFileSync } from "node:fs";

execFileSync("../../deploy/local/buf", ["generate"], { stdio: "inherit" });
const files = ["common", "inference"].flatMap((part) =>
  readdirSync(`src/gen/tandem/${part}/v1`).map((name) => `./tandem/${part}/v1/${name}`),
);
const lines = files.sort().map((file) => `export * from "${file.replace(/\.ts$/, ".js")}";\n`);
writeFileSync("src/gen/index.ts", lines.join(""));
