/* LD_PRELOAD: at the n-th file-changing call below a folder, end or stop the process, or let calls fail.
 *
 * Not armed it does nothing. A write that is struck has written its first half: what a full disk or a kill leaves.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { OPEN = 1, WRITE = 2, FSYNC = 4, RENAME = 8, LINK = 16, UNLINK = 32, MKDIR = 64, TRUNCATE = 128 };
enum { COUNT, SIGNAL, FAIL_ONCE, FAIL_ON };

static char below[PATH_MAX];
static int armed, kinds, action, value;
static long struck_at, seen;

/* at: of the calls of these kinds, 1 the first; value: the signal or the errno. FAIL_ON: this and all later ones. */
void chaos_arm(const char *folder, int of_kinds, long at, int what, int with) {
    snprintf(below, sizeof below, "%s/", folder);
    kinds = of_kinds, struck_at = at, action = what, value = with, seen = 0, armed = 1;
}

/* For processes that others start: CHAOS_ARM=kinds,at,what,with,folder */
__attribute__((constructor)) static void arm_by_environment(void) {
    char folder[PATH_MAX];
    int of_kinds, what, with;
    long at;
    const char *text = getenv("CHAOS_ARM");
    if (text && sscanf(text, "%d,%ld,%d,%d,%4095[^\n]", &of_kinds, &at, &what, &with, folder) == 5)
        chaos_arm(folder, of_kinds, at, what, with);
}

long chaos_seen(void) { return seen; }

static int counts(int kind, const char *path) {
    char whole[2 * PATH_MAX] = "";
    if (!armed || !(kinds & kind) || !path) return 0;
    if (path[0] != '/') {
        if (!getcwd(whole, PATH_MAX)) return 0;
        strcat(whole, "/");
    }
    strncat(whole, path, PATH_MAX - 1);
    return !strncmp(whole, below, strlen(below));
}

static int counts_fd(int kind, int fd) {
    char name[64], path[PATH_MAX];
    if (!armed || !(kinds & kind)) return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(name, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return counts(kind, path);
}

/* 1: this call is to fail; errno is set. */
static int struck(void) {
    long number = __atomic_add_fetch(&seen, 1, __ATOMIC_SEQ_CST);
    if (number == struck_at && action == SIGNAL) kill(getpid(), value);
    if ((number == struck_at && action == FAIL_ONCE) || (number >= struck_at && action == FAIL_ON)) {
        errno = value;
        return 1;
    }
    return 0;
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static int is_next(void) { return action != COUNT && seen + 1 == struck_at; }

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    if (!counts_fd(WRITE, fd)) return real(fd, data, size);
    if (is_next() && size > 1 && !(action == SIGNAL && value != SIGKILL)) {
        ssize_t half = real(fd, data, size / 2);
        if (!struck()) return half;
        if (value == ENOSPC || value == EDQUOT) return half; /* as the kernel does; the next one fails */
        return -1;
    }
    return struck() ? -1 : real(fd, data, size);
}

static int writes(int flags) { return flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC); }

#define OPENS(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        if (writes(flags) && counts(OPEN, path) && struck()) return -1; \
        return real(path, flags, mode); \
    }
#define OPENS_AT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        if (writes(flags) && counts(OPEN, path) && struck()) return -1; \
        return real(folder, path, flags, mode); \
    }
OPENS(open)
OPENS(open64)
OPENS_AT(openat)
OPENS_AT(openat64)

int fsync(int fd) { REAL(fsync); return counts_fd(FSYNC, fd) && struck() ? -1 : real(fd); }
int fdatasync(int fd) { REAL(fdatasync); return counts_fd(FSYNC, fd) && struck() ? -1 : real(fd); }
int syncfs(int fd) { REAL(syncfs); return counts_fd(FSYNC, fd) && struck() ? -1 : real(fd); }
int ftruncate(int fd, off_t n) { REAL(ftruncate); return counts_fd(TRUNCATE, fd) && struck() ? -1 : real(fd, n); }
int ftruncate64(int fd, off64_t n) { REAL(ftruncate64); return counts_fd(TRUNCATE, fd) && struck() ? -1 : real(fd, n); }
int rename(const char *a, const char *b) { REAL(rename); return counts(RENAME, b) && struck() ? -1 : real(a, b); }
int renameat(int f, const char *a, int g, const char *b) {
    REAL(renameat);
    return counts(RENAME, b) && struck() ? -1 : real(f, a, g, b);
}
int link(const char *a, const char *b) { REAL(link); return counts(LINK, b) && struck() ? -1 : real(a, b); }
int linkat(int f, const char *a, int g, const char *b, int flags) {
    REAL(linkat);
    return counts(LINK, b) && struck() ? -1 : real(f, a, g, b, flags);
}
int unlink(const char *path) { REAL(unlink); return counts(UNLINK, path) && struck() ? -1 : real(path); }
int unlinkat(int f, const char *path, int flags) {
    REAL(unlinkat);
    return counts(UNLINK, path) && struck() ? -1 : real(f, path, flags);
}
int mkdir(const char *path, mode_t mode) { REAL(mkdir); return counts(MKDIR, path) && struck() ? -1 : real(path, mode); }
