/* What a reader keeps of a stream's messages: counts, and the offset that must come next. */
#ifndef TANDEM_MESSAGES_H
#define TANDEM_MESSAGES_H

#include <stddef.h>
#include <stdint.h>

/* As many choices as one request may ask for (tandem.inference.v1.GenerateRequest.n). */
#define MAX_CHOICES 16

struct counts {
    uint64_t messages;    /* of every kind */
    uint64_t deltas;
    uint64_t tokens;
    uint64_t text_bytes;
    uint64_t bad_offsets; /* deltas that do not begin where the one before ended */
    uint64_t malformed;   /* messages that are no GenerateResponse */
    uint64_t started;
    uint64_t finished;    /* choices */
    uint64_t done;        /* requests */
    uint64_t done_tokens; /* what usage says of those */
};

struct progress {
    uint32_t next_offset[MAX_CHOICES];
    uint64_t tokens;
    int is_started, is_done;
};

/* Count one serialized GenerateResponse. */
void count_message(const uint8_t *message, size_t length, struct progress *progress,
                   struct counts *counts);

#endif
