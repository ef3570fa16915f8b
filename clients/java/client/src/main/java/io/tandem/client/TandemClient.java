package io.tandem.client;

import static io.grpc.ConnectivityState.*;
import static io.tandem.inference.v1.InferenceServiceGrpc.*;
import static java.util.concurrent.TimeUnit.*;

import io.grpc.*;
import io.grpc.stub.*;
import io.tandem.inference.v1.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.*;
import java.util.regex.Pattern;

/**
 * Client of one or several Tandem servers, which threads may share. Its calls throw {@link
 * TandemException}: CANCELLED if their thread is interrupted, DEADLINE_EXCEEDED after the deadline.
 */
public final class TandemClient implements AutoCloseable {
  private static final AtomicInteger TURNS = new AtomicInteger();
  private static final Pattern ADDRESS =
      Pattern.compile("(?:\\[[0-9A-Fa-f:.]+\\]|[^:/\\[\\]]+):(\\d{1,5})");
  private final List<ManagedChannel> servers;
  private final RetryPolicy retry;
  private final Deadline deadline;

  private TandemClient(List<ManagedChannel> servers, RetryPolicy retry, Deadline deadline) {
    this.servers = servers;
    this.retry = retry;
    this.deadline = deadline;
  }

  /** Connects in plain text to servers at HOST:PORT; calls take turns among those that live. */
  public static TandemClient connect(String... targets) {
    return connect(InsecureChannelCredentials.create(), settings -> { }, targets);
  }

  /**
   * Connects with credentials, such as {@link TlsChannelCredentials}, and with gRPC's settings that
   * may be changed: a ping after 30 s of silence, 10 s for its answer, messages of up to 64 MiB.
   */
  public static TandemClient connect(ChannelCredentials credentials,
      Consumer<ManagedChannelBuilder<?>> change, String... targets) {
    return new TandemClient(Arrays.stream(targets).map(TandemClient::checked).map(target -> {
      var settings = Grpc.newChannelBuilder(target, credentials).disableRetry()
          .keepAliveTime(30, SECONDS).keepAliveTimeout(10, SECONDS).keepAliveWithoutCalls(true)
          .maxInboundMessageSize(64 << 20); // and pings while it connects: nothing else ends that
      change.accept(settings);
      return settings.build();
    }).toList(), RetryPolicy.DEFAULT, null);
  }

  /** Refuses what is no HOST:PORT at once: gRPC would dial port 443 or 80 of a host alone. */
  private static String checked(String target) {
    var address = ADDRESS.matcher(target);
    int port = address.matches() ? Integer.parseInt(address.group(1)) : 0;
    if ((port < 1 || port > 65535) && !target.matches("(unix|dns):.*|[a-z][a-z0-9+.-]*:///.*")) {
      throw new IllegalArgumentException(
          "the address \"" + target + "\" is no HOST:PORT, such as 127.0.0.1:50051");
    }
    return target;
  }

  /** Returns this client with another policy; they share a connection, which either closes. */
  public TandemClient withRetry(RetryPolicy policy) {
    return new TandemClient(servers, policy, deadline);
  }

  /** Returns this client for a request that ends by then, with all its calls and waits. */
  public TandemClient withDeadlineAfter(Duration time) {
    return new TandemClient(servers, retry, Deadline.after(time.toNanos(), NANOSECONDS));
  }

  /** Streams the output for a prompt; the request is sent when the first event is read. */
  public GenerateStream generate(GenerateRequest request) {
    return new GenerateStream(keyed(request), new Attempts());
  }

  /** Returns the whole output for a prompt, which begins anew if its server stops. */
  public CompleteResponse complete(GenerateRequest request) {
    var whole = CompleteRequest.newBuilder().setRequest(keyed(request)).build();
    try {
      return new Attempts().run(retry.resume(), stub -> stub.get().complete(whole));
    } catch (TandemException error) {
      throw error.within("request");
    }
  }

  /** Makes any other unary call, such as {@code client.call(stub -> stub.tokenize(request))}. */
  public <T> T call(Function<InferenceServiceBlockingStub, T> call) {
    return new Attempts().run(false, stub -> call.apply(stub.get()));
  }

