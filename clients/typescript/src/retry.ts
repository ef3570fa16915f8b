import { setTimeout as sleep } from "node:timers/promises";
import { status as Code } from "@grpc/grpc-js";
import { TandemError } from "./errors.js";

/** How calls recover by themselves from what is transient, unless something else is said. */
export const DEFAULT_RETRY = {
  /** Most tries of a request that no server has accepted, the first included. */
  maxAttempts: 5,
  /** Wait before the second try where the server advises none; each failure doubles it. */
  initialDelayMs: 200,
  /** Longest wait, also where the server advises more. */
  maxDelayMs: 10_000,
  /** True: a stream that breaks goes on after the output that was given, at any server. */
  resume: true,
  /** How long a broken stream may be without a server, counted anew at each break. */
  resumeWithinMs: 120_000,
};
/** A way to recover, as DEFAULT_RETRY explains it. */
export type RetryPolicy = Readonly<typeof DEFAULT_RETRY>;
/** Nothing is sent twice: each failure is told at once. */
export const NO_RETRY: RetryPolicy = { ...DEFAULT_RETRY, maxAttempts: 1, resume: false };

/** What ends a request from outside. */
export interface CallOptions {
  /** Cancels the request, in a wait between calls too; the caller gets the signal's reason. */
  readonly signal?: AbortSignal | undefined;
  /** Milliseconds for the request with all its calls and waits; then it is DEADLINE_EXCEEDED. */
  readonly deadlineMs?: number | undefined;
}

const MAX_IN_VAIN = 16; // It may be the request that stops its servers.
const NEVER_CONNECTED = /No connection established|Name resolution failed/;

/** The calls that one request takes, and what limits them. */
export class Attempts {
  readonly signal: AbortSignal;
  readonly #endsAt: number;
  /** Failures since the last output. */ failures = 0;
  /** How many calls were accepted, that of the last output and those since. */ accepted = 0;
  /** Since when an accepted request is without a server. */ brokenSince: number | undefined;

  constructor(readonly policy: RetryPolicy, closing: AbortSignal, options: CallOptions = {}) {
    const { signal, deadlineMs = Infinity } = options;
    this.signal = AbortSignal.any(signal ? [closing, signal] : [closing]);
    this.#endsAt = performance.now() + deadlineMs;
  }

  /** Returns the milliseconds that are left; throws where the request has ended. */
  leftMs(): number {
    this.signal.throwIfAborted();
    const leftMs = this.#endsAt - performance.now();
    if (leftMs > 0) return leftMs;
    throw new TandemError(Code.DEADLINE_EXCEEDED, "the deadline of the request passed");
  }

  /** Waits, at most until the request ends. */
  async wait(ms: number): Promise<void> {
    await sleep(Math.min(ms, this.leftMs()), undefined, { signal: this.signal }).catch(() => null);
  }

  /** Waits until the next call is due, or throws the error of the last one where it is final. */
  async recover(error: unknown, isPatient = false): Promise<void> {
    if (!(error instanceof TandemError)) throw error;
    const { maxAttempts, initialDelayMs, maxDelayMs, resume, resumeWithinMs } = this.policy;
    const isDisconnect = error.code === Code.UNAVAILABLE && error.reasonName === undefined;
    const brokeOff = isDisconnect && !NEVER_CONNECTED.test(error.message); // A server may have it.
    if (isPatient && resume && (brokeOff || error.reasonName === "HANDED_OVER")) this.accepted = 1;
    if (this.accepted > 0) this.brokenSince ??= performance.now();
    this.failures += 1;
    const brokenMs = performance.now() - (this.brokenSince ?? Infinity);
    const mayResume = resume && brokenMs <= resumeWithinMs && this.accepted <= MAX_IN_VAIN;
    const mayRepeat = this.accepted > 0 ? mayResume : this.failures < maxAttempts;
    if (!mayRepeat || (error.retryAfterMs === undefined && !isDisconnect)) throw error;
    const advisedMs = error.retryAfterMs ?? initialDelayMs * 2 ** (this.failures - 1);
    const mostMs = this.accepted > 0 ? Math.min(maxDelayMs, 2_000) : maxDelayMs; // A reader waits.
    await this.wait(Math.min(advisedMs * (1 + Math.random() / 4), mostMs));
  }
}
