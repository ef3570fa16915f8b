// Command conformance plays a caller of the Go client, as clients/conformance/README.md says: it
// carries out the commands on its standard input, all at the same time.
package main

import (
	"bufio"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	tandem "github.com/tandem-serve/tandem/clients/go"
	pb "github.com/tandem-serve/tandem/clients/go/inference/v1"
)

// command is one line of the input.
type command struct {
	ID                string            `json:"id"`
	Do                string            `json:"do"`
	Targets           []string          `json:"targets"`
	CA                string            `json:"ca"`
	Cert              string            `json:"cert"`
	Key               string            `json:"key"`
	ServerName        string            `json:"server_name"`
	Token             string            `json:"token"`
	Connection        string            `json:"connection"`
	Retry             string            `json:"retry"`
	KeepaliveMS       int               `json:"keepalive_ms"`
	Request           json.RawMessage   `json:"request"`
	Items             []json.RawMessage `json:"items"`
	CancelItems       []uint64          `json:"cancel_items"`
	DeadlineMS        int               `json:"deadline_ms"`
	CancelAfterDeltas int               `json:"cancel_after_deltas"`
	PauseMS           int               `json:"pause_ms"`
	Tell              bool              `json:"tell"`
	Command           string            `json:"command"`
}

// caller has what its commands share; the mutex guards both maps.
type caller struct {
	mutex       sync.Mutex
	printing    sync.Mutex
	connections map[string]*tandem.Client
	cancels     map[string]context.CancelFunc
}

func main() {
	c := &caller{
		connections: map[string]*tandem.Client{}, cancels: map[string]context.CancelFunc{},
	}
	input := bufio.NewReader(os.Stdin)
	var running sync.WaitGroup
	ending, end := context.WithCancel(context.Background())
	for {
		line, err := input.ReadBytes('\n')
		if err != nil {
			break
		}
		var one command
		if err := json.Unmarshal(line, &one); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(2)
		}
		if one.Do == "cancel" {
			c.leave(one)
			continue
		}
		ctx, cancel := context.WithCancel(ending)
		c.mutex.Lock()
		c.cancels[one.ID] = cancel
		c.mutex.Unlock()
		running.Go(func() {
			defer cancel()
			c.say(map[string]any{"id": one.ID, "result": c.carryOut(ctx, one)})
		})
	}
	end()
	running.Wait()
}

// say prints one line as a whole.
func (c *caller) say(line map[string]any) {
	text, err := json.Marshal(line)
	if err != nil {
		panic(err)
	}
	c.printing.Lock()
	defer c.printing.Unlock()
	fmt.Printf("%s\n", text)
}

func (c *caller) leave(one command) {
	c.mutex.Lock()
	cancel := c.cancels[one.Command]
	c.mutex.Unlock()
	if cancel != nil {
		cancel()
	}
	c.say(map[string]any{"id": one.ID, "result": result{}})
}

// carryOut returns the result of a command; one that was left has no error.
func (c *caller) carryOut(left context.Context, one command) result {
	client, err := c.connect(one)
	if err != nil {
		return result{"error": map[string]any{"message": err.Error()}}
	}
	if one.Connection == "" {
		defer client.Close()
	}
	ctx := left
	if one.DeadlineMS > 0 {
		deadline, cancel := context.WithTimeout(left, time.Duration(one.DeadlineMS)*time.Millisecond)
		defer cancel()
		ctx = deadline
	}
	found, err := c.perform(ctx, client, one)
	if err != nil && left.Err() == nil {
		found["error"] = describe(err)
	}
	return found
}

func (c *caller) perform(ctx context.Context, client *tandem.Client, one command) (result, error) {
	switch one.Do {
	case "generate":
		return c.generate(ctx, client, one)
	case "batch":
		return c.batch(ctx, client, one)
	case "complete":
		outcome := newOutcome()
		answer, err := client.Complete(ctx, read[pb.GenerateRequest](one.Request))
		if err == nil {
			outcome.takeWhole(answer)
		}
		return outcome.result(), err
	case "abort":
		_, err := client.Abort(ctx, read[pb.AbortRequest](one.Request))
		return result{}, err
	case "tokenize":
		answer, err := client.Tokenize(ctx, read[pb.TokenizeRequest](one.Request))
		return result{"token_ids": append([]int32{}, answer.GetTokenIds()...)}, err
	case "model":
		answer, err := client.GetModel(ctx, read[pb.GetModelRequest](one.Request))
		if err != nil {
			return result{}, err
		}
		text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(answer.Model)
		return result{"model": json.RawMessage(text)}, err
	}
	return result{}, fmt.Errorf("no such command: %s", one.Do)
}

