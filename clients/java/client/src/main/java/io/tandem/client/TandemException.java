package io.tandem.client;

import com.google.protobuf.*;
import com.google.rpc.*;
import io.grpc.Context;
import io.grpc.Metadata;
import io.grpc.Status.Code;
import io.grpc.protobuf.ProtoUtils;
import io.tandem.common.v1.ErrorReason;
import io.tandem.inference.v1.BatchEvent;
import java.util.*;

/** Failure of a call, or of an item of a batch. Match its reason or its code, never its message. */
public final class TandemException extends RuntimeException {
  private static final long serialVersionUID = 1;
  private final Code code;
  private final Status details;
  private String outer = ""; // beginning of a field's path that leads to the caller's request

  TandemException(Code code, String message, Status details, Throwable cause) {
    super(message, cause);
    this.code = code;
    this.details = details;
  }

  TandemException(ErrorReason reason, String message) { // found by the client itself
    this(reason == ErrorReason.ERROR_REASON_INTERNAL ? Code.INTERNAL : Code.FAILED_PRECONDITION,
        message, Status.newBuilder().addDetails(Any.pack(ErrorInfo.newBuilder().setDomain("tandem")
            .setReason(reason.name().replace("ERROR_REASON_", "")).build())).build(), null);
  }

  /** Returns the failure that {@code event.getError()} tells. */
  public static TandemException of(BatchEvent event) {
    Status told = parsed(Status.getDefaultInstance(), event.getError().toByteArray());
    Code code = io.grpc.Status.fromCodeValue(told.getCode()).getCode();
    return new TandemException(code, told.getMessage(), told, null);
  }

  /** Returns the failure that an exception of gRPC's own tells. */
  public static TandemException of(Exception failure) {
    var told = io.grpc.Status.fromThrowable(failure);
    var trailers = io.grpc.Status.trailersFromThrowable(failure);
    var key = Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER);
    byte[] bytes = trailers == null ? null : trailers.get(key);
    Status details = parsed(Status.getDefaultInstance(), bytes == null ? new byte[0] : bytes);
    String message = Objects.requireNonNullElse(told.getDescription(), told.getCode().name());
    Code code = told.getCode();
    // A broken connection has several codes. Servers send all but CANCELLED, but not these words.
    boolean isBroken = code == Code.UNAVAILABLE || code == Code.CANCELLED
        || (code == Code.INTERNAL || code == Code.UNKNOWN) && (told.getCause() != null
            || message.matches("(RST_STREAM|Received unexpected EOS|Encountered end-of-stream).*"));
    if (details.getDetailsCount() == 0 && isBroken) {
      boolean byCaller = Context.current().isCancelled() || Thread.currentThread().isInterrupted()
          || message.startsWith("Channel shutdown");
      code = byCaller ? Code.CANCELLED : Code.UNAVAILABLE;
    }
    String why = told.getCause() == null ? message : message + ": " + told.getCause().getMessage();
    return new TandemException(code, why, details, failure);
  }

  /** Returns the gRPC code; UNAVAILABLE where the connection broke. */
  public Code code() { return code; }
  /** Returns the reason; unspecified where there is none that this version knows. */
  public ErrorReason reason() {
    var known = ErrorReason.getDescriptor().findValueByName("ERROR_REASON_" + reasonName());
    return known == null ? ErrorReason.ERROR_REASON_UNSPECIFIED : ErrorReason.valueOf(known);
  }
  /** Returns the reason as it was sent, such as QUEUE_FULL; empty if none was. */
  public String reasonName() { return one(ErrorInfo.getDefaultInstance()).getReason(); }
  /** Returns more facts, such as which limit was reached. */
  public Map<String, String> metadata() {
    return one(ErrorInfo.getDefaultInstance()).getMetadataMap();
  }
  /** Returns the path of the request's field that is wrong; empty if none is. */
  public String field() {
    return one(BadRequest.getDefaultInstance()).getFieldViolationsList().stream()
        .map(BadRequest.FieldViolation::getField).findFirst()
        .map(path -> path.startsWith(outer) ? path.substring(outer.length()) : path).orElse("");
  }
  /** Returns the wait that the server advised before the next call. */
  public Optional<java.time.Duration> retryAfter() {
    var advice = one(RetryInfo.getDefaultInstance());
    return Optional.of(advice.getRetryDelay()).filter(delay -> advice.hasRetryDelay())
        .map(delay -> java.time.Duration.ofSeconds(delay.getSeconds(), delay.getNanos()));
  }
  /** Returns the id that the server's log has for the request; empty if there is none. */
  public String requestId() { return one(RequestInfo.getDefaultInstance()).getRequestId(); }

  /** Returns this failure of a call whose message has the caller's request in this field. */
  TandemException within(String field) {
    outer = field + ".";
    return this;
  }

  /** Returns true if no server told it: there was no connection, or it broke. */
  boolean isConnection() { return code == Code.UNAVAILABLE && reasonName().isEmpty(); }

  private <T extends Message> T one(T empty) { // a proxy may add an ErrorInfo of its own
    return details.getDetailsList().stream().filter(any -> any.is(empty.getClass()))
        .map(any -> parsed(empty, any.getValue().toByteArray()))
        .filter(one -> !(one instanceof ErrorInfo info) || info.getDomain().equals("tandem"))
        .findFirst().orElse(empty);
  }

  private static <T extends Message> T parsed(T empty, byte[] bytes) {
    try {
      return ProtoUtils.metadataMarshaller(empty).parseBytes(bytes);
    } catch (IllegalArgumentException malformed) {
      return empty; // the code holds all the same
    }
  }
}
