package io.tandem.conformance;

import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Message;
import com.google.protobuf.util.JsonFormat;
import io.grpc.ChannelCredentials;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusException;
import io.grpc.TlsChannelCredentials;
import io.grpc.stub.MetadataUtils;
import io.tandem.client.GenerateStream;
import io.tandem.client.RetryPolicy;
import io.tandem.client.TandemClient;
import io.tandem.client.TandemException;
import io.tandem.inference.v1.AbortRequest;
import io.tandem.inference.v1.BatchEvent;
import io.tandem.inference.v1.BatchItem;
import io.tandem.inference.v1.GenerateBatchRequest;
import io.tandem.inference.v1.GenerateRequest;
import io.tandem.inference.v1.GenerateResponse;
import io.tandem.inference.v1.GetModelRequest;
import io.tandem.inference.v1.TokenizeRequest;
import java.io.File;
import java.io.IOException;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;

/** Carries out commands, each in a thread of its own. */
final class Caller {
  private static final RetryPolicy SOON =
      new RetryPolicy(9, Duration.ofMillis(1), Duration.ofMillis(1), true, Duration.ofMinutes(2));

  private final Consumer<JsonObject> say;
  private final Map<String, TandemClient> shared = new ConcurrentHashMap<>();
  private final Map<String, Runnable> leaving = new ConcurrentHashMap<>();
  private final Set<String> left = ConcurrentHashMap.newKeySet();
  private final Set<TandemClient> clients = ConcurrentHashMap.newKeySet();

  Caller(Consumer<JsonObject> say) { this.say = say; }

  void begin(JsonObject command) {
    if (text(command, "do").equals("cancel")) {
      String name = text(command, "command");
      left.add(name);
      leaving.getOrDefault(name, () -> { }).run();
      say(command, "result", new JsonObject());
      return;
    }
    Thread thread = new Thread(() -> carryOut(command));
    thread.setDaemon(true);
    onLeave(command, thread::interrupt);
    thread.start();
  }

  void close() { clients.forEach(TandemClient::close); }

  private void carryOut(JsonObject command) {
    JsonObject result = new JsonObject();
    try {
      TandemClient client = clientOf(command);
      try {
        result = result(withOptions(client, command), command);
      } finally {
        if (!command.has("connection")) {
          client.close();
          clients.remove(client);
        }
      }
    } catch (TandemException error) {
      if (!left.contains(text(command, "id"))) {
        result.add("error", Outcome.told(error));
      }
    } catch (IOException | IllegalArgumentException error) { // of a command or a file of it
      var told = Status.INVALID_ARGUMENT.withDescription(error.toString()).withCause(error);
      result.add("error", Outcome.told(TandemException.of(told.asException())));
    }
    leaving.remove(text(command, "id"));
    say(command, "result", result);
  }

  private JsonObject result(TandemClient client, JsonObject command) throws IOException {
    JsonObject result = new JsonObject();
    switch (text(command, "do")) {
      case "generate" -> result = generate(client, command);
      case "batch" -> result.add("items", batch(client, command));
      case "complete" -> {
        Outcome outcome = new Outcome();
        try {
          outcome.take(client.complete(request(command, GenerateRequest.newBuilder()).build()));
        } catch (TandemException error) {
          if (!left.contains(text(command, "id"))) {
            outcome.fail(error);
          }
        }
        result = outcome.asJson();
      }
      case "abort" -> {
        var request = request(command, AbortRequest.newBuilder()).build();
        client.call(stub -> stub.abort(request));
      }
      case "tokenize" -> {
        JsonArray ids = new JsonArray();
        var request = request(command, TokenizeRequest.newBuilder()).build();
        client.call(stub -> stub.tokenize(request)).getTokenIdsList().forEach(ids::add);
        result.add("token_ids", ids);
      }
      case "model" -> {
        var request = request(command, GetModelRequest.newBuilder()).build();
        var model = client.call(stub -> stub.getModel(request));
        String json = JsonFormat.printer().preservingProtoFieldNames().print(model.getModel());
        result.add("model", JsonParser.parseString(json));
      }
      default -> throw new IllegalArgumentException("unknown: do = " + text(command, "do"));
    }
    return result;
  }

  private JsonObject generate(TandemClient client, JsonObject command) throws IOException {
    Outcome outcome = new Outcome();
    var request = request(command, GenerateRequest.newBuilder()).build();
    try (GenerateStream stream = client.generate(request)) {
      onLeave(command, stream::close);
      for (GenerateResponse event : stream) {
        outcome.take(event);
        tell(command, event.getEventCase().name(), -1);
        if (command.has("cancel_after_deltas")
            && outcome.deltas() == command.get("cancel_after_deltas").getAsInt()) {
          break;
        }
        if (event.hasDelta() && outcome.deltas() == 1 && command.has("pause_ms")) {
          TimeUnit.MILLISECONDS.sleep(command.get("pause_ms").getAsInt());
        }
      }
    } catch (TandemException error) {
      outcome.fail(error);
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
    }
    return outcome.asJson();
  }

