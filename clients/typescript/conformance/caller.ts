import { PassThrough } from "node:stream";
import { setTimeout } from "node:timers/promises";
import { create, fromJson, type JsonObject, type JsonValue, toJson } from "@bufbuild/protobuf";
import * as tandem from "@tandem-serve/client";
import { failed, Outcome } from "./outcome.js";

/** One line of the input, as clients/conformance/README.md explains it. */
export interface Command {
  id: string;
  do: "generate" | "complete" | "batch" | "abort" | "model" | "tokenize" | "cancel";
  targets: string[];
  ca?: string;
  cert?: string;
  key?: string;
  server_name?: string;
  token?: string;
  connection?: string;
  retry?: "none" | "soon";
  keepalive_ms?: number;
  request?: JsonValue;
  items?: JsonValue[];
  cancel_items?: number[];
  deadline_ms?: number;
  cancel_after_deltas?: number;
  pause_ms?: number;
  tell?: boolean;
  command?: string;
}

type Say = (line: JsonObject) => void;

const POLICIES = {
  none: tandem.NO_RETRY,
  soon: { maxAttempts: 9, initialDelayMs: 1, maxDelayMs: 1 },
  default: tandem.DEFAULT_RETRY,
};

/** Carries out commands at once, each beside the others. */
export class Caller {
  readonly #say: Say;
  readonly #shared = new Map<string, tandem.Client>();
  readonly #running = new Map<string, AbortController>();
  readonly #ends = new Set<Promise<void>>();

  /** @param say - Prints one line. */
  constructor(say: Say) {
    this.#say = say;
  }

  /** Begins a command; its result is said when it is there. */
  begin(command: Command): void {
    if (command.do === "cancel") {
      this.#running.get(command.command ?? "")?.abort();
      this.#say({ id: command.id, result: {} });
      return;
    }
    const leaving = new AbortController();
    this.#running.set(command.id, leaving);
    const end = this.#carryOut(command, leaving.signal).then((result) => {
      this.#say({ id: command.id, result });
      this.#running.delete(command.id);
      this.#ends.delete(end);
    });
    this.#ends.add(end);
  }

  /** Ends what still runs, and all connections. */
  async close(): Promise<void> {
    for (const leaving of this.#running.values()) leaving.abort();
    await Promise.all(this.#ends);
    for (const client of this.#shared.values()) client.close();
  }

  async #carryOut(command: Command, signal: AbortSignal): Promise<JsonObject> {
    const outcomes = (command.items ?? [{}]).map(() => new Outcome());
    const { request = {} } = command;
    const isBatch = command.do === "batch";
    let client: tandem.Client | undefined;
    let answer: JsonObject = {};
    try {
      client = this.#client(command);
      answer = await this.#answer(client, command, request, outcomes, signal);
    } catch (error) {
      if (error instanceof tandem.TandemError) answer = failed(error);
      else if (!signal.aborted) throw error;
    } finally {
      if (command.connection === undefined) client?.close();
    }
    const results = outcomes.map((outcome) => outcome.toJson());
    if (isBatch) return { items: results, ...answer };
    return command.do === "generate" || command.do === "complete"
      ? { ...results[0], ...answer }
      : answer;
  }

  /** Returns what a command gives besides the outcomes of its requests, which it fills. */
  async #answer(
    client: tandem.Client,
    command: Command,
    request: JsonValue,
    outcomes: Outcome[],
    signal: AbortSignal,
  ): Promise<JsonObject> {
    const options = { signal, deadlineMs: command.deadline_ms };
    switch (command.do) {
      case "generate": {
        const message = fromJson(tandem.GenerateRequestSchema, request);
        const events = client.generate(message, options);
        await this.#read(events, command, outcomes[0] ?? new Outcome(), signal);
        return {};
      }
      case "complete": {
        const message = fromJson(tandem.GenerateRequestSchema, request);
        outcomes[0]?.takeWhole(await client.complete(message, options));
        return {};
      }
      case "batch":
        await this.#batch(client, command, outcomes, options);
        return {};
      case "tokenize": {
        const message = fromJson(tandem.TokenizeRequestSchema, request);
        return { token_ids: (await client.tokenize(message, options)).tokenIds };
      }
      case "model": {
        const message = fromJson(tandem.GetModelRequestSchema, request);
        const { model = create(tandem.ModelSchema) } = await client.getModel(message, options);
        return { model: toJson(tandem.ModelSchema, model, { useProtoFieldName: true }) };
      }
      default:
        await client.abort(fromJson(tandem.AbortRequestSchema, request), options);
        return {};
    }
  }

  async #read(
    events: AsyncIterable<tandem.GenerateEvent>,
    command: Command,
    outcome: Outcome,
    signal: AbortSignal,
  ): Promise<void> {
    for await (const event of events) {
      outcome.take(event);
      if (command.tell) this.#say({ id: command.id, event: nameOf(event) });
      if (event.case !== "delta") continue;
      if (outcome.numDeltas === command.cancel_after_deltas) return;
      if (outcome.numDeltas === 1) await setTimeout(command.pause_ms ?? 0, undefined, { signal });
    }
  }

  async #batch(
    client: tandem.Client,
    command: Command,
    outcomes: Outcome[],
    options: tandem.CallOptions,
  ): Promise<void> {
    const requests = new PassThrough({ objectMode: true });
    const add = (command.items ?? []).map((item, number) => ({
      item: BigInt(number),
      request: fromJson(tandem.GenerateRequestSchema, item),
    }));
    for (const one of add) requests.write({ add: [one] });
    const toCancel = new Set(command.cancel_items);
    if (toCancel.size === 0) requests.end();
    for await (const { item, event } of client.generateBatch(requests, options)) {
      const number = Number(item);
      outcomes[number]?.take(event);
      if (command.tell && event.case !== "error")
        this.#say({ id: command.id, event: nameOf(event), item: number });
      if (event.case === "delta" && toCancel.delete(number)) requests.write({ cancel: [item] });
      if (event.case === "done" || event.case === "error") toCancel.delete(number);
      if (toCancel.size === 0) requests.end();
    }
  }

  #client(command: Command): tandem.Client {
    const name = command.connection;
    const known = name === undefined ? undefined : this.#shared.get(name);
    if (known !== undefined) return known;
    const { ca, cert, key, server_name: serverName, keepalive_ms: keepaliveMs } = command;
    const files = { ...(ca && { ca }), ...(cert && { cert }), ...(key && { key }) };
    const hasTls = Object.keys(files).length > 0;
    const client = new tandem.Client(command.targets, {
      tls: hasTls ? { ...files, ...(serverName && { serverName }) } : undefined,
      token: command.token,
      keepaliveMs,
      keepaliveTimeoutMs: keepaliveMs,
      retry: POLICIES[command.retry ?? "default"],
    });
    if (name !== undefined) this.#shared.set(name, client);
    return client;
  }
}

/** Returns the name of an event in the contract. */
function nameOf(event: tandem.GenerateEvent): string {
  return event.case === "promptLogprobs" ? "prompt_logprobs" : event.case;
}
