#pragma once

#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>

#include "tandem/common/v1/errors.pb.h"
#include "tandem/inference/v1/inference_service.grpc.pb.h"

/// Client of Tandem, with the messages of its contract. Calls block their thread and throw Error.
namespace tandem {
using namespace common::v1;
using namespace inference::v1;
using Stub = InferenceService::Stub;
using std::chrono::milliseconds;

/// Failure of a call. Match `reason`, or code() where there is none; what() is for people.
struct Error : std::runtime_error {
  /// Reads a status that is not OK. CANCELLED that is not by the caller is a broken connection.
  explicit Error(grpc::Status failed, bool is_by_caller = true);
  static Error OfItem(const BatchEvent& event);  ///< Reads event.error(), which must be set.
  grpc::StatusCode code() const { return status.error_code(); }
  /// True if no server told why: the connection broke, or could not be made.
  bool IsBroken() const { return code() == grpc::UNAVAILABLE && reason_name.empty(); }

  grpc::Status status;
  ErrorReason reason{};     ///< ERROR_REASON_UNSPECIFIED: none, or of a newer server.
  std::string reason_name;  ///< As it was told, without prefix; empty: none.
  std::string field;        ///< Path of the wrong field; empty: none.
  std::map<std::string, std::string> metadata;          ///< More facts, such as "limit".
  std::optional<std::chrono::nanoseconds> retry_after;  ///< Wait that the server advises.
  std::string request_id;                               ///< For the server's log; empty: none.
};

/// How failed calls are repeated, and broken streams resumed.
struct RetryPolicy {
  int max_attempts = 5;             ///< Until a server accepts the call; 1: it is never repeated.
  milliseconds initial_delay{200};  ///< It doubles with each failure in a row.
  milliseconds max_delay{10000};    ///< Longest wait, whatever a server advises.
  milliseconds resume_within{120000};  ///< Of a broken stream, from each break; 0: never.
  bool IsFinal() const { return max_attempts <= 1 && resume_within.count() == 0; }
};
inline const RetryPolicy kNoRetry{1, {}, {}, {}};  ///< Every failure is told at once.

/// Keep-alive pings after 30 s (10 s for the answer), messages up to 64 MiB, reconnects within 2 s.
grpc::ChannelArguments DefaultArguments();

/// Servers of a Client, and how it connects.
struct ClientOptions {
  /// HOST:PORT, or `ipv4:` (`ipv6:`) and several with commas between, by IP numbers. Calls take
  /// turns among the addresses that live, also among those of a name.
  std::string target;
  /// For TLS grpc::SslCredentials({CA, KEY, CERTIFICATE}), the contents of PEM files.
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  std::function<std::string()> token;  ///< Asked for the bearer token before each attempt.
  grpc::ChannelArguments arguments = DefaultArguments();  ///< What is set later wins.
  RetryPolicy retry;
};

/// Ends one call from another thread, whatever it does, even if it has not begun.
class Canceller {
 public:
  void Cancel() {
    const std::lock_guard lock(mutex_);
    is_cancelled_ = true;
    cancelling_.notify_all();
    if (const auto context = context_.lock()) context->TryCancel();
  }

 private:
  friend struct CallState;
  std::mutex mutex_;
  std::condition_variable cancelling_;
  bool is_cancelled_ = false;
  std::weak_ptr<grpc::ClientContext> context_;
};

/// Options of one call; its deadline is that of the whole, over all attempts.
struct CallOptions {
  std::chrono::system_clock::time_point deadline = std::chrono::system_clock::time_point::max();
  std::shared_ptr<Canceller> canceller = std::make_shared<Canceller>();  ///< Of this call alone.
};

/// Events of one Generate, read by one thread. The request is cancelled when this is destroyed.
struct Stream {
  virtual ~Stream() = default;
  /// Returns the next event, or nothing after `done` or Cancel(). What is not read holds the server
  /// back. Throws Error if the request cannot go on.
  virtual std::optional<GenerateResponse> Next() = 0;
  virtual void Cancel() = 0;  ///< Ends the request, whatever it does; thread-safe.
};
using BatchStream = grpc::ClientReaderWriter<GenerateBatchRequest, GenerateBatchResponse>;

/// Connections to servers, made when they are needed. Thread-safe; streams may outlive it.
class Client {
 public:
  explicit Client(ClientOptions options);
  std::unique_ptr<Stream> Generate(GenerateRequest request, const CallOptions& options = {});
  CompleteResponse Complete(GenerateRequest request, const CallOptions& options = {});
  /// Returns gRPC's own stream, since many requests on one are neither repeated nor resumed. The
  /// context must outlive it; Error(stream->Finish()) and Error::OfItem(event) tell of failures.
  std::unique_ptr<BatchStream> GenerateBatch(grpc::ClientContext* context);
  /// Makes a call with one answer, as Call(&Stub::Tokenize, request): also of Detokenize, GetModel,
  /// ListModels and Abort.
  template <class Request, class Response>
  Response Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                const Request& request, const CallOptions& options = {}) {
    Response response;
    Repeat([&](Stub& stub, auto* context) { return (stub.*method)(context, request, &response); },
           options, false);
    return response;
  }

 private:
  using Attempt = std::function<grpc::Status(Stub& stub, grpc::ClientContext* context)>;
  // Patient: a call that broke off is repeated as a stream is resumed.
  void Repeat(const Attempt& attempt, const CallOptions& options, bool is_patient);
  std::shared_ptr<const struct Connection> connection_;
};
}  // namespace tandem
