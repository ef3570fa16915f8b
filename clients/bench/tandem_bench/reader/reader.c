/*
 * A client that does as little as possible: opens many Generate streams, counts what comes.
 *
 *     reader ADDRESS CONNECTIONS < requests and commands
 *
 * ADDRESS is host:port or unix:path. Standard input begins with the number of requests and, for
 * each, its length and its bytes (numbers: 4 bytes, little-endian); one command per line follows:
 *
 *     report        answer with one line of JSON, counted since the start
 *     stall N       the N last streams are not granted bytes any more; answers like report
 *     resume        they are again; answers like report
 *     quit, or the end of input: close everything
 *
 * Stream i is on connection i modulo CONNECTIONS. Exit codes: 0 quit, 1 failed, 2 wrong arguments.
 */
#include "http2.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { NUM_STATUSES = 17, COMMAND_BYTES = 64 };

struct reader {
    struct request *requests;
    struct stream *streams; /* those of a connection are neighbours */
    struct connection *connections;
    struct counts counts;
    size_t num_requests, num_connections, num_stalled;
    char command[COMMAND_BYTES];
    size_t command_length;
};

static void fail(const char *what)
{
    fprintf(stderr, "reader: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void *allocate(size_t count, size_t size)
{
    void *found = calloc(count ? count : 1, size);
    if (!found)
        fail("calloc");
    return found;
}

static void read_whole(void *into, size_t length)
{
    for (size_t at = 0; at < length;) {
        ssize_t got = read(STDIN_FILENO, (char *)into + at, length - at);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0) {
            fputs("reader: standard input ended within the requests\n", stderr);
            exit(2);
        }
        at += (size_t)got;
    }
}

static uint32_t read_number(void)
{
    uint8_t bytes[4];
    read_whole(bytes, sizeof bytes);
    return bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

static void read_requests(struct reader *r)
{
    r->num_requests = read_number();
    r->requests = allocate(r->num_requests, sizeof *r->requests);
    for (size_t i = 0; i < r->num_requests; i++) {
        size_t length = read_number();
        uint8_t *bytes = allocate(length, 1);
        read_whole(bytes, length);
        r->requests[i] = (struct request){bytes, length};
    }
}

static int connect_unix(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (fd < 0 || strlen(path) >= sizeof address.sun_path)
        fail(path);
    strcpy(address.sun_path, path);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0)
        fail(path);
    return fd;
}

static int connect_tcp(const char *address)
{
    char host[256];
    const char *colon = strrchr(address, ':');
    if (!colon || (size_t)(colon - address) >= sizeof host) {
        fprintf(stderr, "reader: %s is not host:port\n", address);
        exit(2);
    }
    const char *begin = *address == '[' ? address + 1 : address;
    size_t length = (size_t)(colon - begin) - (*address == '[');
    memcpy(host, begin, length);
    host[length] = 0;
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
    int error = getaddrinfo(host, colon + 1, &hints, &found);
    if (error) {
        fprintf(stderr, "reader: %s: %s\n", address, gai_strerror(error));
        exit(1);
    }
    int fd = -1, yes = 1;
    for (struct addrinfo *one = found; one && fd < 0; one = one->ai_next) {
        fd = socket(one->ai_family, one->ai_socktype, one->ai_protocol);
        if (fd >= 0 && connect(fd, one->ai_addr, one->ai_addrlen) < 0) {
            close(fd);
            fd = -1;
        }
    }
    if (fd < 0)
        fail(address);
    freeaddrinfo(found);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    return fd;
}

static void connect_all(struct reader *r, const char *address)
{
    int is_unix = !strncmp(address, "unix:", 5);
    struct stream *streams = r->streams = allocate(r->num_requests, sizeof *r->streams);
    r->connections = allocate(r->num_connections, sizeof *r->connections);
    for (size_t i = 0; i < r->num_connections; i++) {
        int fd = is_unix ? connect_unix(address + 5) : connect_tcp(address);
        size_t num_streams = 0;
        for (size_t one = i; one < r->num_requests; one += r->num_connections) {
            streams[num_streams].status = -1;
            streams[num_streams++].request = &r->requests[one];
        }
        fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
        connection_begin(&r->connections[i], fd, is_unix ? "localhost" : address, streams,
                         num_streams, &r->counts);
        streams += num_streams;
    }
}

static double seconds_of(struct timeval time)
{
    return (double)time.tv_sec + (double)time.tv_usec / 1e6;
}

static int is_stalled_one(const struct reader *r, size_t connection, size_t index)
{
    return index * r->num_connections + connection >= r->num_requests - r->num_stalled;
}

static void print_statuses(const struct reader *r, int of_stalled)
{
    size_t with_status[NUM_STATUSES + 1] = {0};
    const char *separator = "";
    for (size_t c = 0; c < r->num_connections; c++) {
        for (size_t i = 0; i < r->connections[c].num_streams; i++) {
            const struct stream *s = &r->connections[c].streams[i];
            int status = s->status < 0 || s->status >= NUM_STATUSES ? NUM_STATUSES : s->status;
            if (s->is_over && is_stalled_one(r, c, i) == of_stalled)
                with_status[status] += 1;
        }
    }
    putchar('{');
    for (int status = 0; status <= NUM_STATUSES; status++) {
        if (!with_status[status])
            continue;
        if (status == NUM_STATUSES)
            printf("%s\"broken\": %zu", separator, with_status[status]);
        else
            printf("%s\"%d\": %zu", separator, status, with_status[status]);
        separator = ", ";
    }
    putchar('}');
}

static void report(const struct reader *r)
{
    struct timespec now;
    struct rusage used;
    const struct counts *counts = &r->counts;
    uint64_t stalled_tokens = 0;
    for (size_t c = 0; c < r->num_connections; c++)
        for (size_t i = 0; i < r->connections[c].num_streams; i++)
            if (is_stalled_one(r, c, i))
                stalled_tokens += r->connections[c].streams[i].progress.tokens;
    clock_gettime(CLOCK_MONOTONIC, &now);
    getrusage(RUSAGE_SELF, &used);
    printf("{\"time_s\": %.6f, \"cpu_s\": %.6f, ", (double)now.tv_sec + (double)now.tv_nsec / 1e9,
           seconds_of(used.ru_utime) + seconds_of(used.ru_stime));
    printf("\"streams\": %zu, \"messages\": %llu, \"deltas\": %llu, \"tokens\": %llu, ",
           r->num_requests, (unsigned long long)counts->messages,
           (unsigned long long)counts->deltas, (unsigned long long)counts->tokens);
    printf("\"text_bytes\": %llu, \"bad_offsets\": %llu, \"malformed\": %llu, ",
           (unsigned long long)counts->text_bytes, (unsigned long long)counts->bad_offsets,
           (unsigned long long)counts->malformed);
    printf("\"started\": %llu, \"finished\": %llu, \"done\": %llu, \"done_tokens\": %llu, ",
           (unsigned long long)counts->started, (unsigned long long)counts->finished,
           (unsigned long long)counts->done, (unsigned long long)counts->done_tokens);
    printf("\"stalled\": %zu, \"stalled_tokens\": %llu, \"statuses\": ", r->num_stalled,
           (unsigned long long)stalled_tokens);
    print_statuses(r, 0);
    printf(", \"stalled_statuses\": ");
    print_statuses(r, 1);
    printf("}\n");
    fflush(stdout);
}

static void stall(struct reader *r, int is_stalled)
{
    for (size_t c = 0; c < r->num_connections; c++)
        for (size_t i = 0; i < r->connections[c].num_streams; i++)
            if (is_stalled_one(r, c, i))
                connection_stall(&r->connections[c], i, is_stalled);
}

/* 0 to quit. */
static int obey(struct reader *r, const char *command)
{
    char *end;
    if (!strcmp(command, "quit"))
        return 0;
    if (!strncmp(command, "stall ", 6)) {
        unsigned long count = strtoul(command + 6, &end, 10);
        if (*end || count > r->num_requests) {
            fprintf(stderr, "reader: cannot %s of %zu streams\n", command, r->num_requests);
            exit(2);
        }
        r->num_stalled = count;
        stall(r, 1);
    } else if (!strcmp(command, "resume")) {
        stall(r, 0);
    } else if (strcmp(command, "report")) {
        fprintf(stderr, "reader: no such command: %s\n", command);
        exit(2);
    }
    report(r);
    return 1;
}

/* Take what standard input has; 0 to quit. */
static int take_commands(struct reader *r)
{
    ssize_t got = read(STDIN_FILENO, r->command + r->command_length,
                       COMMAND_BYTES - r->command_length);
    if (got <= 0)
        return got < 0 && errno == EINTR;
    r->command_length += (size_t)got;
    char *newline;
    while ((newline = memchr(r->command, '\n', r->command_length))) {
        *newline = 0;
        if (!obey(r, r->command))
            return 0;
        r->command_length -= (size_t)(newline + 1 - r->command);
        memmove(r->command, newline + 1, r->command_length);
    }
    if (r->command_length == COMMAND_BYTES) {
        fputs("reader: a command is too long\n", stderr);
        exit(2);
    }
    return 1;
}

static void serve(struct reader *r)
{
    struct pollfd *polled = allocate(r->num_connections + 1, sizeof *polled);
    for (;;) {
        for (size_t i = 0; i < r->num_connections; i++) {
            struct connection *c = &r->connections[i];
            connection_write(c);
            polled[i].fd = c->is_broken ? -1 : c->fd;
            polled[i].events = (short)(POLLIN | (c->output_length ? POLLOUT : 0));
        }
        polled[r->num_connections].fd = STDIN_FILENO;
        polled[r->num_connections].events = POLLIN;
        if (poll(polled, r->num_connections + 1, -1) < 0 && errno != EINTR)
            fail("poll");
        for (size_t i = 0; i < r->num_connections; i++)
            if (polled[i].revents & (POLLIN | POLLHUP | POLLERR))
                connection_read(&r->connections[i]);
        if (polled[r->num_connections].revents && !take_commands(r))
            break;
    }
    free(polled);
}

int main(int argc, char **argv)
{
    struct reader reader = {0};
    char *end;
    if (argc != 3 || (reader.num_connections = strtoul(argv[2], &end, 10)) < 1 || *end) {
        fputs("usage: reader ADDRESS CONNECTIONS\n", stderr);
        return 2;
    }
    read_requests(&reader);
    connect_all(&reader, argv[1]);
    serve(&reader);
    return 0;
}
