import { addAbortSignal, Readable, type Writable } from "node:stream";
import * as buf from "@bufbuild/protobuf";
import * as grpc from "@grpc/grpc-js";
import { channelsTo, type ConnectOptions } from "./channel.js";
import { bug, fromFailure, fromStatus, TandemError } from "./errors.js";
import * as pb from "./gen/index.js";
import { generate, type GenerateEvent, type GenerateInit, withKey } from "./generate.js";
import { Attempts, type CallOptions, DEFAULT_RETRY, type RetryPolicy } from "./retry.js";

/** An event of an item of a batch; `done` or `error` is the item's last. */
export type BatchItemEvent = Pick<pb.BatchEvent, "item"> & {
  event: GenerateEvent | { case: "error"; value: TandemError };
};

type Desc = buf.DescMessage;
type Init<I extends Desc> = buf.MessageInitShape<I>;
type Inits<I extends Desc> = Iterable<Init<I>> | AsyncIterable<Init<I>>;
type Method<I extends Desc, O extends Desc> = buf.DescMethod & { input: I; output: O };
const rpcs = pb.InferenceService.method;
/** Message that has the caller's request in its field `request`. */
const wrapper: Desc = pb.CompleteRequestSchema;

/** A client of one or several servers. Its calls throw TandemErrors, or their signal's reason. */
export class Client implements Disposable {
  readonly #openers: readonly (() => grpc.Client)[];
  #channels: readonly grpc.Client[];
  readonly #token: ConnectOptions["token"];
  readonly #policy: RetryPolicy;
  readonly #closing = new AbortController();
  #turn = 0;

  /** Returns a served model with its limits. */
  readonly getModel = this.#unary(rpcs.getModel);
  /** Returns a page of all served models. */
  readonly listModels = this.#unary(rpcs.listModels);
  /** Returns the ids that a prompt has. */
  readonly tokenize = this.#unary(rpcs.tokenize);
  /** Returns the text that ids have. */
  readonly detokenize = this.#unary(rpcs.detokenize);
  /** Ends a live request by its id; its stream then gets `finished` (CANCELLED) and `done`. */
  readonly abort = this.#unary(rpcs.abort);

