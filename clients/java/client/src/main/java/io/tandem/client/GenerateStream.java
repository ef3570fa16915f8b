package io.tandem.client;

import static io.tandem.common.v1.ErrorReason.*;
import static io.tandem.inference.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;

import io.grpc.*;
import io.tandem.common.v1.ErrorReason;
import io.tandem.inference.v1.*;
import java.util.*;
import java.util.function.Supplier;
import java.util.stream.Stream;

/**
 * Events of one request, over as many calls as it takes. One thread loops over them and waits for
 * each; the loop ends after Done, and with {@link TandemException} if the stream cannot go on.
 */
public final class GenerateStream implements Iterable<GenerateResponse>, AutoCloseable {
  private final Context.CancellableContext context = Context.current().withCancellation();
  private final GenerateRequest.Builder request; // always what goes on after the events so far
  private final TandemClient.Attempts attempts;
  private final double endS; // of the caller's time_limit_s
  private Iterator<GenerateResponse> call;
  private Started started;

  GenerateStream(GenerateRequest.Builder request, TandemClient.Attempts attempts) {
    this.request = request;
    this.attempts = attempts;
    endS = System.nanoTime() / 1e9 + request.getTimeLimitS();
  }

  /** Returns the events that have not been read. */
  @Override public Iterator<GenerateResponse> iterator() {
    return Stream.generate(() -> attempts.run(false, this::read))
        .takeWhile(Objects::nonNull).iterator();
  }

  /** Ends the loop, and the request on its server if that has not ended; from any thread. */
  @Override public void close() {
    attempts.over.countDown();
    context.cancel(null);
  }

  private GenerateResponse read(Supplier<InferenceServiceBlockingStub> stub) {
    if (call == null) {
      if (request.hasTimeLimitS() && attempts.failures > 0) {
        request.setTimeLimitS(Math.max(0.001, endS - System.nanoTime() / 1e9));
      }
      context.run(() -> call = stub.get().generate(request.build()));
    }
    var events = call;
    call = null; // it stays so if the call fails
    GenerateResponse response;
    do {
      check(events.hasNext(), ERROR_REASON_INTERNAL, "the stream ended before Done");
      response = events.next();
    } while (!isNews(response));
    call = events;
    return response;
  }

  /** Takes note of a response; returns true if it is one for the caller. */
  private boolean isNews(GenerateResponse response) {
    switch (response.getEventCase()) {
      case STARTED -> {
        attempts.isAccepted = true;
        attempts.resumeUntil = null;
        boolean isFirst = started == null;
        started = isFirst ? response.getStarted() : started;
        checkResumed(response.getStarted());
        request.setRequestId(started.getRequestId()).setSampling(started.getSampling())
            .setStopping(started.getStopping()).setResume(request.getResume());
        return isFirst;
      }
      case DELTA -> {
        Delta delta = response.getDelta();
        var output = output(delta.getChoice());
        check(!attempts.hasIds || delta.getFirstTokenOffset() == output.getTokenIdsCount(),
            ERROR_REASON_INTERNAL, "the server does not go on where its last delta ended");
        output.addAllTokenIds(delta.getTokenIdsList());
        attempts.failures = attempts.breaksInVain = 0;
      }
      case FINISHED -> output(response.getFinished().getChoice()).setFinished(true);
      case DONE -> attempts.over.countDown();
      default -> { }
    }
    return response.getEventCase() != GenerateResponse.EventCase.EVENT_NOT_SET;
  }

  private void checkResumed(Started again) {
    check(again.getModelRevision().equals(started.getModelRevision()), ERROR_REASON_MODEL_CHANGED,
        "the stream broke and another model is served now: begin again");
    int held = request.getResume().getChoicesList().stream()
        .mapToInt(PriorOutput::getTokenIdsCount).sum();
    check(again.getResumedTokens() == held, ERROR_REASON_INTERNAL,
        "the server does not go on where the stream broke");
  }

  private PriorOutput.Builder output(int choice) {
    // Without ids nothing tells where a stream breaks.
    attempts.hasIds = !request.getResponse().getOmitTokenIds();
    var resume = request.getResumeBuilder();
    return resume.getChoicesBuilderList().stream().filter(one -> one.getChoice() == choice)
        .findFirst().orElseGet(() -> resume.addChoicesBuilder().setChoice(choice));
  }

  private void check(boolean isRight, ErrorReason reason, String wrong) {
    if (isRight) { return; }
    close();
    throw new TandemException(reason, wrong);
  }
}
