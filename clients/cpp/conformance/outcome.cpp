#include "outcome.h"

#include <google/protobuf/util/json_util.h>

#include <array>
#include <stdexcept>

namespace conformance {
namespace {

namespace util = google::protobuf::util;

constexpr std::array kCodes{
    "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};
constexpr size_t kFinishPrefixLength = sizeof("FINISH_REASON_") - 1;

Json Null() {
  Json null;
  null.set_null_value(google::protobuf::NULL_VALUE);
  return null;
}

Json TextOrNull(const std::string& text) { return text.empty() ? Null() : Text(text); }

}  // namespace

Json Text(const std::string& text) {
  Json value;
  value.set_string_value(text);
  return value;
}

Json Number(double number) {
  Json value;
  value.set_number_value(number);
  return value;
}

Json List() {
  Json value;
  value.mutable_list_value();
  return value;
}

Json Of(const Object& object) {
  Json value;
  *value.mutable_struct_value() = object;
  return value;
}

Json OfMessage(const google::protobuf::Message& message) {
  Json value;
  Read(Line(message), &value);
  return value;
}

Json Of(const tandem::Error& error) {
  Object told;
  auto& fields = *told.mutable_fields();
  Object metadata;
  for (const auto& [name, fact] : error.metadata) (*metadata.mutable_fields())[name] = Text(fact);
  fields["code"] = Text(kCodes.at(error.code()));
  fields["reason"] = TextOrNull(error.reason_name);
  fields["known"].set_bool_value(error.reason != tandem::ERROR_REASON_UNSPECIFIED);
  fields["message"] = Text(error.what());
  fields["field"] = TextOrNull(error.field);
  fields["metadata"] = Of(metadata);
  fields["retry_after_ms"] = Null();
  if (error.retry_after) {
    const std::chrono::duration<double, std::milli> wait = *error.retry_after;
    fields["retry_after_ms"] = Number(wait.count());
  }
  fields["request_id"] = TextOrNull(error.request_id);
  return Of(told);
}

std::string Line(const google::protobuf::Message& message) {
  util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  std::string json;
  if (!util::MessageToJsonString(message, &json, options).ok()) {
    throw std::invalid_argument("a message has no JSON form");
  }
  return json;
}

void Read(const std::string& json, google::protobuf::Message* message) {
  if (!util::JsonStringToMessage(json, message).ok()) throw std::invalid_argument(json);
}

Object& Outcome::Choice(uint32_t number) {
  const auto [found, is_new] = choices_.try_emplace(number);
  auto& fields = *found->second.mutable_fields();
  if (is_new) {
    fields["choice"] = Number(number);
    fields["token_ids"] = List();
    fields["text"] = Text("");
    fields["reason"] = Null();
  }
  return found->second;
}

void Outcome::AddOutput(uint32_t choice, const std::string& text, const TokenIds& ids) {
  auto& fields = *Choice(choice).mutable_fields();
  fields["text"].mutable_string_value()->append(text);
  for (const auto id : ids) *fields["token_ids"].mutable_list_value()->add_values() = Number(id);
}

template <class End>
void Outcome::AddEnd(const End& end) {
  auto& fields = *Choice(end.choice()).mutable_fields();
  const std::string name = tandem::FinishReason_Name(end.reason());
  fields["reason"] = Text(name.empty() ? "UNSPECIFIED" : name.substr(kFinishPrefixLength));
  if (end.matched_case() == End::kStopString) fields["stop_string"] = Text(end.stop_string());
  if (end.matched_case() == End::kTokenId) fields["token_id"] = Number(end.token_id());
}

void Outcome::Take(const tandem::Started& started) {
  auto& fields = *started_.emplace().mutable_fields();
  fields["request_id"] = Text(started.request_id());
  fields["prompt_tokens"] = Number(started.prompt_tokens());
  fields["model_revision"] = Text(started.model_revision());
  fields["seed"] = Text(std::to_string(started.sampling().seed()));
}

void Outcome::Take(const tandem::Delta& delta) {
  AddOutput(delta.choice(), delta.text(), delta.token_ids());
  ++deltas_;
}

void Outcome::Take(const tandem::Finished& finished) { AddEnd(finished); }

void Outcome::Take(const tandem::Done& done) { output_tokens_ = done.usage().output_tokens(); }

void Outcome::Take(const tandem::CompleteResponse& response) {
  Take(response.started());
  for (const auto& one : response.completions()) {
    AddOutput(one.choice(), one.text(), one.token_ids());
    AddEnd(one);
  }
  Take(response.done());
}

void Outcome::Take(const tandem::Error& error) { error_ = Of(error); }

Object Outcome::Result() const {
  Object result;
  auto& fields = *result.mutable_fields();
  fields["choices"] = List();
  for (const auto& [number, choice] : choices_) {
    *fields["choices"].mutable_list_value()->add_values() = Of(choice);
  }
  if (output_tokens_) fields["output_tokens"] = Number(*output_tokens_);
  if (started_) fields["started"] = Of(*started_);
  if (error_) fields["error"] = *error_;
  return result;
}

}  // namespace conformance
