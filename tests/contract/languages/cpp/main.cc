// This program uses the stubs as a client does; it is compiled and never run.
#include <grpcpp/grpcpp.h>

#include <iostream>

#include "tandem/common/v1/errors.pb.h"
#include "tandem/inference/v1/inference_service.grpc.pb.h"

int main() {
  namespace common = tandem::common::v1;
  namespace inference = tandem::inference::v1;
  auto channel = grpc::CreateChannel("127.0.0.1:50051", grpc::InsecureChannelCredentials());
  auto stub = inference::InferenceService::NewStub(channel);
  inference::GenerateRequest request;
  request.set_text("hello");
  request.mutable_sampling()->set_seed(7);
  grpc::ClientContext context;
  auto reader = stub->Generate(&context, request);
  inference::GenerateResponse response;
  while (reader->Read(&response)) {
    if (response.has_started()) {
      request.set_request_id(response.started().request_id());
      *request.mutable_sampling() = response.started().sampling();
      *request.mutable_stopping() = response.started().stopping();
    } else if (response.has_finished()) {
      std::cout << (response.finished().reason() == common::FINISH_REASON_EOS) << '\n';
    }
  }
  common::ErrorReason reason;
  std::cout << reader->Finish().error_code() << common::ErrorReason_Parse("ERROR_REASON_QUEUE_FULL", &reason) << '\n';
}
