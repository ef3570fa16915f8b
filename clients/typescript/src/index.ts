export { status as Code } from "@grpc/grpc-js";
export type { ConnectOptions } from "./channel.js";
export { type BatchItemEvent, Client } from "./client.js";
export { TandemError } from "./errors.js";
export * from "./gen/index.js";
export type { GenerateEvent, GenerateInit } from "./generate.js";
export { type CallOptions, DEFAULT_RETRY, NO_RETRY, type RetryPolicy } from "./retry.js";
