package main

import (
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/code"

	tandem "github.com/tandem-serve/tandem/clients/go"
	commonv1 "github.com/tandem-serve/tandem/clients/go/common/v1"
	pb "github.com/tandem-serve/tandem/clients/go/inference/v1"
)

// result is what a line of the output says about a command.
type result map[string]any

// choice is the output of one choice so far.
type choice struct {
	Choice     uint32  `json:"choice"`
	TokenIDs   []int32 `json:"token_ids"`
	Text       string  `json:"text"`
	Reason     *string `json:"reason"`
	StopString *string `json:"stop_string,omitempty"`
	TokenID    *int32  `json:"token_id,omitempty"`
}

// outcome is the output of one request so far.
type outcome struct {
	choices   map[uint32]*choice
	started   *pb.Started
	done      *pb.Done
	numDeltas int
}

func newOutcome() *outcome { return &outcome{choices: map[uint32]*choice{}} }

// take adds an event and returns the name of its kind.
func (o *outcome) take(event *pb.GenerateResponse) string {
	switch event := event.Event.(type) {
	case *pb.GenerateResponse_Started:
		o.started = event.Started
		return "started"
	case *pb.GenerateResponse_Progress:
		return "progress"
	case *pb.GenerateResponse_PromptLogprobs:
		return "prompt_logprobs"
	case *pb.GenerateResponse_Delta:
		one := o.choice(event.Delta.Choice)
		one.TokenIDs = append(one.TokenIDs, event.Delta.TokenIds...)
		one.Text += event.Delta.Text
		o.numDeltas++
		return "delta"
	case *pb.GenerateResponse_Finished:
		one := o.choice(event.Finished.Choice)
		one.Reason = name(event.Finished.Reason)
		switch matched := event.Finished.Matched.(type) {
		case *pb.Finished_StopString:
			one.StopString = &matched.StopString
		case *pb.Finished_TokenId:
			one.TokenID = &matched.TokenId
		}
		return "finished"
	case *pb.GenerateResponse_Done:
		o.done = event.Done
		return "done"
	}
	return "unknown"
}

// takeItem adds an event of an item, as take does.
func (o *outcome) takeItem(event *pb.BatchEvent) string {
	one := &pb.GenerateResponse{}
	switch event := event.Event.(type) {
	case *pb.BatchEvent_Started:
		one.Event = &pb.GenerateResponse_Started{Started: event.Started}
	case *pb.BatchEvent_Progress:
		one.Event = &pb.GenerateResponse_Progress{Progress: event.Progress}
	case *pb.BatchEvent_PromptLogprobs:
		one.Event = &pb.GenerateResponse_PromptLogprobs{PromptLogprobs: event.PromptLogprobs}
	case *pb.BatchEvent_Delta:
		one.Event = &pb.GenerateResponse_Delta{Delta: event.Delta}
	case *pb.BatchEvent_Finished:
		one.Event = &pb.GenerateResponse_Finished{Finished: event.Finished}
	case *pb.BatchEvent_Done:
		one.Event = &pb.GenerateResponse_Done{Done: event.Done}
	}
	return o.take(one)
}

// takeWhole adds all of an answer.
func (o *outcome) takeWhole(answer *pb.CompleteResponse) {
	o.started, o.done = answer.Started, answer.Done
	for _, completion := range answer.Completions {
		one := o.choice(completion.Choice)
		one.TokenIDs = append(one.TokenIDs, completion.TokenIds...)
		one.Text, one.Reason = completion.Text, name(completion.Reason)
		switch matched := completion.Matched.(type) {
		case *pb.Completion_StopString:
			one.StopString = &matched.StopString
		case *pb.Completion_TokenId:
			one.TokenID = &matched.TokenId
		}
	}
}

func (o *outcome) choice(number uint32) *choice {
	if o.choices[number] == nil {
		o.choices[number] = &choice{Choice: number, TokenIDs: []int32{}}
	}
	return o.choices[number]
}

func (o *outcome) result() result {
	choices := []*choice{}
	for _, number := range slices.Sorted(maps.Keys(o.choices)) {
		choices = append(choices, o.choices[number])
	}
	found := result{"choices": choices}
	if o.done != nil {
		found["output_tokens"] = o.done.GetUsage().GetOutputTokens()
	}
	if o.started != nil {
		found["started"] = map[string]any{
			"request_id":     o.started.RequestId,
			"prompt_tokens":  o.started.PromptTokens,
			"model_revision": o.started.ModelRevision,
			"seed":           strconv.FormatUint(o.started.GetSampling().GetSeed(), 10),
		}
	}
	return found
}

// name returns the name of a reason without its prefix, UNSPECIFIED for one that is not known.
func name(reason commonv1.FinishReason) *string {
	if _, isKnown := commonv1.FinishReason_name[int32(reason)]; !isKnown {
		reason = commonv1.FinishReason_FINISH_REASON_UNSPECIFIED
	}
	return new(strings.TrimPrefix(reason.String(), "FINISH_REASON_"))
}

// describe returns an error as a line tells it.
func describe(err error) result {
	failure, isTyped := errors.AsType[*tandem.Error](err)
	if !isTyped {
		return result{"message": err.Error()}
	}
	metadata := failure.Metadata
	if metadata == nil {
		metadata = map[string]string{}
	}
	found := result{
		"code":           code.Code_name[int32(failure.Code)],
		"reason":         orNull(failure.ReasonName),
		"known":          failure.Reason != commonv1.ErrorReason_ERROR_REASON_UNSPECIFIED,
		"message":        failure.Message,
		"field":          orNull(failure.Field),
		"metadata":       metadata,
		"retry_after_ms": nil,
		"request_id":     orNull(failure.RequestID),
	}
	if failure.RetryAfter != nil {
		found["retry_after_ms"] = failure.RetryAfter.Milliseconds()
	}
	return found
}

func orNull(text string) *string {
	if text == "" {
		return nil
	}
	return &text
}
