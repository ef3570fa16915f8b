// Results of commands, as the JSON that clients/conformance/README.md describes.
#pragma once

#include <google/protobuf/struct.pb.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "tandem/client.h"

namespace conformance {

using Json = google::protobuf::Value;
using Object = google::protobuf::Struct;

Json Text(const std::string& text);
Json Number(double number);
Json List();
Json Of(const Object& object);
Json Of(const tandem::Error& error);
Json OfMessage(const google::protobuf::Message& message);

// JSON of a message in one line, with the field names of the .proto files.
std::string Line(const google::protobuf::Message& message);
// Throws std::invalid_argument if the JSON is not that of such a message.
void Read(const std::string& json, google::protobuf::Message* message);

// Output of one request so far.
class Outcome {
 public:
  void Take(const tandem::Started& started);
  void Take(const tandem::Delta& delta);
  void Take(const tandem::Finished& finished);
  void Take(const tandem::Done& done);
  void Take(const tandem::CompleteResponse& response);
  void Take(const tandem::Error& error);
  Object Result() const;
  int deltas() const { return deltas_; }

 private:
  using TokenIds = google::protobuf::RepeatedField<int32_t>;

  Object& Choice(uint32_t number);
  void AddOutput(uint32_t choice, const std::string& text, const TokenIds& ids);
  template <class End>  // Finished or Completion
  void AddEnd(const End& end);

  std::map<uint32_t, Object> choices_;
  std::optional<uint32_t> output_tokens_;
  std::optional<Object> started_;
  std::optional<Json> error_;
  int deltas_ = 0;
};

// Hands an event of Generate or GenerateBatch to the outcome, and returns its name.
template <class Event>
std::string Take(const Event& event, Outcome* outcome) {
  if (event.has_started()) return outcome->Take(event.started()), "started";
  if (event.has_delta()) return outcome->Take(event.delta()), "delta";
  if (event.has_finished()) return outcome->Take(event.finished()), "finished";
  if (event.has_done()) return outcome->Take(event.done()), "done";
  if (event.has_prompt_logprobs()) return "prompt_logprobs";
  return event.has_progress() ? "progress" : "error";
}

}  // namespace conformance
