/*
 * A walk over tandem.inference.v1.GenerateResponse that looks at what must be counted and skips the
 * rest. Field numbers are those of protos/tandem/inference/v1/{inference_service,stream}.proto.
 */
#include "messages.h"

enum { VARINT = 0, FIXED64 = 1, BYTES = 2, FIXED32 = 5 };
enum { EVENT_STARTED = 1, EVENT_DELTA = 3, EVENT_FINISHED = 4, EVENT_DONE = 5 };
enum { DELTA_CHOICE = 1, DELTA_OFFSET = 2, DELTA_IDS = 3, DELTA_TEXT = 4 };
enum { DONE_USAGE = 1, USAGE_OUTPUT_TOKENS = 2 };

struct field {
    uint32_t number, type;
    uint64_t value;       /* of VARINT; length of BYTES */
    const uint8_t *bytes; /* of BYTES */
};

static int read_varint(const uint8_t **at, const uint8_t *end, uint64_t *value)
{
    uint64_t sum = 0;
    for (int shift = 0; shift < 64 && *at < end; shift += 7) {
        uint8_t byte = *(*at)++;
        sum |= (uint64_t)(byte & 0x7f) << shift;
        if (!(byte & 0x80)) {
            *value = sum;
            return 1;
        }
    }
    return 0;
}

/* 1: a field was read; 0: the end; -1: not a message. */
static int next_field(const uint8_t **at, const uint8_t *end, struct field *field)
{
    uint64_t key;
    size_t skip;
    if (*at == end)
        return 0;
    if (!read_varint(at, end, &key))
        return -1;
    field->number = (uint32_t)(key >> 3);
    field->type = (uint32_t)(key & 7);
    field->bytes = *at;
    switch (field->type) {
    case VARINT:
        return read_varint(at, end, &field->value) ? 1 : -1;
    case BYTES:
        if (!read_varint(at, end, &field->value) || field->value > (uint64_t)(end - *at))
            return -1;
        field->bytes = *at;
        *at += field->value;
        return 1;
    case FIXED64:
    case FIXED32:
        skip = field->type == FIXED64 ? 8 : 4;
        if ((size_t)(end - *at) < skip)
            return -1;
        *at += skip;
        return 1;
    default:
        return -1;
    }
}

static int count_delta(const uint8_t *at, size_t length, struct progress *progress,
                       struct counts *counts)
{
    const uint8_t *end = at + length;
    struct field field;
    uint64_t choice = 0, offset = 0, ids = 0;
    int more;
    while ((more = next_field(&at, end, &field)) > 0) {
        if (field.number == DELTA_CHOICE && field.type == VARINT)
            choice = field.value;
        else if (field.number == DELTA_OFFSET && field.type == VARINT)
            offset = field.value;
        else if (field.number == DELTA_IDS && field.type == BYTES)
            ids += field.value / 4;
        else if (field.number == DELTA_IDS && field.type == FIXED32)
            ids += 1;
        else if (field.number == DELTA_TEXT && field.type == BYTES)
            counts->text_bytes += field.value;
    }
    if (more < 0 || choice >= MAX_CHOICES)
        return 0;
    counts->deltas += 1;
    counts->tokens += ids;
    progress->tokens += ids;
    if (offset != progress->next_offset[choice])
        counts->bad_offsets += 1;
    progress->next_offset[choice] = (uint32_t)(offset + ids);
    return 1;
}

static uint64_t output_tokens_of(const uint8_t *at, size_t length)
{
    const uint8_t *end = at + length;
    struct field field;
    while (next_field(&at, end, &field) > 0) {
        if (field.number != DONE_USAGE || field.type != BYTES)
            continue;
        const uint8_t *inner = field.bytes, *inner_end = inner + field.value;
        struct field usage;
        while (next_field(&inner, inner_end, &usage) > 0)
            if (usage.number == USAGE_OUTPUT_TOKENS && usage.type == VARINT)
                return usage.value;
    }
    return 0;
}

void count_message(const uint8_t *message, size_t length, struct progress *progress,
                   struct counts *counts)
{
    const uint8_t *at = message, *end = message + length;
    struct field field;
    int more;
    counts->messages += 1;
    while ((more = next_field(&at, end, &field)) > 0) {
        if (field.type != BYTES)
            continue;
        switch (field.number) {
        case EVENT_STARTED:
            counts->started += 1;
            progress->is_started = 1;
            break;
        case EVENT_DELTA:
            if (!count_delta(field.bytes, field.value, progress, counts))
                counts->malformed += 1;
            break;
        case EVENT_FINISHED:
            counts->finished += 1;
            break;
        case EVENT_DONE:
            counts->done += 1;
            counts->done_tokens += output_tokens_of(field.bytes, field.value);
            progress->is_done = 1;
            break;
        default:
            break;
        }
    }
    if (more < 0)
        counts->malformed += 1;
}
