/* The client's end of one cleartext HTTP/2 connection (RFC 9113) that carries gRPC calls. */
#ifndef TANDEM_HTTP2_H
#define TANDEM_HTTP2_H

#include "messages.h"

/* Bytes a stream may be sent before it has to be granted more; little, so that one that does not
 * read holds its server up soon. */
#define STREAM_WINDOW 8192

struct request {
    const uint8_t *bytes; /* serialized GenerateRequest */
    size_t length;
};

struct stream {
    const struct request *request;
    int64_t send_window;
    size_t num_sent;      /* bytes of the gRPC-framed request */
    uint32_t ungranted;   /* bytes received that the server may not send again yet */
    uint8_t *partial;     /* a gRPC frame that is not complete */
    size_t partial_length, partial_capacity;
    int is_opened, is_over, is_stalled;
    int status;           /* grpc-status; -1 until known */
    struct progress progress;
};

enum { BROKEN_STATUS = 1000 }; /* stands for a stream without a grpc-status */

struct connection {
    int fd;
    const char *authority;
    struct stream *streams; /* stream i has the id 2 i + 1 */
    size_t num_streams, num_opened, num_sent; /* of them: with headers, with the whole request */
    uint8_t *input;
    size_t input_length, input_capacity;
    uint8_t *output;
    size_t output_length, output_sent, output_capacity;
    int64_t send_window;
    int64_t initial_send_window;
    uint32_t max_frame;
    uint32_t ungranted;
    uint8_t *header_block; /* HEADERS without END_HEADERS and its CONTINUATIONs */
    size_t header_length;
    uint32_t header_stream;
    int header_ends_stream;
    int is_broken;
    struct counts *counts;
};

/* Put preface, settings and all requests in line; `fd` is connected and does not block. */
void connection_begin(struct connection *connection, int fd, const char *authority,
                      struct stream *streams, size_t num_streams, struct counts *counts);

/* Read all there is; sets is_broken at the end of the connection or of its sense. */
void connection_read(struct connection *connection);

/* Write what can be written; afterwards output_length > output_sent says that more waits. */
void connection_write(struct connection *connection);

/* Stop granting this stream bytes, or grant all it was not given and go on. */
void connection_stall(struct connection *connection, size_t index, int is_stalled);

#endif
