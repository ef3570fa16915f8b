// A program that uses the stubs as a client does; it is compiled and never run.
import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { ErrorReason } from "./tandem/common/v1/errors_pb.js";
import { FinishReason } from "./tandem/common/v1/finish_reason_pb.js";
import { GenerateRequestSchema, InferenceService } from "./tandem/inference/v1/inference_service_pb.js";

const client = createClient(InferenceService, createGrpcTransport({ baseUrl: "http://127.0.0.1:50051" }));
const fields: MessageInitShape<typeof GenerateRequestSchema> = {
  prompt: { case: "text", value: "hello" },
  sampling: { seed: 7n },
};
const request = create(GenerateRequestSchema, fields);
try {
  for await (const response of client.generate(request)) {
    if (response.event.case === "started") {
      const started = response.event.value;
      request.requestId = started.requestId;
      request.sampling = started.sampling;
      request.stopping = started.stopping;
    } else if (response.event.case === "finished") {
      console.log(response.event.value.reason === FinishReason.EOS);
    }
  }
} catch (error) {
  console.log(ConnectError.from(error).code, ErrorReason.QUEUE_FULL);
}
