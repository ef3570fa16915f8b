// The page of one snapshot. Every text of the server becomes a text node: none of it is ever read as HTML.

import { bars, lines, memoryMap } from "./plots.js";

const NUM_POINTS = 120;
const NUM_STEPS = 128;
const STATES = { serving: "good", "not serving": "bad" };
const COUNTERS = {
  accepted_requests: "requests accepted", finished_requests: "requests finished", failed_requests: "requests failed",
  refused_requests: "requests refused", output_tokens: "output tokens", prefill_tokens: "prefill tokens",
  steps: "steps", graph_steps: "steps from graphs", preemptions: "preemptions", retractions: "for lack of blocks",
  prefix_cache_lookup_tokens: "tokens looked for in the cache", prefix_cache_hit_tokens: "tokens found there",
  executor_losses: "executor sessions lost", executor_reattachments: "streams attached again",
  recomputed_tokens: "tokens computed again", poison_requests: "poison requests",
  out_of_memory_steps: "steps out of memory",
};

const whole = new Intl.NumberFormat("en");

export function number(value, unit = "") {
  if (value === null || value === undefined) {
    return "-";
  }
  const shown = Number.isInteger(value) || value >= 100 ? whole.format(Math.round(value)) : value.toFixed(1);
  return `${shown}${unit}`;
}

export function duration(seconds) {
  const units = [[120, 1, "s"], [7200, 60, "min"], [172800, 3600, "h"], [Infinity, 86400, "days"]];
  const [, size, name] = units.find(([limit]) => seconds < limit);
  return `${Math.round(seconds / size)} ${name}`;
}

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

// A number of the statistics, with the name of its field, by which a test finds it.
function field(stats, name, unit = "") {
  return element("span", { "data-field": name, "data-value": stats[name] }, number(stats[name], unit));
}

function tile(label, ...value) {
  return element("div", { class: "tile" }, element("b", {}, ...value), element("span", {}, label));
}

function percent(share) {
  return share === null ? "-" : `${Math.round(100 * share)} %`;
}

function tiles({ stats, rates }) {
  return [
    tile("requests running", field(stats, "running_requests")),
    tile(`requests waiting, ${number(stats.queued_tokens)} prompt tokens`, field(stats, "waiting_requests")),
    tile("output tokens/s", number(rates.output_tokens_per_s)),
    tile("prompt tokens/s", number(rates.prompt_tokens_per_s)),
    tile("requests/s", number(rates.requests_per_s)),
    tile("mean TTFT", number(rates.ttft_ms, " ms")),
    tile("mean ITL", number(rates.itl_ms, " ms")),
    tile("steps/s", number(rates.steps_per_s)),
    tile("of prompt tokens found in the prefix cache", percent(rates.prefix_cache_hit_share)),
    tile("KV blocks in use, of all", field(stats, "used_blocks"), " / ", field(stats, "total_blocks")),
    tile("KV blocks cached", field(stats, "cached_blocks")),
    tile("steps in flight", field(stats, "steps_in_flight")),
  ];
}

function newest(values) {
  return values.findLast((value) => value !== null) ?? null;
}

function figure(title, unit, ...series) {
  const keys = series.map(({ name, label, values }) => element(
    "span", { class: `key ${name}` }, `${label} `, element("b", {}, number(newest(values), unit)),
  ));
  return element("figure", {},
    element("figcaption", {}, element("span", {}, title), ...keys), lines(series, NUM_POINTS));
}

function plots({ points, last_steps: steps }) {
  const of = (name, label, key) => ({ name, label, values: points.map((one) => one[key]) });
  const shown = steps.slice(-NUM_STEPS);
  const stepFigure = (title, unit, name, values) => element("figure", {},
    element("figcaption", {}, element("span", {}, title),
      element("span", { class: `key ${name}` }, "last ", element("b", {}, number(newest(values), unit)))),
    bars(name, values, NUM_STEPS));
  return [
    figure("TTFT", " ms", of("first", "p50", "ttft_p50_ms"), of("second", "p99", "ttft_p99_ms")),
    figure("ITL", " ms", of("first", "p50", "itl_p50_ms"), of("second", "p99", "itl_p99_ms")),
    figure("Output tokens/s", "", of("first", "now", "output_tokens_per_s")),
    figure("Requests", "", of("first", "running", "running"), of("second", "waiting", "waiting")),
    stepFigure("Last steps, time on the executor", " ms", "first", shown.map((one) => one.compute_ms)),
    stepFigure("Last steps, tokens", "", "second", shown.map((one) => one.tokens)),
  ];
}

