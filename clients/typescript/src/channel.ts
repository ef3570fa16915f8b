import { readFileSync } from "node:fs";
import * as grpc from "@grpc/grpc-js";
import type { RetryPolicy } from "./retry.js";

/** How a client connects. */
export interface ConnectOptions {
  /** Encrypts. `ca`, `cert` and `key` are paths of PEM files, which are read once; without `ca`
   * Node's authorities count. `serverName` is the certificates' name where it is not the host. */
  readonly tls?: { ca?: string; cert?: string; key?: string; serverName?: string } | undefined;
  /** Token of every call, or a function that is asked for it before each call. */
  readonly token?: string | (() => string | Promise<string>) | undefined;
  /** Milliseconds of silence in calls after which a connection is tested. Default: 30,000. */
  readonly keepaliveMs?: number | undefined;
  /** Milliseconds for the answer to that test. Default: 10,000. */
  readonly keepaliveTimeoutMs?: number | undefined;
  /** NO_RETRY, or what differs from DEFAULT_RETRY. */
  readonly retry?: Partial<RetryPolicy> | undefined;
}

/** Returns what opens channels to one target, which connect with the first call. */
export function channelsTo(target: string, options: ConnectOptions): () => grpc.Client {
  if (!/^([^:/]+|\[[^/]+\]):\d+$/.test(target)) throw new TypeError(`${target} is not HOST:PORT`);
  const { ca, cert, key, serverName } = options.tls ?? {};
  const pem = (path?: string) => (path === undefined ? null : readFileSync(path));
  const credentials = options.tls
    ? grpc.credentials.createSsl(pem(ca), pem(key), pem(cert))
    : grpc.credentials.createInsecure();
  return () => new grpc.Client(target, credentials, {
    "grpc.keepalive_time_ms": options.keepaliveMs ?? 30_000,
    "grpc.keepalive_timeout_ms": options.keepaliveTimeoutMs ?? 10_000,
    "grpc.max_receive_message_length": 64 << 20,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 2_000,
    // Servers of one name take turns too, and the name is looked up anew when one goes.
    "grpc.service_config": '{"loadBalancingConfig":[{"round_robin":{}}]}',
    "grpc.service_config_disable_resolution": 1,
    "grpc.dns_min_time_between_resolutions_ms": 2_000,
    "grpc.use_local_subchannel_pool": 1, // No two clients share a connection.
    ...(/^(localhost|127\.[\d.]+|\[::1\]):/i.test(target) && { "grpc.enable_http_proxy": 0 }),
    ...(serverName && { "grpc.ssl_target_name_override": serverName }),
  });
}
