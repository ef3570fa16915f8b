// Plays a caller of the C++ client, as clients/conformance/README.md says: each line of the input
// is a command, which a thread of its own carries out.
#include <atomic>
#include <fstream>
#include <iostream>
#include <thread>

#include "outcome.h"

namespace conformance {
namespace {

using std::chrono::milliseconds;

// A command, and what a caller needs to leave it.
struct Command {
  explicit Command(const std::string& line) { Read(line, &json); }

  bool Has(const std::string& key) const { return json.fields().count(key) > 0; }
  const Json& operator[](const std::string& key) const {
    static const Json null;
    return Has(key) ? json.fields().at(key) : null;
  }
  std::string Text(const std::string& key) const { return (*this)[key].string_value(); }
  milliseconds Time(const std::string& key) const {
    return milliseconds(static_cast<int64_t>((*this)[key].number_value()));
  }
  template <class Message>
  Message Request() const {
    Message message;
    if (Has("request")) Read(Line((*this)["request"]), &message);
    return message;
  }
  tandem::CallOptions Options() const {
    tandem::CallOptions options;
    if (Has("deadline_ms")) {
      options.deadline = std::chrono::system_clock::now() + Time("deadline_ms");
    }
    options.canceller = canceller;
    return options;
  }
  void Leave() {
    has_left = true;
    canceller->Cancel();
    batch_context.TryCancel();
  }

  Object json;
  std::shared_ptr<tandem::Canceller> canceller = std::make_shared<tandem::Canceller>();
  mutable grpc::ClientContext batch_context;
  std::atomic<bool> has_left{false};
};

std::string Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

tandem::ClientOptions OptionsOf(const Command& command) {
  tandem::ClientOptions options;
  const auto& targets = command["targets"].list_value().values();
  if (targets.size() > 1) options.target = "ipv4:";
  for (const auto& target : targets) {
    if (&target != &targets[0]) options.target += ",";
    options.target += target.string_value();
  }
  if (command.Has("ca")) {
    options.credentials =
        grpc::SslCredentials({Contents(command.Text("ca")), Contents(command.Text("key")),
                              Contents(command.Text("cert"))});
  }
  if (command.Has("server_name")) {
    options.arguments.SetSslTargetNameOverride(command.Text("server_name"));
  }
  if (command.Has("token")) options.token = [token = command.Text("token")] { return token; };
  if (command.Has("keepalive_ms")) {
    const auto limit = static_cast<int>(command.Time("keepalive_ms").count());
    options.arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, limit);
    options.arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, limit);
  }
  if (command.Text("retry") == "none") options.retry = tandem::kNoRetry;
  if (command.Text("retry") == "soon") {
    options.retry.max_attempts = 9;
    options.retry.initial_delay = options.retry.max_delay = milliseconds(1);
  }
  return options;
}

class Caller {
 public:
  void Begin(const std::string& line) {
    auto command = std::make_shared<Command>(line);
    if (command->Text("do") == "cancel") {
      const auto found = commands_.find(command->Text("command"));
      if (found != commands_.end()) found->second->Leave();
      Say(*command, "result", Of(Object()));
      return;
    }
    commands_[command->Text("id")] = command;
    threads_.emplace_back([this, command] { CarryOut(*command); });
  }

  void Close() {
    for (auto& [id, command] : commands_) command->Leave();
    for (auto& thread : threads_) thread.join();
  }

 private:
  void Say(const Command& command, const std::string& key, const Json& value,
           const std::optional<uint64_t> item = {}) {
    Object line;
    (*line.mutable_fields())["id"] = command["id"];
    (*line.mutable_fields())[key] = value;
    if (item) (*line.mutable_fields())["item"] = Number(static_cast<double>(*item));
    const std::lock_guard lock(printing_);
    std::cout << Line(line) << std::endl;
  }

  void CarryOut(const Command& command) {
    Object result;
    try {
      auto client = Connect(command);
      result = Result(client.get(), command);
    } catch (const tandem::Error& error) {
      if (!command.has_left) (*result.mutable_fields())["error"] = Of(error);
    }
    Say(command, "result", Of(result));
  }

  std::shared_ptr<tandem::Client> Connect(const Command& command) {
    if (!command.Has("connection")) return std::make_shared<tandem::Client>(OptionsOf(command));
    const std::lock_guard lock(connecting_);
    auto& shared = shared_[command.Text("connection")];
    if (!shared) shared = std::make_shared<tandem::Client>(OptionsOf(command));
    return shared;
  }