// columns: [[heading, class, row => text or element], ...]
function table(rows, columns) {
  const cell = (name, kind, content) => element(name, kind ? { class: kind } : {}, content);
  return element("table", {},
    element("thead", {}, element("tr", {}, ...columns.map(([title, kind]) => cell("th", kind, title)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {},
      ...columns.map(([, kind, content]) => cell("td", kind, content(row)))))));
}

function executors(rows) {
  return table(rows, [
    ["executor", "long", (one) => one.address],
    ["state", "", (one) => element("span", { class: one.state === "SERVING" ? "good" : "warn" },
      one.state.toLowerCase())],
    ["model, device", "long", (one) => [one.model, one.dtype, one.device].filter(Boolean).join(", ")],
    ["requests", "number", (one) => `${number(one.running_requests)} / ${number(one.max_requests)}`],
    ["KV memory", "", (one) => memoryMap(one.used_blocks, one.cached_blocks, one.total_blocks)],
    ["blocks", "number", (one) => `${number(one.used_blocks)} / ${number(one.total_blocks)}`],
    ["steps/s", "number", (one) => number(one.steps_per_s)],
    ["usual step", "number", (one) => (one.usual_step_s ? number(1000 * one.usual_step_s, " ms") : "-")],
    ["lost", "number", (one) => number(one.losses)],
    ["", "long", (one) => one.why || (one.away_s ? `away for ${duration(one.away_s)}` : "")],
  ]);
}

function requests(rows) {
  return table(rows, [
    ["request", "long", (one) => (one.choice ? `${one.request_id}/${one.choice}` : one.request_id)],
    ["tenant", "long", (one) => one.tenant || "-"],
    ["phase", "", (one) => one.state.toLowerCase()],
    ["prompt", "number", (one) => number(one.prompt_tokens)],
    ["cached", "number", (one) => number(one.cached_tokens)],
    ["output", "number", (one) => number(one.output_tokens)],
    ["age", "number", (one) => duration(one.age_s)],
    ["TTFT", "number", (one) => (one.time_to_first_token_s === null ? "-" : number(1000 * one.time_to_first_token_s, " ms"))],
    ["preempted", "number", (one) => number(one.preemptions)],
  ]);
}

function fault(one) {
  const times = one.count > 1 ? ` (${number(one.count)} times)` : "";
  return element("li", {}, `${duration(one.age_s)} ago: ${one.what} ${one.where}${times}${one.why ? `: ${one.why}` : ""}`);
}

function put(id, ...children) {
  document.getElementById(id).replaceChildren(...children);
}

export function draw({ address, view, number: snapshot }) {
  const { stats } = view;
  const state = document.getElementById("state");
  state.textContent = view.state;
  state.className = `pill ${STATES[view.state] ?? "warn"}`;
  const model = stats.model ? `${stats.model}, ${stats.dtype}, context of ${number(stats.max_model_len)} tokens; ` : "";
  put("server", `${model}${address}, up ${duration(stats.uptime_s)}${view.why ? `; ${view.why}` : ""}`);
  put("tiles", ...tiles(view));
  put("plots", ...plots(view));
  put("executors", executors(view.executors));
  put("requests", requests(view.requests));
  put("listed", `${number(view.requests.length)} of ${number(view.num_requests)}`);
  put("faults", ...(view.faults.length ? view.faults.map(fault) : ["none"]));
  put("counters", ...Object.entries(COUNTERS).map(([name, label]) => element(
    "div", {}, element("dt", {}, label), element("dd", {}, field(stats, name)),
  )));
  document.body.dataset.snapshot = snapshot;
}
