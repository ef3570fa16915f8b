package io.tandem.client;

import java.time.Duration;

/**
 * How calls recover by themselves: what failed is sent again if its server advised that or its
 * connection broke, after the wait that the server advised or one that doubles with each failure.
 *
 * @param maxAttempts most calls of a request that no server accepts; 1 = it is never sent again
 * @param initialDelay wait before the second call
 * @param maxDelay longest wait, whatever the server advised
 * @param resume true: a stream that breaks goes on where it stood, on any server of its model
 * @param resumeWithin longest time that a stream may be broken
 */
public record RetryPolicy(
    int maxAttempts, Duration initialDelay, Duration maxDelay, boolean resume,
    Duration resumeWithin) {
  /** Five attempts, waits of 0.2 to 10 s, and 120 s to resume. */
  public static final RetryPolicy DEFAULT = new RetryPolicy(
      5, Duration.ofMillis(200), Duration.ofSeconds(10), true, Duration.ofSeconds(120));
  /** Every failure is thrown at once. */
  public static final RetryPolicy NO_RETRY =
      new RetryPolicy(1, Duration.ZERO, Duration.ZERO, false, Duration.ZERO);
}
