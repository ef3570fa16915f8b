#include "tandem/client.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace tandem {
using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

bool HasAny(const std::string& text, std::initializer_list<const char*> parts) {
  const auto is_in = [&](const char* part) { return text.find(part) != std::string::npos; };
  return std::any_of(parts.begin(), parts.end(), is_in);
}

Error::Error(grpc::Status failed, bool is_by_caller)
    : std::runtime_error(failed.error_message()), status(std::move(failed)) {
  google::rpc::Status details;
  google::rpc::ErrorInfo info;
  google::rpc::BadRequest bad_request;
  google::rpc::RetryInfo retry;
  google::rpc::RequestInfo request;
  details.ParseFromString(status.error_details());
  for (const auto& detail : details.details()) {
    if (detail.UnpackTo(&info) && info.domain() == "tandem") {
      reason_name = info.reason();
      metadata = {info.metadata().begin(), info.metadata().end()};
      ErrorReason_Parse("ERROR_REASON_" + reason_name, &reason);
    }
    if (detail.UnpackTo(&retry))
      retry_after = std::chrono::seconds(retry.retry_delay().seconds()) +
                    std::chrono::nanoseconds(retry.retry_delay().nanos());
    if (detail.UnpackTo(&request)) request_id = request.request_id();
    detail.UnpackTo(&bad_request);
  }
  if (bad_request.field_violations_size() > 0) field = bad_request.field_violations(0).field();
  const bool is_broken =
      (code() == grpc::CANCELLED && !is_by_caller) ||
      HasAny(what(), {"RST_STREAM", "Stream removed", "without sending trailers"});
  if (!is_broken || !reason_name.empty()) return;
  status = {grpc::UNAVAILABLE, what(), status.error_details()};
}

// Makes an error that the client itself finds.
Error Found(ErrorReason reason, const char* what, grpc::StatusCode code = grpc::INTERNAL) {
  Error error({code, what});
  error.reason = reason;
  error.reason_name = ErrorReason_Name(reason).substr(sizeof("ERROR_REASON_") - 1);
  return error;
}

Error Error::OfItem(const BatchEvent& event) {
  google::rpc::Status found;
  found.ParseFromString(event.error());
  return Error({static_cast<grpc::StatusCode>(found.code()), found.message(), event.error()});
}

grpc::ChannelArguments DefaultArguments() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(64 << 20);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10000);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5000);  // that one attempt may take
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, 2000);  // a rollout moves names
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // each client has its flow control
  arguments.SetLoadBalancingPolicyName("round_robin");
  return arguments;
}

struct Connection {
  const ClientOptions options;
  const std::unique_ptr<Stub> stub;

  void AddToken(grpc::ClientContext* context) const {
    const std::string token = options.token ? options.token() : "";
    // gRPC ends the process over such characters, and a token from a file may have a line's end.
    if (std::any_of(token.begin(), token.end(), [](char one) { return one <= ' ' || one > '~'; }))
      throw Error({grpc::UNAUTHENTICATED, "the token is not printable ASCII without spaces"});
    if (!token.empty()) context->AddMetadata("authorization", "Bearer " + token);
  }

  // Gives a request that may be sent again a key, so that servers never run it twice at once.
  void SetKey(GenerateRequest* request) const {
    if (request->has_attempt_key() || options.retry.IsFinal()) return;
    auto& key = *request->mutable_attempt_key();
    for (std::random_device random; key.size() < 32;) key += "0123456789abcdef"[random() % 16];
  }
};

// A call as its caller sees it, over all its attempts; its end cancels the one that runs.
struct CallState {
  ~CallState() { context->TryCancel(); }

  // Makes the context of the next attempt, and returns the stub that makes the attempt.
  Stub& Begin() {
    context = std::make_shared<grpc::ClientContext>();
    context->set_deadline(options.deadline);
    connection->AddToken(context.get());
    const std::lock_guard lock(options.canceller->mutex_);
    if (options.canceller->is_cancelled_) throw Error({grpc::CANCELLED, "the caller left"});
    const bool is_late = std::chrono::system_clock::now() >= options.deadline;
    if (is_late) throw Error({grpc::DEADLINE_EXCEEDED, "no time is left for an attempt"});
    options.canceller->context_ = context;
    return *connection->stub;
  }