  /**
   * Opens a stream for many requests: write what to add and to cancel, and read events in another
   * thread. It fails as gRPC's calls do; {@link TandemException#of} tells why, and why an item did.
   */
  public BlockingClientCall<GenerateBatchRequest, GenerateBatchResponse> generateBatch() {
    return newBlockingV2Stub(new Attempts().server()).withDeadline(deadline).generateBatch();
  }

  /** Closes the connections; calls that run fail with CANCELLED. */
  @Override public void close() { servers.forEach(ManagedChannel::shutdownNow); }

  private static GenerateRequest.Builder keyed(GenerateRequest request) { // or with its own key
    String key = UUID.randomUUID().toString().replace("-", "");
    return GenerateRequest.newBuilder().setAttemptKey(key).mergeFrom(request);
  }

  /** The calls that one request takes; its stream notes what they bring. */
  final class Attempts {
    final CountDownLatch over = new CountDownLatch(1); // after Done, or when the caller leaves
    boolean isAccepted;
    boolean hasIds = true; // of all output so far
    Deadline resumeUntil; // null: a server has the request, or never had
    int breaksInVain;
    int failures;

    /** Returns the next server that lives, or one that fails; gRPC's waits of minutes are ended. */
    private Channel server() {
      List<ManagedChannel> order = new ArrayList<>(servers);
      Collections.rotate(order, -TURNS.getAndIncrement());
      order.forEach(one -> { if (one.getState(true) == TRANSIENT_FAILURE) { one.enterIdle(); } });
      for (long wait = 1_000_000;; wait = Math.min(2 * wait, 50_000_000)) {
        var states = order.stream().map(server -> server.getState(true)).toList();
        if (states.contains(READY)) { return order.get(states.indexOf(READY)); }
        boolean connects = states.contains(IDLE) || states.contains(CONNECTING);
        if (!connects || !pause(wait)) { return order.get(0); }
      }
    }

    /** Returns what the first call returns that does not fail; null once the request is over. */
    <T> T run(boolean beginsAnew, Function<Supplier<InferenceServiceBlockingStub>, T> call) {
      while (over.getCount() > 0) {
        try {
          return call.apply(() -> newBlockingStub(server()).withDeadline(deadline));
        } catch (StatusRuntimeException failure) {
          if (over.getCount() == 0) { break; }
          TandemException error = TandemException.of(failure);
          // A whole answer is lost with its server; other causes are of connections never made.
          isAccepted |= beginsAnew && (error.reasonName().equals("HANDED_OVER")
              || error.isConnection()
                  && String.valueOf(failure.getCause()).matches("null|.*(reset|Broken pipe).*"));
          pause(waitNanos(error));
        }
      }
      return null;
    }

    private long waitNanos(TandemException error) {
      failures++;
      if (isAccepted && resumeUntil == null) {
        resumeUntil = Deadline.after(retry.resumeWithin().toNanos(), NANOSECONDS);
        breaksInVain++;
      }
      boolean mayGoOn = isAccepted // 16: the request may be what stops its servers
          ? retry.resume() && hasIds && breaksInVain <= 16 && !resumeUntil.isExpired()
          : failures < retry.maxAttempts();
      if (!mayGoOn || error.retryAfter().isEmpty() && !error.isConnection()) { throw error; }
      var doubled = retry.initialDelay().multipliedBy(1L << Math.min(failures - 1, 16));
      double wait = error.retryAfter().orElse(doubled).toNanos()
          * ThreadLocalRandom.current().nextDouble(1, 1.25);
      return (long) Math.min(wait, Math.min(retry.maxDelay().toNanos(), isAccepted ? 2e9 : 1e18));
    }

    /** Waits; returns true if the request still has time. */
    private boolean pause(long nanos) {
      try {
        long left = deadline == null ? nanos : deadline.timeRemaining(NANOSECONDS);
        return !over.await(Math.min(nanos, left), NANOSECONDS) && left > 0;
      } catch (InterruptedException interrupted) {
        Thread.currentThread().interrupt(); // it ends the next call
        return false;
      }
    }
  }
}