func (c *caller) generate(ctx context.Context, client *tandem.Client, one command) (result, error) {
	outcome := newOutcome()
	for event, err := range client.Generate(ctx, read[pb.GenerateRequest](one.Request)) {
		if err != nil {
			return outcome.result(), err
		}
		kind := outcome.take(event)
		if one.Tell {
			c.say(map[string]any{"id": one.ID, "event": kind})
		}
		if kind != "delta" {
			continue
		}
		if outcome.numDeltas == one.CancelAfterDeltas {
			break
		}
		if outcome.numDeltas == 1 {
			time.Sleep(time.Duration(one.PauseMS) * time.Millisecond)
		}
	}
	return outcome.result(), nil
}

// batch sends all items on one stream; an error that it returns is that of the whole stream.
func (c *caller) batch(ctx context.Context, client *tandem.Client, one command) (result, error) {
	outcomes := make([]*outcome, len(one.Items))
	errors := make([]error, len(one.Items))
	tell := func() result {
		items := make([]result, len(outcomes))
		for i, outcome := range outcomes {
			if items[i] = outcome.result(); errors[i] != nil {
				items[i]["error"] = describe(errors[i])
			}
		}
		return result{"items": items}
	}
	for i := range outcomes {
		outcomes[i] = newOutcome()
	}
	stream, err := client.GenerateBatch(ctx)
	if err != nil {
		return tell(), err
	}
	toCancel := map[uint64]bool{}
	for _, item := range one.CancelItems {
		toCancel[item] = true
	}
	for i, item := range one.Items {
		add := &pb.BatchItem{Item: uint64(i), Request: read[pb.GenerateRequest](item)}
		// Where this fails the stream has ended, and what is received says why.
		_ = stream.Send(&pb.GenerateBatchRequest{Add: []*pb.BatchItem{add}})
	}
	for numLeft := len(one.Items); numLeft > 0; {
		response, err := stream.Recv()
		if err != nil {
			return tell(), err
		}
		for _, event := range response.Events {
			outcome, failure := outcomes[event.Item], tandem.ItemError(event)
			kind := outcome.takeItem(event)
			if one.Tell && failure == nil {
				c.say(map[string]any{"id": one.ID, "item": event.Item, "event": kind})
			}
			if kind == "delta" && toCancel[event.Item] {
				delete(toCancel, event.Item)
				_ = stream.Send(&pb.GenerateBatchRequest{Cancel: []uint64{event.Item}})
			}
			if failure != nil || kind == "done" {
				errors[event.Item] = failure
				numLeft--
			}
		}
	}
	_ = stream.CloseSend()
	return tell(), nil
}

// connect returns the connection that a command names, or one of its own.
func (c *caller) connect(one command) (*tandem.Client, error) {
	var retry tandem.RetryPolicy
	switch one.Retry {
	case "none":
		retry = tandem.NoRetry
	case "soon":
		retry = tandem.RetryPolicy{
			MaxAttempts: 9, InitialDelay: time.Millisecond, MaxDelay: time.Millisecond,
		}
	}
	options, err := dialOptions(one)
	if err != nil {
		return nil, err
	}
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if client := c.connections[one.Connection]; client != nil {
		return client, nil
	}
	client, err := tandem.New(one.Targets, retry, options...)
	if err == nil && one.Connection != "" {
		c.connections[one.Connection] = client
	}
	return client, err
}

func dialOptions(one command) ([]grpc.DialOption, error) {
	var options []grpc.DialOption
	if one.KeepaliveMS > 0 {
		silence := time.Duration(one.KeepaliveMS) * time.Millisecond
		pings := keepalive.ClientParameters{Time: silence, Timeout: silence}
		options = append(options, grpc.WithKeepaliveParams(pings))
	}
	if one.Token != "" {
		token := tandem.Token(func(context.Context) (string, error) { return one.Token, nil })
		options = append(options, grpc.WithPerRPCCredentials(token))
	}
	if cmp.Or(one.CA, one.Cert, one.ServerName) != "" {
		config := &tls.Config{ServerName: one.ServerName}
		if one.CA != "" {
			pem, err := os.ReadFile(one.CA)
			if err != nil {
				return nil, err
			}
			config.RootCAs = x509.NewCertPool()
			config.RootCAs.AppendCertsFromPEM(pem)
		}
		if one.Cert != "" {
			pair, err := tls.LoadX509KeyPair(one.Cert, one.Key)
			if err != nil {
				return nil, err
			}
			config.Certificates = []tls.Certificate{pair}
		}
		encrypted := grpc.WithTransportCredentials(credentials.NewTLS(config))
		options = append(options, encrypted)
	}
	return options, nil
}

// read reads a message in the JSON form of protobuf.
func read[M any, P interface {
	*M
	proto.Message
}](text json.RawMessage) P {
	message := P(new(M))
	if len(text) > 0 {
		if err := protojson.Unmarshal(text, message); err != nil {
			panic(err)
		}
	}
	return message
}
