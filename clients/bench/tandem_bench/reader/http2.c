#include "http2.h"
#include "hpack.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum {
    DATA = 0, HEADERS = 1, RST_STREAM = 3, SETTINGS = 4, PING = 6, GOAWAY = 7, WINDOW_UPDATE = 8,
    CONTINUATION = 9
};
enum { END_STREAM = 1, ACK = 1, END_HEADERS = 4, PADDED = 8, PRIORITY_FLAG = 0x20 };
enum { HEADER_TABLE_SIZE = 1, ENABLE_PUSH = 2, INITIAL_WINDOW_SIZE = 4, MAX_FRAME_SIZE = 5 };
enum { FRAME_HEADER = 9, GRPC_HEADER = 5, READ_BYTES = 256 * 1024 };

static const char PREFACE[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
static const char PATH[] = "/tandem.inference.v1.InferenceService/Generate";
static const uint32_t CONNECTION_WINDOW = 1u << 30;

static void put_u32(uint8_t *at, uint32_t value)
{
    at[0] = (uint8_t)(value >> 24);
    at[1] = (uint8_t)(value >> 16);
    at[2] = (uint8_t)(value >> 8);
    at[3] = (uint8_t)value;
}

static uint32_t get_u32(const uint8_t *at)
{
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static uint8_t *grow(uint8_t **buffer, size_t length, size_t *capacity, size_t more)
{
    if (length + more > *capacity) {
        *capacity = 2 * (length + more);
        *buffer = realloc(*buffer, *capacity);
        if (!*buffer) {
            fputs("reader: out of memory\n", stderr);
            exit(1);
        }
    }
    return *buffer + length;
}

static void put_bytes(struct connection *c, const void *bytes, size_t length)
{
    memcpy(grow(&c->output, c->output_length, &c->output_capacity, length), bytes, length);
    c->output_length += length;
}

static void put_frame(struct connection *c, uint8_t type, uint8_t flags, uint32_t stream,
                      const void *payload, size_t length)
{
    uint8_t header[FRAME_HEADER];
    put_u32(header, (uint32_t)length << 8 | type);
    header[4] = flags;
    put_u32(header + 5, stream);
    put_bytes(c, header, sizeof header);
    put_bytes(c, payload, length);
}

static void put_window_update(struct connection *c, uint32_t stream, uint32_t bytes)
{
    uint8_t payload[4];
    put_u32(payload, bytes);
    put_frame(c, WINDOW_UPDATE, 0, stream, payload, sizeof payload);
}

static void send_headers(struct connection *c, uint32_t stream)
{
    uint8_t block[512];
    size_t length = 0;
    block[length++] = 0x83; /* :method POST */
    block[length++] = 0x86; /* :scheme http */
    length += hpack_put(block + length, 4, NULL, PATH);         /* :path */
    length += hpack_put(block + length, 1, NULL, c->authority); /* :authority */
    length += hpack_put(block + length, 0, "content-type", "application/grpc");
    length += hpack_put(block + length, 0, "te", "trailers");
    put_frame(c, HEADERS, END_HEADERS, stream, block, length);
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Send as much of the requests as windows allow, oldest first. */
static void send_requests(struct connection *c)
{
    for (; c->num_sent < c->num_streams; c->num_sent++) {
        size_t index = c->num_sent;
        struct stream *s = &c->streams[index];
        uint32_t id = (uint32_t)(2 * index + 1);
        size_t total = GRPC_HEADER + s->request->length;
        if (!s->is_opened) {
            send_headers(c, id);
            s->is_opened = 1;
            c->num_opened = index + 1;
            s->send_window = c->initial_send_window;
        }
        while (s->num_sent < total && s->send_window > 0 && c->send_window > 0) {
            uint8_t header[GRPC_HEADER] = {0};
            size_t length = smaller(total - s->num_sent, c->max_frame);
            length = smaller(length, smaller((size_t)s->send_window, (size_t)c->send_window));
            if (s->num_sent == 0 && length < GRPC_HEADER)
                return; /* the windows are never that small for long */
            int is_last = s->num_sent + length == total;
            uint8_t frame[FRAME_HEADER];
            put_u32(frame, (uint32_t)length << 8 | DATA);
            frame[4] = is_last ? END_STREAM : 0;
            put_u32(frame + 5, id);
            put_bytes(c, frame, sizeof frame);
            size_t from = s->num_sent, rest = length;
            if (from == 0) {
                put_u32(header + 1, (uint32_t)s->request->length);
                put_bytes(c, header, GRPC_HEADER);
                from = GRPC_HEADER;
                rest -= GRPC_HEADER;
            }
            put_bytes(c, s->request->bytes + (from - GRPC_HEADER), rest);
            s->num_sent += length;
            s->send_window -= (int64_t)length;
            c->send_window -= (int64_t)length;
        }
        if (s->num_sent < total)
            return;
    }
}

void connection_begin(struct connection *c, int fd, const char *authority, struct stream *streams,
                      size_t num_streams, struct counts *counts)
{
    uint8_t settings[18];
    memset(c, 0, sizeof *c);
    c->fd = fd;
    c->authority = authority;
    c->streams = streams;
    c->num_streams = num_streams;
    c->counts = counts;
    c->send_window = c->initial_send_window = 65535;
    c->max_frame = 16384;
    /* No dynamic table: what a header block says never depends on an earlier one. */
    const uint32_t values[3][2] = {
        {HEADER_TABLE_SIZE, 0}, {ENABLE_PUSH, 0}, {INITIAL_WINDOW_SIZE, STREAM_WINDOW}};
    for (int i = 0; i < 3; i++) {
        settings[6 * i] = 0;
        settings[6 * i + 1] = (uint8_t)values[i][0];
        put_u32(settings + 6 * i + 2, values[i][1]);
    }
    put_bytes(c, PREFACE, sizeof PREFACE - 1);
    put_frame(c, SETTINGS, 0, 0, settings, sizeof settings);
    put_window_update(c, 0, CONNECTION_WINDOW - 65535);
    send_requests(c);
}

static void end_stream(struct stream *s, int status)
{
    if (s->is_over)
        return;
    s->is_over = 1;
    s->status = status;
    free(s->partial);
    s->partial = NULL;
}

static struct stream *stream_of(struct connection *c, uint32_t id)
{
    size_t index = id / 2;
    return id % 2 == 1 && index < c->num_streams ? &c->streams[index] : NULL;
}

static void take_headers(struct connection *c, struct stream *s)
{
    int status = hpack_status(c->header_block, c->header_length);
    if (s && c->header_ends_stream)
        end_stream(s, status < 0 ? BROKEN_STATUS : status);
    c->header_length = 0;
}

/* Cut received bytes into gRPC frames; an incomplete one is kept. */
static void take_data(struct connection *c, struct stream *s, const uint8_t *at, size_t length)
{
    if (s->partial_length) {
        memcpy(grow(&s->partial, s->partial_length, &s->partial_capacity, length), at, length);
        s->partial_length += length;
        at = s->partial;
        length = s->partial_length;
    }
    while (length >= GRPC_HEADER) {
        size_t message = get_u32(at + 1);
        if (length - GRPC_HEADER < message)
            break;
        count_message(at + GRPC_HEADER, message, &s->progress, c->counts);
        at += GRPC_HEADER + message;
        length -= GRPC_HEADER + message;
    }
    if (length && at != s->partial) {
        if (!s->partial_length) {
            memcpy(grow(&s->partial, 0, &s->partial_capacity, length), at, length);
        } else {
            memmove(s->partial, at, length);
        }
    }
    s->partial_length = length;
}

static void take_data_frame(struct connection *c, uint32_t id, uint8_t flags, const uint8_t *payload,
                            size_t length)
{
    struct stream *s = stream_of(c, id);
    c->ungranted += (uint32_t)length;
    if (c->ungranted > CONNECTION_WINDOW / 4) {
        put_window_update(c, 0, c->ungranted);
        c->ungranted = 0;
    }
    if (!s || s->is_over)
        return;
    size_t padding = flags & PADDED && length ? 1u + payload[0] : 0;
    if (padding > length) {
        c->is_broken = 1;
        return;
    }
    take_data(c, s, payload + (padding ? 1 : 0), length - padding);
    s->ungranted += (uint32_t)length;
    if (!s->is_stalled && s->ungranted > STREAM_WINDOW / 2) {
        put_window_update(c, id, s->ungranted);
        s->ungranted = 0;
    }
    if (flags & END_STREAM)
        end_stream(s, BROKEN_STATUS);
}

static void take_settings(struct connection *c, uint8_t flags, const uint8_t *payload, size_t length)
{
    if (flags & ACK)
        return;
    for (size_t at = 0; at + 6 <= length; at += 6) {
        uint32_t key = (uint32_t)payload[at] << 8 | payload[at + 1];
        uint32_t value = get_u32(payload + at + 2);
        if (key == MAX_FRAME_SIZE) {
            c->max_frame = value;
        } else if (key == INITIAL_WINDOW_SIZE) {
            for (size_t i = 0; i < c->num_opened; i++)
                c->streams[i].send_window += (int64_t)value - c->initial_send_window;
            c->initial_send_window = value;
        }
    }
    put_frame(c, SETTINGS, ACK, 0, NULL, 0);
    send_requests(c);
}

static void take_frame(struct connection *c, uint8_t type, uint8_t flags, uint32_t id,
                       const uint8_t *payload, size_t length)
{
    struct stream *s = stream_of(c, id);
    size_t skip = 0, padding = 0;
    switch (type) {
    case DATA:
        take_data_frame(c, id, flags, payload, length);
        return;
    case HEADERS:
        if (flags & PADDED && length)
            padding = payload[skip++];
        skip += flags & PRIORITY_FLAG ? 5 : 0;
        c->header_stream = id;
        c->header_ends_stream = flags & END_STREAM;
        c->header_length = 0;
        /* fall through */
    case CONTINUATION:
        if (skip + padding > length || c->header_stream != id ||
            c->header_length + length > 1 << 20) {
            c->is_broken = 1;
            return;
        }
        c->header_block = realloc(c->header_block, c->header_length + length + 1);
        if (!c->header_block)
            exit(1);
        memcpy(c->header_block + c->header_length, payload + skip, length - skip - padding);
        c->header_length += length - skip - padding;
        if (flags & END_HEADERS)
            take_headers(c, s);
        return;
    case RST_STREAM:
        if (s)
            end_stream(s, BROKEN_STATUS);
        return;
    case SETTINGS:
        take_settings(c, flags, payload, length);
        return;
    case PING:
        if (!(flags & ACK))
            put_frame(c, PING, ACK, 0, payload, length);
        return;
    case GOAWAY: /* streams above the last one it names were never seen */
        for (size_t i = 0; length >= 4 && i < c->num_streams; i++)
            if (2 * i + 1 > (get_u32(payload) & 0x7fffffff))
                end_stream(&c->streams[i], BROKEN_STATUS);
        return;
    case WINDOW_UPDATE:
        if (length >= 4 && id == 0)
            c->send_window += get_u32(payload) & 0x7fffffff;
        else if (length >= 4 && s)
            s->send_window += get_u32(payload) & 0x7fffffff;
        send_requests(c);
        return;
    default:
        return;
    }
}

static void take_input(struct connection *c)
{
    size_t at = 0;
    while (!c->is_broken && c->input_length - at >= FRAME_HEADER) {
        const uint8_t *header = c->input + at;
        uint32_t length = get_u32(header) >> 8;
        if (c->input_length - at - FRAME_HEADER < length)
            break;
        take_frame(c, header[3], header[4], get_u32(header + 5) & 0x7fffffff,
                   header + FRAME_HEADER, length);
        at += FRAME_HEADER + length;
    }
    c->input_length -= at;
    memmove(c->input, c->input + at, c->input_length);
}

static void break_off(struct connection *c)
{
    c->is_broken = 1;
    for (size_t i = 0; i < c->num_streams; i++)
        end_stream(&c->streams[i], BROKEN_STATUS);
}

void connection_read(struct connection *c)
{
    while (!c->is_broken) {
        uint8_t *end = grow(&c->input, c->input_length, &c->input_capacity, READ_BYTES);
        ssize_t got = recv(c->fd, end, READ_BYTES, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (got <= 0)
            c->is_broken = 1;
        else
            c->input_length += (size_t)got;
        take_input(c);
        if (got < READ_BYTES)
            break;
    }
    if (c->is_broken)
        break_off(c);
}

void connection_write(struct connection *c)
{
    while (!c->is_broken && c->output_sent < c->output_length) {
        ssize_t put = send(c->fd, c->output + c->output_sent, c->output_length - c->output_sent,
                           MSG_NOSIGNAL);
        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (put < 0) {
            break_off(c);
            return;
        }
        c->output_sent += (size_t)put;
    }
    c->output_length = c->output_sent = 0;
}

void connection_stall(struct connection *c, size_t index, int is_stalled)
{
    struct stream *s = &c->streams[index];
    s->is_stalled = is_stalled;
    if (!is_stalled && !s->is_over && s->ungranted) {
        put_window_update(c, (uint32_t)(2 * index + 1), s->ungranted);
        s->ungranted = 0;
    }
}