  Object Result(tandem::Client* client, const Command& command) {
    const std::string what = command.Text("do");
    const auto options = command.Options();
    Object result;
    auto& fields = *result.mutable_fields();
    if (what == "generate") return Generate(client, command);
    if (what == "batch") return Batch(client, command);
    if (what == "complete") return Complete(client, command);
    if (what == "abort") {
      client->Call(&tandem::Stub::Abort, command.Request<tandem::AbortRequest>(), options);
    }
    if (what == "model") {
      const auto request = command.Request<tandem::GetModelRequest>();
      fields["model"] = OfMessage(client->Call(&tandem::Stub::GetModel, request, options).model());
    }
    if (what == "tokenize") {
      const auto request = command.Request<tandem::TokenizeRequest>();
      const auto response = client->Call(&tandem::Stub::Tokenize, request, options);
      fields["token_ids"] = List();
      for (const auto id : response.token_ids()) {
        *fields["token_ids"].mutable_list_value()->add_values() = Number(id);
      }
    }
    return result;
  }

  Object Generate(tandem::Client* client, const Command& command) {
    Outcome outcome;
    auto stream = client->Generate(command.Request<tandem::GenerateRequest>(), command.Options());
    const double most_deltas = command["cancel_after_deltas"].number_value();
    try {
      while (const auto event = stream->Next()) {
        const auto name = Take(*event, &outcome);
        if (command["tell"].bool_value()) Say(command, "event", Text(name));
        if (most_deltas > 0 && outcome.deltas() >= most_deltas) break;
        if (event->has_delta() && outcome.deltas() == 1) {
          std::this_thread::sleep_for(command.Time("pause_ms"));
        }
      }
    } catch (const tandem::Error& error) { outcome.Take(error); }
    return outcome.Result();
  }

  static Object Complete(tandem::Client* client, const Command& command) {
    Outcome outcome;
    const auto request = command.Request<tandem::GenerateRequest>();
    try {
      outcome.Take(client->Complete(request, command.Options()));
    } catch (const tandem::Error& error) {
      if (!command.has_left) outcome.Take(error);
    }
    return outcome.Result();
  }

  Object Batch(tandem::Client* client, const Command& command) {
    command.batch_context.set_deadline(command.Options().deadline);
    const auto batch = client->GenerateBatch(&command.batch_context);
    tandem::GenerateBatchRequest adding;
    for (const auto& item : command["items"].list_value().values()) {
      Read(Line(item), adding.add_add()->mutable_request());
      adding.mutable_add()->rbegin()->set_item(adding.add_size() - 1);
    }
    std::vector<Outcome> outcomes(adding.add_size());
    std::set<uint64_t> open;
    for (const auto& item : adding.add()) open.insert(item.item());
    batch->Write(adding);
    for (tandem::GenerateBatchResponse response; batch->Read(&response);) {
      for (const auto& event : response.events()) {
        TakeOfItem(command, event, batch.get(), &outcomes.at(event.item()));
        if (event.has_done() || event.has_error()) open.erase(event.item());
        if (open.empty()) batch->WritesDone();
      }
    }
    const tandem::Error error(batch->Finish(), command.has_left);
    for (const auto item : open) {
      if (!command.has_left) outcomes.at(item).Take(error);
    }
    Object result;
    auto& items = (*result.mutable_fields())["items"] = List();
    for (const auto& one : outcomes) *items.mutable_list_value()->add_values() = Of(one.Result());
    return result;
  }

  void TakeOfItem(const Command& command, const tandem::BatchEvent& event,
                  tandem::BatchStream* batch, Outcome* outcome) {
    const auto name = Take(event, outcome);
    if (event.has_error()) {
      outcome->Take(tandem::Error::OfItem(event));
    } else if (command["tell"].bool_value()) {
      Say(command, "event", Text(name), event.item());
    }
    if (!event.has_delta() || outcome->deltas() != 1) return;
    for (const auto& item : command["cancel_items"].list_value().values()) {
      if (item.number_value() != static_cast<double>(event.item())) continue;
      tandem::GenerateBatchRequest ending;
      ending.add_cancel(event.item());
      batch->Write(ending);
    }
  }

  std::map<std::string, std::shared_ptr<Command>> commands_;
  std::vector<std::thread> threads_;
  std::mutex printing_;
  std::mutex connecting_;
  std::map<std::string, std::shared_ptr<tandem::Client>> shared_;
};

}  // namespace
}  // namespace conformance

int main() {
  conformance::Caller caller;
  for (std::string line; std::getline(std::cin, line);) caller.Begin(line);
  caller.Close();
}