  /** @param targets - HOST:PORT of a server, or of several, which calls take in turn.
   * @throws TypeError for what is no target, and the error of a file that cannot be read. */
  constructor(targets: string | readonly string[], options: ConnectOptions = {}) {
    this.#openers = [targets].flat().map((target) => channelsTo(target, options));
    if (this.#openers.length === 0) throw new TypeError("a client needs a target");
    this.#channels = this.#openers.map((open) => open());
    this.#token = options.token;
    this.#policy = { ...DEFAULT_RETRY, ...options.retry };
  }

  /** Ends the connections; what still runs fails with CANCELLED. */
  close(): void {
    this.#closing.abort(new TandemError(grpc.status.CANCELLED, "the client was closed"));
    for (const channel of this.#channels) channel.close();
  }
  readonly [Symbol.dispose] = () => this.close();

  /** Streams the output of a prompt, and goes on at any server where the stream breaks. The call
   * begins with the first iteration, and leaving the loop cancels it. */
  generate(request: GenerateInit, options?: CallOptions): AsyncGenerator<GenerateEvent, void> {
    const attempts = new Attempts(this.#policy, this.#closing.signal, options);
    return generate(request, attempts, (next) => this.#call(rpcs.generate, [next], attempts));
  }

  /** Returns the whole output of a prompt; a request that broke off is sent again as a whole. */
  async complete(request: GenerateInit, options?: CallOptions): Promise<pb.CompleteResponse> {
    return this.#unary(rpcs.complete, true)({ request: withKey(request, this.#policy) }, options);
  }

  /** Sends what `requests` yields, which adds and cancels items, and streams the events of all
   * items. After the end of `requests` it ends with the last item. Nothing is sent twice. */
  async *generateBatch(
    requests: Inits<typeof pb.GenerateBatchRequestSchema>, options?: CallOptions,
  ): AsyncGenerator<BatchItemEvent, void, undefined> {
    const attempt = new Attempts(this.#policy, this.#closing.signal, options);
    for await (const { events } of this.#call(rpcs.generateBatch, requests, attempt))
      for (const { item, event } of events)
        if (event.case === "error")
          yield { item, event: { case: "error", value: fromStatus(event.value) } };
        else if (event.case !== undefined) yield { item, event };
  }

  #unary<I extends Desc, O extends Desc>(method: Method<I, O>, isPatient = false) {
    return async (request: Init<I>, options?: CallOptions): Promise<buf.MessageShape<O>> => {
      const attempts = new Attempts(this.#policy, this.#closing.signal, options);
      for (;;)
        try {
          let answer: buf.MessageShape<O> | undefined;
          for await (const one of this.#call(method, [request], attempts)) answer = one;
          if (answer !== undefined) return answer;
          throw bug("the server gave no answer");
        } catch (error) {
          await attempts.recover(error, isPatient);
        }
    };
  }

  /** Makes one call, and yields its responses. On the wire calls of all kinds are streams. */
  async *#call<I extends Desc, O extends Desc>(
    { name, parent, input, output }: Method<I, O>, requests: Inits<I>, attempts: Attempts,
  ): AsyncGenerator<buf.MessageShape<O>, void, undefined> {
    const token = typeof this.#token === "function" ? await this.#token() : this.#token;
    if (token && !/^[!-~]+$/.test(token)) throw new TypeError("the token is not printable ASCII");
    const metadata = new grpc.Metadata();
    if (token) metadata.set("authorization", `Bearer ${token}`);
    const call = (await this.#nextChannel(attempts)).makeBidiStreamRequest(
      `/${parent.typeName}/${name}`,
      (init: Init<I>) => Buffer.from(buf.toBinary(input, buf.create(input, init))),
      (bytes) => buf.fromBinary(output, bytes),
      metadata, { deadline: Date.now() + attempts.leftMs() },
    );
    const source = Readable.from(requests).on("error", (error) => call.destroy(error));
    // A reader that leaves and the signal destroy the stream, which alone does not end the call.
    call.on("close", () => call.cancel()).on("close", () => source.destroy());
    call.on("error", () => null); // It may come when nothing reads any more.
    addAbortSignal(attempts.signal, source.pipe(call as unknown as Writable));
    try {
      yield* call as AsyncIterable<buf.MessageShape<O>>;
    } catch (error) {
      attempts.leftMs(); // What ends by the deadline or the signal may have any code.
      if (!("metadata" in (error as object))) throw error;
      throw fromFailure(error as grpc.ServiceError, input === wrapper ? "request." : "");
    }
  }

  /** Returns the connected channels in turn, or one that cannot connect where none can. */
  async #nextChannel(attempts: Attempts): Promise<grpc.Client> {
    const { READY, TRANSIENT_FAILURE } = grpc.connectivityState;
    const tried = this.#channels;
    for (const end = performance.now() + 5_000; ; ) {
      attempts.leftMs();
      const states = this.#channels.map((one) => one.getChannel().getConnectivityState(true));
      const isFutile = states.every((one) => one === TRANSIENT_FAILURE);
      const usable = this.#channels.filter((_, at) => isFutile || states[at] === READY);
      const channel = usable[this.#turn++ % usable.length];
      if (channel !== undefined) return channel;
      if (performance.now() >= end) break;
      await attempts.wait(5);
    }
    // By itself grpc-js waits for ever for a server that takes a connection and says nothing.
    for (const channel of tried) channel.close();
    if (this.#channels === tried) this.#channels = this.#openers.map((open) => open());
    throw new TandemError(grpc.status.UNAVAILABLE, "No connection established within 5 s");
  }
}