  private JsonArray batch(TandemClient client, JsonObject command) throws IOException {
    List<Outcome> outcomes = new ArrayList<>();
    Set<Long> toCancel = new HashSet<>();
    array(command, "cancel_items").forEach(item -> toCancel.add(item.getAsLong()));
    var call = client.generateBatch();
    onLeave(command, () -> call.cancel("the caller left", null));
    try {
      for (JsonElement item : array(command, "items")) {
        var request = parsed(item, GenerateRequest.newBuilder());
        call.write(GenerateBatchRequest.newBuilder()
            .addAdd(BatchItem.newBuilder().setItem(outcomes.size()).setRequest(request)).build());
        outcomes.add(new Outcome());
      }
      while (!outcomes.stream().allMatch(Outcome::hasEnded)) {
        for (BatchEvent event : call.read().getEventsList()) {
          outcomes.get((int) event.getItem()).take(event);
          tell(command, event.getEventCase().name(), event.getItem());
          if (event.hasDelta() && toCancel.remove(event.getItem())) {
            call.write(GenerateBatchRequest.newBuilder().addCancel(event.getItem()).build());
          }
        }
      }
      call.halfClose();
    } catch (StatusException | InterruptedException failure) {
      TandemException error = TandemException.of(failure);
      boolean isLeft = left.contains(text(command, "id"));
      outcomes.stream().filter(one -> !isLeft && !one.hasEnded()).forEach(one -> one.fail(error));
    }
    JsonArray items = new JsonArray();
    outcomes.forEach(outcome -> items.add(outcome.asJson()));
    return items;
  }

  private TandemClient clientOf(JsonObject command) throws IOException {
    if (!command.has("connection")) {
      return connected(command);
    }
    synchronized (shared) {
      String name = text(command, "connection");
      if (!shared.containsKey(name)) {
        shared.put(name, connected(command));
      }
      return shared.get(name);
    }
  }

  private TandemClient connected(JsonObject command) throws IOException {
    ChannelCredentials credentials = InsecureChannelCredentials.create();
    if (command.has("ca") || command.has("cert")) {
      var tls = TlsChannelCredentials.newBuilder();
      if (command.has("ca")) {
        tls.trustManager(new File(text(command, "ca")));
      }
      if (command.has("cert")) {
        tls.keyManager(new File(text(command, "cert")), new File(text(command, "key")));
      }
      credentials = tls.build();
    }
    List<String> targets = new ArrayList<>();
    array(command, "targets").forEach(target -> targets.add(target.getAsString()));
    TandemClient client = TandemClient.connect(
        credentials, settings -> change(settings, command), targets.toArray(String[]::new));
    clients.add(client);
    return client;
  }

  private static void change(ManagedChannelBuilder<?> settings, JsonObject command) {
    if (command.has("server_name")) {
      settings.overrideAuthority(text(command, "server_name"));
    }
    if (command.has("token")) {
      Metadata headers = new Metadata();
      headers.put(Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER),
          "Bearer " + text(command, "token"));
      settings.intercept(MetadataUtils.newAttachHeadersInterceptor(headers));
    }
    if (command.has("keepalive_ms")) {
      long silenceMs = command.get("keepalive_ms").getAsLong();
      settings.keepAliveTime(silenceMs, TimeUnit.MILLISECONDS)
          .keepAliveTimeout(silenceMs, TimeUnit.MILLISECONDS);
    }
  }

  private static TandemClient withOptions(TandemClient client, JsonObject command) {
    TandemClient made = client;
    if (command.has("retry")) {
      made = made.withRetry(text(command, "retry").equals("none") ? RetryPolicy.NO_RETRY : SOON);
    }
    if (command.has("deadline_ms")) {
      made = made.withDeadlineAfter(Duration.ofMillis(command.get("deadline_ms").getAsLong()));
    }
    return made;
  }

  private void onLeave(JsonObject command, Runnable leave) {
    String id = text(command, "id");
    leaving.put(id, leave);
    if (left.contains(id)) {
      leave.run();
    }
  }

  private void tell(JsonObject command, String event, long item) {
    if (command.has("tell") && command.get("tell").getAsBoolean()) {
      JsonObject line = new JsonObject();
      line.addProperty("id", text(command, "id"));
      line.addProperty("event", event.toLowerCase(Locale.ROOT));
      if (item >= 0) {
        line.addProperty("item", item);
      }
      say.accept(line);
    }
  }

  private void say(JsonObject command, String key, JsonObject what) {
    JsonObject line = new JsonObject();
    line.addProperty("id", text(command, "id"));
    line.add(key, what);
    say.accept(line);
  }

  private static <B extends Message.Builder> B request(JsonObject command, B builder)
      throws InvalidProtocolBufferException {
    return command.has("request") ? parsed(command.get("request"), builder) : builder;
  }

  private static <B extends Message.Builder> B parsed(JsonElement json, B builder)
      throws InvalidProtocolBufferException {
    JsonFormat.parser().merge(json.toString(), builder);
    return builder;
  }

  private static JsonArray array(JsonObject command, String key) {
    return command.has(key) ? command.getAsJsonArray(key) : new JsonArray();
  }

  private static String text(JsonObject command, String key) {
    return command.get(key).getAsString();
  }
}
