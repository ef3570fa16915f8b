/* As much of HPACK (RFC 7541) as a gRPC client without a dynamic table needs. */
#ifndef TANDEM_HPACK_H
#define TANDEM_HPACK_H

#include <stddef.h>
#include <stdint.h>

/*
 * Write a literal without indexing; gives its length. The name is that of an entry of the static
 * table below 15, or, with name_index 0, `name` in full. Name and value are below 127 bytes.
 */
size_t hpack_put(uint8_t *at, uint8_t name_index, const char *name, const char *value);

/* The grpc-status in a block of headers, -1 if there is none (or it is Huffman-coded). */
int hpack_status(const uint8_t *at, size_t block_length);

#endif
