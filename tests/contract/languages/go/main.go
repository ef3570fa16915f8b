// A program that uses the stubs as a client does; it is compiled and never run.
package main

import (
	"context"
	"fmt"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/tandem-serve/tandem/clients/go/common/v1"
	inferencev1 "github.com/tandem-serve/tandem/clients/go/inference/v1"
)

// reason returns the reason of a failed call, and whether this contract knows it.
func reason(err error) (string, bool) {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			_, known := commonv1.ErrorReason_value["ERROR_REASON_"+info.Reason]
			return info.Reason, known
		}
	}
	return "", false
}

func main() {
	connection, err := grpc.NewClient("127.0.0.1:50051", grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		panic(err)
	}
	request := &inferencev1.GenerateRequest{
		Prompt:   &inferencev1.GenerateRequest_Text{Text: "hello"},
		Sampling: &inferencev1.SamplingParams{Seed: proto.Uint64(7)},
	}
	stream, err := inferencev1.NewInferenceServiceClient(connection).Generate(context.Background(), request)
	for err == nil {
		var response *inferencev1.GenerateResponse
		if response, err = stream.Recv(); err != nil {
			break
		}
		switch event := response.Event.(type) {
		case *inferencev1.GenerateResponse_Started:
			request.RequestId = proto.String(event.Started.RequestId)
			request.Sampling = event.Started.Sampling
			request.Stopping = event.Started.Stopping
		case *inferencev1.GenerateResponse_Finished:
			fmt.Println(event.Finished.Reason == commonv1.FinishReason_FINISH_REASON_EOS)
		}
	}
	fmt.Println(reason(err))
}