  // Counts a failure, and returns the wait before the next attempt; throws `error` if it is final.
  Seconds DelayAfter(const Error& error, bool is_accepted) {
    const auto& policy = connection->options.retry;
    bool is_final = !error.retry_after && !error.IsBroken();
    ++failures;
    if (is_accepted) {
      in_vain += broken_since ? 0 : 1;
      broken_since = broken_since.value_or(Clock::now());
      is_final |= Clock::now() - *broken_since >= policy.resume_within;
      is_final |= in_vain > 16;  // the request itself may be what stops its servers
    } else {
      is_final |= failures >= policy.max_attempts;
    }
    if (is_final) throw Error(error);
    thread_local std::minstd_rand random{std::random_device{}()};
    Seconds delay = policy.initial_delay * std::exp2(std::min(failures - 1, 16));
    if (error.retry_after) delay = *error.retry_after;
    delay *= std::uniform_real_distribution(1.0, 1.25)(random);
    return std::min({delay, Seconds(policy.max_delay), Seconds(is_accepted ? 2 : 1e9)});
  }

  // Waits, but not beyond the deadline; returns true at once if the caller left.
  bool Wait(Seconds delay) const {
    auto& canceller = *options.canceller;
    std::unique_lock lock(canceller.mutex_);
    delay = std::min<Seconds>(delay, options.deadline - std::chrono::system_clock::now());
    return canceller.cancelling_.wait_for(lock, delay, [&] { return canceller.is_cancelled_; });
  }
  bool IsCancelled() const { return Wait({}); }

  const std::shared_ptr<const Connection> connection;
  const CallOptions options;
  // The attempt that began last has this one.
  std::shared_ptr<grpc::ClientContext> context = std::make_shared<grpc::ClientContext>();
  int failures = 0;                                    // since output came
  int in_vain = 0;                                     // breaks since output came
  std::optional<Clock::time_point> broken_since = {};  // unset while a server has the request
};

// A Generate that goes on after what was received.
class ResumableStream : public Stream, CallState {
 public:
  ResumableStream(std::shared_ptr<const Connection> over, CallOptions with, GenerateRequest wanted)
      : CallState{std::move(over), std::move(with)}, request_(std::move(wanted)) {
    connection->SetKey(&request_);
    for (const auto& held : request_.resume().choices()) output_[held.choice()] = held;
  }

  void Cancel() override { options.canceller->Cancel(); }

  std::optional<GenerateResponse> Next() override try {
    for (GenerateResponse event; !has_ended_;) {
      if (!reader_) reader_ = Begin().Generate(context.get(), request_);
      if (!reader_->Read(&event))
        Recover(std::exchange(reader_, nullptr)->Finish());
      else if (Accept(event))
        return event;
    }
    return std::nullopt;
  } catch (const Error&) {
    has_ended_ = true;
    context->TryCancel();
    if (!IsCancelled()) throw;
    return std::nullopt;
  }

 private:
  // Keeps what a later attempt needs; returns true if the event is for the caller.
  bool Accept(const GenerateResponse& event) {
    has_ended_ = event.has_done();
    has_output_ |= event.has_delta() || event.has_finished();
    if (event.has_started()) return OnStarted(event.started());
    if (event.has_finished()) output_[event.finished().choice()].set_finished(true);
    if (event.has_delta()) {
      auto& ids = *output_[event.delta().choice()].mutable_token_ids();
      const bool fits = ids.size() == static_cast<int>(event.delta().first_token_offset());
      if (!fits && !request_.response().omit_token_ids())
        throw Found(ERROR_REASON_INTERNAL, "output goes on elsewhere than it stopped");
      ids.MergeFrom(event.delta().token_ids());
      failures = in_vain = 0;
    }
    return event.event_case() != GenerateResponse::EVENT_NOT_SET;  // else a newer server's
  }

