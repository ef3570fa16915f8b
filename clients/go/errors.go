package tandem

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/tandem-serve/tandem/clients/go/common/v1"
	pb "github.com/tandem-serve/tandem/clients/go/inference/v1"
)

// brokenStream matches what gRPC says of a stream that ended without a status of its server.
var brokenStream = regexp.MustCompile("RST_STREAM|Stream removed|unexpected EOF|without sending")

// Error is the failure of a call or of an item. errors.Is matches it with a [Reason], and by its
// code with context.Canceled and context.DeadlineExceeded.
type Error struct {
	Code       codes.Code
	Reason     commonv1.ErrorReason // UNSPECIFIED: none was told, or this client does not know it
	ReasonName string               // such as QUEUE_FULL, even if unknown; empty: none was told
	Message    string               // a sentence for people
	Field      string               // path of the wrong field of the request, or empty
	Metadata   map[string]string    // more facts, such as the limit that was reached
	RetryAfter *time.Duration       // wait that the server advised; nil: none
	RequestID  string               // name of the request in the server's log, or empty
	status     *status.Status
}

// Error returns the reason, or else the code, with the message.
func (e *Error) Error() string {
	return fmt.Sprintf("tandem: %s: %s", cmp.Or(e.ReasonName, e.Code.String()), e.Message)
}

// GRPCStatus returns the status with all its details, for status.FromError.
func (e *Error) GRPCStatus() *status.Status { return e.status }

// Is tells errors.Is whether target matches.
func (e *Error) Is(target error) bool {
	reason, isReason := target.(Reason)
	return isReason && e.Reason == commonv1.ErrorReason(reason) ||
		target == context.Canceled && e.Code == codes.Canceled ||
		target == context.DeadlineExceeded && e.Code == codes.DeadlineExceeded
}

// isConnection tells that no server typed the error: there is no connection, or it broke.
func (e *Error) isConnection() bool { return e.Code == codes.Unavailable && e.ReasonName == "" }

// Reason makes an ErrorReason a target of errors.Is.
type Reason commonv1.ErrorReason

// Error returns the name of the reason in the contract.
func (r Reason) Error() string { return commonv1.ErrorReason(r).String() }

// ItemError returns the [*Error] with which an event of GenerateBatch ends its item, or nil.
func ItemError(event *pb.BatchEvent) error {
	if event.GetError() == nil {
		return nil
	}
	message := &statuspb.Status{}
	if err := proto.Unmarshal(event.GetError(), message); err != nil {
		return found(codes.Internal, "INTERNAL", "the error of an item is unreadable: %v", err)
	}
	return fromStatus(status.FromProto(message))
}

func fromStatus(s *status.Status) *Error {
	e := &Error{Code: s.Code(), Message: s.Message(), status: s}
	for _, detail := range s.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.Domain == "tandem" { // a proxy may add one of its own
				e.Reason = commonv1.ErrorReason(commonv1.ErrorReason_value["ERROR_REASON_"+detail.Reason])
				e.ReasonName, e.Metadata = detail.Reason, detail.Metadata
			}
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				e.Field = cmp.Or(e.Field, violation.Field)
			}
		case *errdetails.RetryInfo:
			e.RetryAfter = new(detail.RetryDelay.AsDuration())
		case *errdetails.RequestInfo:
			e.RequestID = detail.RequestId
		}
	}
	return e
}

// found returns an error that this client found itself.
func found(code codes.Code, reason, format string, values ...any) *Error {
	info := &errdetails.ErrorInfo{Domain: "tandem", Reason: reason}
	s, _ := status.Newf(code, format, values...).WithDetails(info)
	return fromStatus(s)
}

// failureOf returns the error of a call. What no server sent, and neither ctx nor Close caused, is
// UNAVAILABLE: gRPC has several codes for a connection that broke.
func failureOf(ctx context.Context, conn *grpc.ClientConn, err error) *Error {
	e, isTyped := errors.AsType[*Error](err)
	if !isTyped {
		e = fromStatus(status.Convert(err))
	}
	code := e.Code
	if ctx.Err() != nil {
		code = status.FromContextError(ctx.Err()).Code()
	} else if conn.GetState() == connectivity.Shutdown {
		code = codes.Canceled
	} else if code == codes.Canceled || brokenStream.MatchString(e.Message) {
		code = codes.Unavailable
	}
	if e.ReasonName == "" && code != e.Code {
		e = fromStatus(status.New(code, e.Message))
	}
	return e
}
