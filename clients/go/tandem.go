// Package tandem is a client of Tandem, which serves large language models over gRPC. It sends and
// returns the messages of package inferencev1; every error of a call is an [*Error].
package tandem

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "github.com/tandem-serve/tandem/clients/go/inference/v1"
)

// Client calls servers, for any number of goroutines. Its methods are those of the generated client
// but for Generate and Complete. The caller closes it.
type Client struct {
	pb.InferenceServiceClient
	conn  *grpc.ClientConn
	retry RetryPolicy
}

// New returns a client of servers, each given as HOST:PORT; it connects with its first call. Calls
// take turns among the servers that live. Options of gRPC win over its own: plain text, pings after
// 30 s of silence with 10 s for the answer, answers of up to 64 MiB.
func New(targets []string, retry RetryPolicy, options ...grpc.DialOption) (*Client, error) {
	if err := checkTargets(targets); err != nil {
		return nil, err
	}
	pings := keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}
	reconnect := grpc.ConnectParams{MinConnectTimeout: 5 * time.Second, Backoff: backoff.DefaultConfig}
	reconnect.Backoff.BaseDelay, reconnect.Backoff.MaxDelay = time.Second/10, 2*time.Second
	target, several := targets[0], manual.NewBuilderWithScheme("tandem")
	if len(targets) > 1 {
		target = "tandem:///" + target // gRPC asks by it whether the environment has a proxy
		endpoints := make([]resolver.Endpoint, len(targets))
		for i, one := range targets {
			endpoints[i].Addresses = []resolver.Address{{Addr: one, ServerName: one}}
		}
		several.InitialState(resolver.State{Endpoints: endpoints})
	}
	conn, err := grpc.NewClient(target, append([]grpc.DialOption{
		grpc.WithResolvers(several),
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig": [{"round_robin": {}}]}`),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithKeepaliveParams(pings),
		grpc.WithConnectParams(reconnect),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64 << 20)),
		grpc.WithChainUnaryInterceptor(retry.repeat),
		grpc.WithChainStreamInterceptor(openTyped),
	}, options...)...)
	if err != nil {
		return nil, err
	}
	return &Client{pb.NewInferenceServiceClient(conn), conn, retry}, nil
}

// Close closes all connections; calls that still run fail with codes.Canceled.
func (c *Client) Close() error { return c.conn.Close() }

// Token returns a bearer token, for grpc.WithPerRPCCredentials, and is asked before each call.
type Token func(context.Context) (string, error)

// GetRequestMetadata is what gRPC asks for before each call.
func (t Token) GetRequestMetadata(ctx context.Context, _ ...string) (map[string]string, error) {
	token, err := t(ctx)
	return map[string]string{"authorization": "Bearer " + token}, err
}

// RequireTransportSecurity returns false: servers may ask for tokens in plain text, too.
func (Token) RequireTransportSecurity() bool { return false }

// repeat repeats a unary call. For a Complete that broke off it waits as long as for a stream.
func (p RetryPolicy) repeat(
	ctx context.Context, method string, request, answer any, conn *grpc.ClientConn,
	invoke grpc.UnaryInvoker, options ...grpc.CallOption,
) error {
	complete, isComplete := request.(*pb.CompleteRequest)
	a := newAttempts(p, complete.GetRequest())
	if isComplete {
		request = &pb.CompleteRequest{Request: a.request}
	}
	for {
		var server peer.Peer // has no address where no server can have had the call
		all := append([]grpc.CallOption{grpc.Peer(&server)}, options...)
		err := invoke(ctx, method, request, answer, conn, all...)
		if err == nil {
			return nil
		}
		e := failureOf(ctx, conn, err)
		isLost := e.isConnection() && server.Addr != nil || e.ReasonName == "HANDED_OVER"
		isBroken := isComplete && !p.NoResume && (isLost || !a.brokenSince.IsZero())
		if err = a.next(ctx, e, isBroken); err != nil {
			return err
		}
	}
}

type typedStream struct {
	grpc.ClientStream
	typed func(error) error
}

func (s typedStream) RecvMsg(message any) error { return s.typed(s.ClientStream.RecvMsg(message)) }