  bool OnStarted(const Started& event) {
    broken_since.reset();
    const bool is_first = !started_;
    if (is_first) started_ = event;
    if (event.model_revision() != started_->model_revision())
      throw Found(ERROR_REASON_MODEL_CHANGED, "the stream broke, and another model is served now",
                  grpc::FAILED_PRECONDITION);
    uint32_t sent = 0;
    for (const auto& choice : request_.resume().choices()) sent += choice.token_ids_size();
    if (event.resumed_tokens() == sent) return is_first;
    throw Found(ERROR_REASON_INTERNAL, "the server resumes elsewhere than it was asked");
  }

  // Prepares the next attempt and waits until it may begin; throws Error if there is none.
  void Recover(const grpc::Status& status) {
    if (status.ok()) throw Found(ERROR_REASON_INTERNAL, "the stream ended before done");
    const Error error(status, IsCancelled());
    if (request_.response().omit_token_ids() && has_output_) throw Error(error);
    const auto delay = DelayAfter(error, started_.has_value());
    if (started_) {
      request_.set_request_id(started_->request_id());
      *request_.mutable_sampling() = started_->sampling();
      *request_.mutable_stopping() = started_->stopping();
      request_.mutable_resume()->Clear();
      for (const auto& [choice, held] : output_)
        (*request_.mutable_resume()->add_choices() = held).set_choice(choice);
    }
    if (request_.has_time_limit_s()) {
      const Seconds left = end_ - Clock::now().time_since_epoch() - delay;
      request_.set_time_limit_s(std::max(0.001, left.count()));
    }
    Wait(delay);
  }

  GenerateRequest request_;  // of the next attempt
  const Seconds end_ = Clock::now().time_since_epoch() + Seconds(request_.time_limit_s());
  std::optional<Started> started_;          // the first
  std::map<uint32_t, PriorOutput> output_;  // of each choice of which some came
  bool has_output_ = false;                 // some came here
  bool has_ended_ = false;
  std::unique_ptr<grpc::ClientReader<GenerateResponse>> reader_;  // null between attempts
};

Client::Client(ClientOptions options) {
  const bool is_near = HasAny(options.target, {"127.0.0.", "localhost:", "[::1]"});
  if (is_near) options.arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  auto stub = InferenceService::NewStub(
      grpc::CreateCustomChannel(options.target, options.credentials, options.arguments));
  connection_.reset(new Connection{std::move(options), std::move(stub)});
}

std::unique_ptr<Stream> Client::Generate(GenerateRequest request, const CallOptions& options) {
  return std::make_unique<ResumableStream>(connection_, options, std::move(request));
}

CompleteResponse Client::Complete(GenerateRequest request, const CallOptions& options) try {
  connection_->SetKey(&request);
  CompleteRequest whole;
  CompleteResponse response;
  whole.mutable_request()->Swap(&request);
  Repeat([&](Stub& stub, auto* context) { return stub.Complete(context, whole, &response); },
         options, true);
  return response;
} catch (Error& error) {
  const std::string outer = "request.";  // what leads to the caller's request
  if (error.field.rfind(outer, 0) == 0) error.field.erase(0, outer.size());
  throw;
}

std::unique_ptr<BatchStream> Client::GenerateBatch(grpc::ClientContext* context) {
  connection_->AddToken(context);
  return connection_->stub->GenerateBatch(context);
}

void Client::Repeat(const Attempt& attempt, const CallOptions& options, bool is_patient) {
  CallState call{connection_, options};
  for (bool broke_off = false;;) {
    auto& stub = call.Begin();
    const auto status = attempt(stub, call.context.get());
    if (status.ok()) return;
    const Error error(status, call.IsCancelled());
    const bool had_server =
        !HasAny(error.what(), {"failed to connect", "backends failing", "DNS resolution failed"});
    const bool is_break = error.IsBroken() || error.reason == ERROR_REASON_HANDED_OVER;
    broke_off |= is_patient && is_break && had_server;
    call.Wait(call.DelayAfter(error, broke_off));
  }
}
}  // namespace tandem
