/* For LD_PRELOAD: 15 % of all sends on sockets come up to 80 ms late. -DSEED=N */

#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static __thread uint64_t state; /* of the thread's xorshift; 0 before its first send */
static __thread pid_t owner;    /* a forked child goes its own way */

static uint64_t chance(void) {
    if (state == 0 || owner != getpid()) {
        struct timespec now;
        owner = getpid();
        clock_gettime(CLOCK_MONOTONIC, &now);
        state = ((uint64_t)SEED << 32) ^ ((uint64_t)owner << 16) ^ (uint64_t)now.tv_nsec ^ (uintptr_t)&state;
        state = state ? state : 1;
    }
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state >> 11;
}

static void delay(void) {
    int error = errno;
    if (chance() % 100 < 15) {
        struct timespec time = {0, (long)(chance() % 80000000)};
        nanosleep(&time, NULL);
    }
    errno = error;
}

static int is_socket(int file) {
    struct stat found;
    int error = errno;
    int result = fstat(file, &found) == 0 && S_ISSOCK(found.st_mode);
    errno = error;
    return result;
}

ssize_t sendto(int file, const void *data, size_t size, int flags, const struct sockaddr *to, socklen_t length) {
    delay();
    return syscall(SYS_sendto, file, data, size, flags, to, length);
}

ssize_t send(int file, const void *data, size_t size, int flags) { return sendto(file, data, size, flags, NULL, 0); }

ssize_t sendmsg(int file, const struct msghdr *message, int flags) {
    delay();
    return syscall(SYS_sendmsg, file, message, flags);
}

ssize_t write(int file, const void *data, size_t size) {
    if (is_socket(file))
        delay();
    return syscall(SYS_write, file, data, size);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    if (is_socket(file))
        delay();
    return syscall(SYS_writev, file, parts, count);
}
