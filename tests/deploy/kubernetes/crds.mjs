// Validates custom resources, a JSON array on stdin, with the schemas of @kubernetes-models in the folder given.
// Prints a JSON array with an entry for each: {"verdict": "valid" | "invalid" | "unknown", "message": "..."}.
import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const modules = join(process.argv[2], "node_modules", "@kubernetes-models");
const packages = {
  "cert-manager.io": "cert-manager",
  "keda.sh": "keda",
  "monitoring.coreos.com": "prometheus-operator",
};

async function verdict(resource) {
  const [group, version] = resource.apiVersion.split("/");
  const file = join(modules, packages[group] ?? "none", group, version, `${resource.kind}.js`);
  if (!existsSync(file)) return { verdict: "unknown", message: "no schema" };
  const { [resource.kind]: Model } = await import(pathToFileURL(file));
  try {
    new Model(resource).validate();
  } catch (error) {
    return { verdict: "invalid", message: error.message };
  }
  return { verdict: "valid", message: "" };
}

const resources = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(await Promise.all(resources.map(verdict))));
