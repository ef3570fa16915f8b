import { type DescMessage, fromBinary } from "@bufbuild/protobuf";
import { anyUnpack, durationMs } from "@bufbuild/protobuf/wkt";
import { status as Code, type ServiceError } from "@grpc/grpc-js";
import * as rpc from "./gen/google/rpc/error_details_pb.js";
import { StatusSchema } from "./gen/google/rpc/status_pb.js";
import { ErrorReason, ErrorReasonSchema } from "./gen/index.js";

/** A failed call. Match it by `reason`, and where that is UNSPECIFIED by `code`. */
export class TandemError extends Error {
  override readonly name = "TandemError";
  /** Cause; UNSPECIFIED where none was told, or one that this client does not know. */
  readonly reason: ErrorReason;

  constructor(
    /** Status code of gRPC. */ readonly code: Code,
    message: string,
    /** Name of the cause, known or not; undefined: none was told. */ readonly reasonName?: string,
    /** More facts. */ readonly metadata: Readonly<Record<string, string>> = {},
    /** Path of the wrong field, such as `sampling.top_p`. */ readonly field?: string,
    /** Wait in milliseconds that the server advises. */ readonly retryAfterMs?: number,
    /** Id of the request, or of a call without one. */ readonly requestId?: string,
  ) {
    super(message);
    const known = ErrorReasonSchema.values.find((value) => value.localName === reasonName);
    this.reason = known?.number ?? ErrorReason.UNSPECIFIED;
  }
}

/** Returns the error for a server that broke the contract. */
export const bug = (message: string) => new TandemError(Code.INTERNAL, message, "INTERNAL");

/** Returns the error in a serialized google.rpc.Status; throws if the bytes are none.
 * @param outer - Beginning of the field's path that leads to the caller's request. */
export function fromStatus(bytes: Uint8Array, outer = ""): TandemError {
  const { code, message, details } = fromBinary(StatusSchema, bytes);
  const of = <D extends DescMessage>(type: D) => details.flatMap((it) => anyUnpack(it, type) ?? []);
  const { reason, metadata } = of(rpc.ErrorInfoSchema).find((it) => it.domain === "tandem") ?? {};
  const [wrong] = of(rpc.BadRequestSchema).flatMap((it) => it.fieldViolations);
  const [retry] = of(rpc.RetryInfoSchema);
  const [request] = of(rpc.RequestInfoSchema);
  const waitMs = retry && (retry.retryDelay ? durationMs(retry.retryDelay) : 0);
  const field = wrong?.field.startsWith(outer) ? wrong.field.slice(outer.length) : wrong?.field;
  return new TandemError(code, message, reason, metadata, field, waitMs, request?.requestId);
}

// What grpc-js says, with various codes, of a connection that broke under a call.
const BROKEN = /RST_STREAM|start HTTP\/2 stream|Bandwidth exhausted|No status information/;

/** Returns the error of a call that failed, and that nothing on this side cancelled. */
export function fromFailure(failure: ServiceError, outer?: string): TandemError {
  const { code, details, metadata } = failure;
  try {
    const [status] = metadata.get("grpc-status-details-bin");
    if (typeof status === "object") return fromStatus(status, outer);
  } catch {} // Details that cannot be decoded tell nothing: the status line counts.
  const isBroken = code === Code.CANCELLED || BROKEN.test(details);
  return new TandemError(isBroken ? Code.UNAVAILABLE : code, details);
}