func openTyped(
	ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string,
	open grpc.Streamer, options ...grpc.CallOption,
) (grpc.ClientStream, error) {
	typed := func(err error) error {
		if err == nil || err == io.EOF {
			return err
		}
		return failureOf(ctx, conn, err)
	}
	stream, err := open(ctx, desc, conn, method, options...)
	return typedStream{stream, typed}, typed(err)
}

// RetryPolicy says how calls recover where the server advises a later retry, and where the
// connection broke. A field that is zero has its default.
type RetryPolicy struct {
	MaxAttempts  int           // of a request that no server has accepted; default 5
	InitialDelay time.Duration // where no server advised one; doubles each time; default 0.2 s
	MaxDelay     time.Duration // longest wait before an attempt; default 10 s
	ResumeWithin time.Duration // for which a broken stream may find no server; default 120 s
	NoResume     bool          // a stream that breaks fails
}

// NoRetry is the policy of a single attempt.
var NoRetry = RetryPolicy{MaxAttempts: 1, NoResume: true}

// Generate streams the completions of one prompt: Started, any Progress and Deltas, a Finished for
// each choice, Done. Each loop over it sends the request, which it does not change. An error ends
// the loop. Where a server dies or gives the request up, the stream goes on at any server of the
// same model, and nothing is lost or comes twice. Leaving the loop cancels the request.
func (c *Client) Generate(
	ctx context.Context, request *pb.GenerateRequest,
) iter.Seq2[*pb.GenerateResponse, error] {
	return func(yield func(*pb.GenerateResponse, error) bool) {
		a := newAttempts(c.retry, request)
		for err := a.stream(ctx, c, yield); err != nil; err = a.stream(ctx, c, yield) {
			if err = a.next(ctx, failureOf(ctx, c.conn, err), a.started != nil); err != nil {
				yield(nil, err)
				return
			}
		}
	}
}

// Complete returns the whole output for one prompt, which begins anew where its server stops.
func (c *Client) Complete(
	ctx context.Context, request *pb.GenerateRequest, options ...grpc.CallOption,
) (*pb.CompleteResponse, error) {
	whole := &pb.CompleteRequest{Request: request}
	answer, err := c.InferenceServiceClient.Complete(ctx, whole, options...)
	if failure, isTyped := errors.AsType[*Error](err); isTyped {
		failure.Field = strings.TrimPrefix(failure.Field, "request.") // a field of request itself
	}
	return answer, err
}

// attempts is the state of one request across its attempts.
type attempts struct {
	policy           RetryPolicy
	request          *pb.GenerateRequest // of the next attempt
	endsAt           time.Time           // by the caller's time_limit_s; zero: never
	failures, inVain int                 // calls that failed and breaks, in a row without new output
	brokenSince      time.Time           // zero while a server has the request, and before
	started          *pb.Started         // the first; nil before
	held             *pb.Resume          // output that the caller has
	hasOutput        bool                // some of it came here
}

func newAttempts(policy RetryPolicy, request *pb.GenerateRequest) *attempts {
	a := &attempts{policy: policy, request: cmp.Or(proto.CloneOf(request), &pb.GenerateRequest{})}
	a.held = cmp.Or(a.request.Resume, &pb.Resume{})
	if request.GetAttemptKey() == "" && (policy.MaxAttempts != 1 || !policy.NoResume) {
		a.request.AttemptKey = new(fmt.Sprintf("%016x%016x", rand.Uint64(), rand.Uint64()))
	}
	if request.GetTimeLimitS() > 0 {
		a.endsAt = time.Now().Add(time.Duration(request.GetTimeLimitS() * float64(time.Second)))
	}
	return a
}

// stream makes one attempt. It returns nil after Done, and when the caller has left.
func (a *attempts) stream(
	ctx context.Context, c *Client, yield func(*pb.GenerateResponse, error) bool,
) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	responses, err := c.InferenceServiceClient.Generate(ctx, a.request)
	for err == nil {
		var response *pb.GenerateResponse
		if response, err = responses.Recv(); err == io.EOF {
			return found(codes.Internal, "INTERNAL", "the server ended the stream before Done")
		}
		isNews := response.GetEvent() != nil && (response.GetStarted() == nil || a.started == nil)
		err = cmp.Or(err, a.accept(response))
		isLeft := err == nil && isNews && !yield(response, nil)
		if response.GetDone() != nil {
			time.AfterFunc(time.Second, cancel) // sooner, the server would count a failed call
			_, _ = responses.Recv()
		}
		if isLeft || response.GetDone() != nil {
			return nil
		}
	}
	return err
}

