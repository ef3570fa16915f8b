// Command load opens streams of one request, reads all of them, and prints one JSON object: what
// came, how fast, and what CPU time it cost this process. It measures from when every stream has its
// first token and a warm-up is over, as the benchmark `tandem bench stream` does.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	tandem "github.com/tandem-serve/tandem/clients/go"
	pb "github.com/tandem-serve/tandem/clients/go/inference/v1"
)

var (
	targets     = flag.String("targets", "127.0.0.1:50051", "servers as HOST:PORT, joined by commas")
	streams     = flag.Int("streams", 256, "streams, all at once")
	connections = flag.Int("connections", 8, "connections that the streams share")
	seconds     = flag.Float64("seconds", 5, "longest measurement")
	warmUp      = flag.Float64("warm-up", 0.5, "seconds between the last first token and the measurement")
	maxTokens   = flag.Uint("max-tokens", 50_000, "tokens of each stream")
	numPrompt   = flag.Int("prompt-tokens", 64, "random ids in the prompt")
	highestID   = flag.Int("highest-id", 4000, "ids of the prompt are 3 to this")
)

// counts are those of all streams since the start.
type counts struct {
	begun, finished, failed, tokens, deltas atomic.Int64
}

// moment is what was counted at one time.
type moment struct {
	at             time.Time
	tokens, deltas int64
	cpuS           float64
}

func main() {
	flag.Parse()
	clients := make([]*tandem.Client, *connections)
	for i := range clients {
		client, err := tandem.New(strings.Split(*targets, ","), tandem.NoRetry)
		if err != nil {
			log.Fatal(err)
		}
		clients[i] = client
	}
	var count counts
	var reading sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	for i := range *streams {
		reading.Go(func() { read(ctx, clients[i%len(clients)], request(i), &count) })
	}
	over := make(chan struct{})
	go func() { reading.Wait(); close(over) }()
	for count.begun.Load()+count.failed.Load() < int64(*streams) {
		time.Sleep(time.Millisecond)
	}
	wait(over, *warmUp)
	first := now(&count)
	wait(over, *seconds)
	last := now(&count)
	finished := count.finished.Load()
	cancel()
	<-over
	elapsed := last.at.Sub(first.at).Seconds()
	result := map[string]any{
		"streams": *streams, "finished": finished, "failed": count.failed.Load(),
		"tokens": last.tokens - first.tokens, "deltas": last.deltas - first.deltas,
		"seconds": elapsed, "cpu_s": last.cpuS - first.cpuS,
		"tokens_per_s": float64(last.tokens-first.tokens) / elapsed,
	}
	text, err := json.Marshal(result)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(string(text))
	if count.failed.Load() > 0 {
		os.Exit(1)
	}
}

// read reads a stream until it ends or ctx is cancelled.
func read(ctx context.Context, client *tandem.Client, request *pb.GenerateRequest, count *counts) {
	hasBegun := false
	for event, err := range client.Generate(ctx, request) {
		if err != nil {
			if ctx.Err() == nil {
				log.Print(err)
				count.failed.Add(1)
			}
			return
		}
		if delta := event.GetDelta(); delta != nil {
			count.tokens.Add(int64(len(delta.TokenIds)))
			count.deltas.Add(1)
			if !hasBegun {
				hasBegun = true
				count.begun.Add(1)
			}
		}
	}
	count.finished.Add(1)
}

func request(number int) *pb.GenerateRequest {
	random := rand.New(rand.NewPCG(0, uint64(number)))
	ids := make([]int32, *numPrompt)
	for i := range ids {
		ids[i] = 3 + random.Int32N(int32(*highestID)-2)
	}
	return &pb.GenerateRequest{
		Prompt:   &pb.GenerateRequest_TokenIds{TokenIds: &pb.TokenIds{Ids: ids}},
		Sampling: &pb.SamplingParams{Temperature: new(float32(1)), Seed: new(uint64(number))},
		Stopping: &pb.StoppingParams{MaxTokens: new(uint32(*maxTokens)), IgnoreEos: new(true)},
	}
}

// wait returns after so many seconds, or when all streams are over.
func wait(over <-chan struct{}, seconds float64) {
	select {
	case <-over:
	case <-time.After(time.Duration(seconds * float64(time.Second))):
	}
}

func now(count *counts) moment {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		log.Fatal(err)
	}
	cpu := time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
	return moment{time.Now(), count.tokens.Load(), count.deltas.Load(), cpu.Seconds()}
}
