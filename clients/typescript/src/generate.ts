import { randomBytes } from "node:crypto";
import { clone, create, type MessageInitShape } from "@bufbuild/protobuf";
import { status as Code } from "@grpc/grpc-js";
import { bug, TandemError } from "./errors.js";
import * as pb from "./gen/index.js";
import type { Attempts, RetryPolicy } from "./retry.js";

/** An event of a stream: its `case` tells the type of its `value`. */
export type GenerateEvent = Exclude<pb.GenerateResponse["event"], { case: undefined }>;
/** A GenerateRequest, or its fields. */
export type GenerateInit = MessageInitShape<typeof pb.GenerateRequestSchema>;

/** Returns a copy of a request, with a key where it may be sent more than once. */
export function withKey(init: GenerateInit, { maxAttempts, resume }: RetryPolicy) {
  const request = clone(pb.GenerateRequestSchema, create(pb.GenerateRequestSchema, init));
  if (maxAttempts > 1 || resume) request.attemptKey ??= randomBytes(16).toString("hex");
  return request;
}

/** Yields the events of one Generate over all its calls, which `call` makes. */
export async function* generate(
  init: GenerateInit, attempts: Attempts,
  call: (request: pb.GenerateRequest) => AsyncIterable<pb.GenerateResponse>,
): AsyncGenerator<GenerateEvent, void, undefined> {
  const request = withKey(init, attempts.policy);
  const { timeLimitS, response: { omitTokenIds = false } = {} } = request;
  const endsSoftlyAt = performance.now() + (timeLimitS ?? 0) * 1000;
  const output: pb.PriorOutput[] = []; // By choice: servers keep nothing of a broken stream.
  for (const held of request.resume?.choices ?? []) output[held.choice] = held;
  const of = (choice: number) => (output[choice] ??= create(pb.PriorOutputSchema, { choice }));
  let started: pb.Started | undefined;
  let hasOutput = false;
  for (let isDone = false; !isDone; )
    try {
      for await (const { event } of call(request)) {
        if (event.case === "started") {
          attempts.accepted += 1;
          attempts.brokenSince = undefined;
          checkResumed(event.value, started ?? event.value, output);
          if (started !== undefined) continue; // The caller has had it.
          started = event.value;
          const { requestId, sampling, stopping } = started;
          Object.assign(request, { requestId, sampling, stopping });
        } else if (event.case === "delta") {
          const { choice, firstTokenOffset: offset, tokenIds } = event.value;
          const held = of(choice).tokenIds;
          if (offset !== held.length && !omitTokenIds)
            throw bug(`the server goes on at offset ${String(offset)} of ${String(held.length)}`);
          for (const id of tokenIds) held.push(id);
          attempts.accepted = 1;
          attempts.failures = 0;
        } else if (event.case === "finished") of(event.value.choice).finished = true;
        hasOutput ||= event.case === "delta" || event.case === "finished";
        isDone ||= event.case === "done";
        if (event.case !== undefined) yield event;
      }
      if (!isDone) throw bug("the server ended the stream before done");
    } catch (error) {
      if (isDone) return; // With `done` the output is whole, however its call ends.
      if (omitTokenIds && hasOutput) throw error;
      await attempts.recover(error);
      if (started) request.resume = create(pb.ResumeSchema, { choices: Object.values(output) });
      const leftS = (endsSoftlyAt - performance.now()) / 1000;
      if (timeLimitS !== undefined) request.timeLimitS = Math.max(leftS, 0.001);
    }
}

function checkResumed(now: pb.Started, before: pb.Started, output: pb.PriorOutput[]): void {
  const held = output.flatMap(({ tokenIds }) => tokenIds).length;
  if (now.modelRevision !== before.modelRevision)
    throw new TandemError(Code.FAILED_PRECONDITION, "another model is served now", "MODEL_CHANGED");
  if (now.resumedTokens !== held)
    throw bug(`the server goes on after ${String(now.resumedTokens)} of ${String(held)} ids`);
}
