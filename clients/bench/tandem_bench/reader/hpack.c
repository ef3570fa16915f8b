#include "hpack.h"

#include <string.h>

size_t hpack_put(uint8_t *at, uint8_t name_index, const char *name, const char *value)
{
    size_t length = 0, value_length = strlen(value);
    at[length++] = name_index; /* below 15, so it needs no second byte */
    if (name) {
        size_t name_length = strlen(name);
        at[length++] = (uint8_t)name_length;
        memcpy(at + length, name, name_length);
        length += name_length;
    }
    at[length++] = (uint8_t)value_length; /* below 127 */
    memcpy(at + length, value, value_length);
    return length + value_length;
}

/* Read an HPACK integer with an n-bit prefix. */
static int hpack_int(const uint8_t **at, const uint8_t *end, int bits, uint32_t *value)
{
    uint32_t mask = (1u << bits) - 1, shift = 0;
    if (*at == end)
        return 0;
    *value = *(*at)++ & mask;
    if (*value < mask)
        return 1;
    while (*at < end && shift < 28) {
        uint8_t byte = *(*at)++;
        *value += (uint32_t)(byte & 0x7f) << shift;
        if (!(byte & 0x80))
            return 1;
        shift += 7;
    }
    return 0;
}

/* Read an HPACK string; a Huffman-coded one is skipped and gives NULL. */
static int hpack_string(const uint8_t **at, const uint8_t *end, const char **text, uint32_t *length)
{
    if (*at == end)
        return 0;
    int is_huffman = **at & 0x80;
    if (!hpack_int(at, end, 7, length) || *length > (size_t)(end - *at))
        return 0;
    *text = is_huffman ? NULL : (const char *)*at;
    *at += *length;
    return 1;
}

int hpack_status(const uint8_t *at, size_t block_length)
{
    const uint8_t *end = at + block_length;
    while (at < end) {
        const char *name = NULL, *value = NULL;
        uint32_t index = 0, name_length = 0, value_length = 0;
        if (*at & 0x80) { /* indexed; no static entry is a grpc-status */
            if (!hpack_int(&at, end, 7, &index))
                return -1;
            continue;
        }
        if ((*at & 0xe0) == 0x20) { /* size of the dynamic table */
            if (!hpack_int(&at, end, 5, &index))
                return -1;
            continue;
        }
        if (!hpack_int(&at, end, *at & 0x40 ? 6 : 4, &index))
            return -1;
        if (index == 0 && !hpack_string(&at, end, &name, &name_length))
            return -1;
        if (!hpack_string(&at, end, &value, &value_length))
            return -1;
        if (name && value && name_length == 11 && !memcmp(name, "grpc-status", 11)) {
            int status = 0;
            for (uint32_t i = 0; i < value_length; i++)
                status = 10 * status + (value[i] - '0');
            return status;
        }
    }
    return -1;
}
