package io.tandem.conformance;

import com.google.gson.JsonArray;
import com.google.gson.JsonNull;
import com.google.gson.JsonObject;
import io.tandem.client.TandemException;
import io.tandem.common.v1.ErrorReason;
import io.tandem.common.v1.FinishReason;
import io.tandem.inference.v1.BatchEvent;
import io.tandem.inference.v1.CompleteResponse;
import io.tandem.inference.v1.Completion;
import io.tandem.inference.v1.Delta;
import io.tandem.inference.v1.Done;
import io.tandem.inference.v1.Finished;
import io.tandem.inference.v1.GenerateResponse;
import io.tandem.inference.v1.Started;
import java.time.Duration;
import java.util.Map;
import java.util.TreeMap;

/** What came for one request, as its {@code result}. */
final class Outcome {
  private final Map<Integer, JsonObject> choices = new TreeMap<>();
  private final JsonObject rest = new JsonObject();
  private int deltas;
  private boolean hasEnded;

  int deltas() { return deltas; }

  boolean hasEnded() { return hasEnded; }

  void take(GenerateResponse event) {
    switch (event.getEventCase()) {
      case STARTED -> takeStarted(event.getStarted());
      case DELTA -> takeDelta(event.getDelta());
      case FINISHED -> takeFinished(event.getFinished());
      case DONE -> takeDone(event.getDone());
      default -> { }
    }
  }

  void take(BatchEvent event) {
    switch (event.getEventCase()) {
      case STARTED -> takeStarted(event.getStarted());
      case DELTA -> takeDelta(event.getDelta());
      case FINISHED -> takeFinished(event.getFinished());
      case DONE -> takeDone(event.getDone());
      case ERROR -> fail(TandemException.of(event));
      default -> { }
    }
  }

  void take(CompleteResponse answer) {
    takeStarted(answer.getStarted());
    for (Completion one : answer.getCompletionsList()) {
      JsonObject choice = choice(one.getChoice());
      one.getTokenIdsList().forEach(choice.getAsJsonArray("token_ids")::add);
      choice.addProperty("text", one.getText());
      choice.addProperty("reason", nameOf(one.getReason()));
      if (one.hasStopString()) {
        choice.addProperty("stop_string", one.getStopString());
      } else if (one.hasTokenId()) {
        choice.addProperty("token_id", one.getTokenId());
      }
    }
    takeDone(answer.getDone());
  }

  void fail(TandemException error) {
    hasEnded = true;
    rest.add("error", told(error));
  }

  JsonObject asJson() {
    JsonArray list = new JsonArray();
    choices.values().forEach(list::add);
    JsonObject result = rest.deepCopy();
    result.add("choices", list);
    return result;
  }

  static JsonObject told(TandemException error) {
    JsonObject told = new JsonObject();
    told.addProperty("code", error.code().name());
    told.addProperty("reason", orNull(error.reasonName()));
    told.addProperty("known", error.reason() != ErrorReason.ERROR_REASON_UNSPECIFIED);
    told.addProperty("message", error.getMessage());
    told.addProperty("field", orNull(error.field()));
    JsonObject metadata = new JsonObject();
    error.metadata().forEach(metadata::addProperty);
    told.add("metadata", metadata);
    told.addProperty("retry_after_ms", error.retryAfter().map(Duration::toMillis).orElse(null));
    told.addProperty("request_id", orNull(error.requestId()));
    return told;
  }

  private static String orNull(String text) { return text.isEmpty() ? null : text; }

  private void takeStarted(Started one) {
    JsonObject started = new JsonObject();
    started.addProperty("request_id", one.getRequestId());
    started.addProperty("prompt_tokens", one.getPromptTokens());
    started.addProperty("model_revision", one.getModelRevision());
    started.addProperty("seed", Long.toUnsignedString(one.getSampling().getSeed()));
    rest.add("started", started);
  }

  private void takeDelta(Delta delta) {
    deltas++;
    JsonObject choice = choice(delta.getChoice());
    delta.getTokenIdsList().forEach(choice.getAsJsonArray("token_ids")::add);
    choice.addProperty("text", choice.get("text").getAsString() + delta.getText());
  }

  private void takeFinished(Finished finished) {
    JsonObject choice = choice(finished.getChoice());
    choice.addProperty("reason", nameOf(finished.getReason()));
    if (finished.hasStopString()) {
      choice.addProperty("stop_string", finished.getStopString());
    } else if (finished.hasTokenId()) {
      choice.addProperty("token_id", finished.getTokenId());
    }
  }

  private void takeDone(Done done) {
    hasEnded = true;
    rest.addProperty("output_tokens", done.getUsage().getOutputTokens());
  }

  private JsonObject choice(int number) {
    return choices.computeIfAbsent(number, it -> {
      JsonObject choice = new JsonObject();
      choice.addProperty("choice", number);
      choice.add("token_ids", new JsonArray());
      choice.addProperty("text", "");
      choice.add("reason", JsonNull.INSTANCE);
      return choice;
    });
  }

  private static String nameOf(FinishReason reason) {
    FinishReason known =
        reason == FinishReason.UNRECOGNIZED ? FinishReason.FINISH_REASON_UNSPECIFIED : reason;
    return known.name().substring("FINISH_REASON_".length());
  }
}
