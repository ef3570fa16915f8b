import type { JsonObject } from "@bufbuild/protobuf";
import {
  type BatchItemEvent,
  Code,
  type CompleteResponse,
  ErrorReason,
  FinishReason,
  type Finished,
  type Started,
  type TandemError,
} from "@tandem-serve/client";

interface Choice {
  choice: number;
  token_ids: number[];
  text: string;
  reason: string | null;
  [matched: string]: string | number | number[] | null;
}

/** Output of one request so far. */
export class Outcome {
  numDeltas = 0;
  error: TandemError | undefined;
  readonly #choices = new Map<number, Choice>();
  #outputTokens: number | undefined;
  #started: JsonObject | undefined;

  /** Adds an event of a stream, or of an item. */
  take(event: BatchItemEvent["event"]): void {
    switch (event.case) {
      case "started":
        this.#accept(event.value);
        break;
      case "delta": {
        const choice = this.#choice(event.value.choice);
        choice.token_ids.push(...event.value.tokenIds);
        choice.text += event.value.text;
        this.numDeltas += 1;
        break;
      }
      case "finished":
        Object.assign(this.#choice(event.value.choice), ending(event.value));
        break;
      case "done":
        this.#outputTokens = event.value.usage?.outputTokens;
        break;
      case "error":
        this.error = event.value;
        break;
      default:
    }
  }

  /** Adds all of a whole answer. */
  takeWhole({ started, completions, done }: CompleteResponse): void {
    if (started !== undefined) this.#accept(started);
    for (const one of completions) {
      const output = { token_ids: one.tokenIds, text: one.text };
      Object.assign(this.#choice(one.choice), output, ending(one));
    }
    this.#outputTokens = done?.usage?.outputTokens;
  }

  /** Returns the `result` of the command. */
  toJson(): JsonObject {
    return {
      choices: [...this.#choices.values()].sort((one, other) => one.choice - other.choice),
      ...(this.#outputTokens !== undefined && { output_tokens: this.#outputTokens }),
      ...(this.#started && { started: this.#started }),
      ...(this.error && failed(this.error)),
    };
  }

  #accept({ requestId, promptTokens, modelRevision, sampling }: Started): void {
    this.#started = {
      request_id: requestId,
      prompt_tokens: promptTokens,
      model_revision: modelRevision,
      seed: String(sampling?.seed),
    };
  }

  #choice(number: number): Choice {
    const empty = { choice: number, token_ids: [], text: "", reason: null };
    const choice = this.#choices.get(number) ?? empty;
    this.#choices.set(number, choice);
    return choice;
  }
}

/** Returns the result of a command that failed without output. */
export function failed(error: TandemError): JsonObject {
  return {
    error: {
      code: Code[error.code],
      reason: error.reasonName ?? null,
      known: error.reason !== ErrorReason.UNSPECIFIED,
      message: error.message,
      field: error.field ?? null,
      metadata: { ...error.metadata },
      retry_after_ms: error.retryAfterMs ?? null,
      request_id: error.requestId ?? null,
    },
  };
}

function ending({ reason, matched }: Pick<Finished, "reason" | "matched">): JsonObject {
  // An unknown value has no name: it counts as unspecified.
  const name = (FinishReason[reason] as string | undefined) ?? "UNSPECIFIED";
  if (matched.case === "stopString") return { reason: name, stop_string: matched.value };
  if (matched.case === "tokenId") return { reason: name, token_id: matched.value };
  return { reason: name };
}