// accept keeps what a resumption needs; it fails where a server does not go on as it should.
func (a *attempts) accept(response *pb.GenerateResponse) error {
	switch event := response.GetEvent().(type) {
	case *pb.GenerateResponse_Started:
		a.started = cmp.Or(a.started, proto.CloneOf(event.Started))
		var numHeld int
		for _, output := range a.held.Choices {
			numHeld += len(output.TokenIds)
		}
		if event.Started.ModelRevision != a.started.ModelRevision {
			return found(codes.FailedPrecondition, "MODEL_CHANGED", "another model is served now")
		} else if resumed := int(event.Started.ResumedTokens); resumed != numHeld {
			return found(codes.Internal, "INTERNAL", "it goes on after %d ids, not %d", resumed, numHeld)
		}
		a.brokenSince = time.Time{}
	case *pb.GenerateResponse_Delta:
		output, offset := a.output(event.Delta.Choice), int(event.Delta.FirstTokenOffset)
		if offset != len(output.TokenIds) && !a.request.GetResponse().GetOmitTokenIds() {
			return found(codes.Internal, "INTERNAL", "choice %d goes on at id %d", output.Choice, offset)
		}
		output.TokenIds = append(output.TokenIds, event.Delta.TokenIds...)
		a.failures, a.inVain = 0, 0
	case *pb.GenerateResponse_Finished:
		a.output(event.Finished.Choice).Finished = true
	}
	return nil
}

func (a *attempts) output(choice uint32) *pb.PriorOutput {
	a.hasOutput = true
	for _, output := range a.held.Choices {
		if output.Choice == choice {
			return output
		}
	}
	output := &pb.PriorOutput{Choice: choice}
	a.held.Choices = append(a.held.Choices, output)
	return output
}

// next waits for the next attempt and prepares its request, or returns the error that is final.
// isBroken: a server had the request and may have lost it.
func (a *attempts) next(ctx context.Context, err *Error, isBroken bool) error {
	a.failures++
	isPassing := err.RetryAfter != nil || err.isConnection()
	hasUnknownIDs := a.hasOutput && a.request.GetResponse().GetOmitTokenIds()
	isInTime := a.failures < cmp.Or(a.policy.MaxAttempts, 5)
	longest := cmp.Or(a.policy.MaxDelay, 10*time.Second)
	if isBroken {
		if a.brokenSince.IsZero() {
			a.brokenSince, a.inVain = time.Now(), a.inVain+1
		}
		isInTime = time.Since(a.brokenSince) <= cmp.Or(a.policy.ResumeWithin, 2*time.Minute)
		longest = min(longest, 2*time.Second)
	}
	isHopeless := isBroken && a.policy.NoResume || a.inVain > 16 // it may be what stops servers
	if !isPassing || hasUnknownIDs || !isInTime || isHopeless {
		return err
	}
	initial := cmp.Or(a.policy.InitialDelay, 200*time.Millisecond)
	delay := *cmp.Or(err.RetryAfter, new(initial<<min(a.failures-1, 16)))
	delay += time.Duration(rand.Float64() / 4 * float64(delay))
	select {
	case <-ctx.Done():
		code := status.FromContextError(ctx.Err()).Code()
		return fromStatus(status.Newf(code, "%v, after a failure: %s", ctx.Err(), err.Message))
	case <-time.After(min(delay, longest)):
	}
	if !a.endsAt.IsZero() {
		a.request.TimeLimitS = new(max(0.001, time.Until(a.endsAt).Seconds()))
	}
	if a.started != nil {
		a.request.RequestId, a.request.Resume = &a.started.RequestId, a.held
		a.request.Sampling, a.request.Stopping = a.started.Sampling, a.started.Stopping
	}
	return nil
}
