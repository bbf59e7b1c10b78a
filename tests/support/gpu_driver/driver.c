// A stand-in for the driver of a GPU: host memory is device memory, and a thread for each stream runs what is queued, in order.
// Stream 0 runs at once, in the calling thread. A graph is a function without arguments.

#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum kind { COPY, FILL, WRITE, WAIT, LAUNCH };
struct work { enum kind kind; uint64_t to, from; size_t count; uint32_t value, flags; void (*graph)(void); struct work *next; };
struct stream { pthread_mutex_t lock; pthread_cond_t change; struct work *first, *last; };

static _Atomic int fail_launches, num_launches, num_copies;
static _Atomic unsigned stall_us;

static int seen(uint32_t there, uint32_t value, uint32_t flags) {
  switch (flags & 3) {
    case 0: return (int32_t)(there - value) >= 0;
    case 1: return there == value;
    case 2: return (there & value) != 0;
    default: return ~(there | value) != 0;
  }
}

static void run(const struct work *w) {
  uint32_t *word = (uint32_t *)w->to;
  switch (w->kind) {
    case COPY: memcpy((void *)w->to, (const void *)w->from, w->count); break;
    case FILL: for (size_t i = 0; i < w->count; i++) word[i] = w->value; break;
    case WRITE: __atomic_store_n(word, w->value, __ATOMIC_SEQ_CST); break;
    case WAIT: while (!seen(__atomic_load_n(word, __ATOMIC_ACQUIRE), w->value, w->flags)) usleep(20); break;
    case LAUNCH: if (stall_us) usleep(stall_us); w->graph(); break;
  }
}

static void *serve(void *given) {
  struct stream *s = given;
  for (;;) {
    pthread_mutex_lock(&s->lock);
    while (!s->first) pthread_cond_wait(&s->change, &s->lock);
    struct work *w = s->first;
    s->first = w->next;
    if (!s->first) s->last = NULL;
    pthread_mutex_unlock(&s->lock);
    run(w);
    free(w);
  }
  return NULL;
}

static int queue(void *stream, struct work w) {
  if (!stream) {
    run(&w);
    return 0;
  }
  struct stream *s = stream;
  struct work *kept = malloc(sizeof *kept);
  *kept = w;
  kept->next = NULL;
  pthread_mutex_lock(&s->lock);
  if (s->last) s->last->next = kept; else s->first = kept;
  s->last = kept;
  pthread_cond_signal(&s->change);
  pthread_mutex_unlock(&s->lock);
  return 0;
}

int cuInit(unsigned flags) { return (int)flags; }
int cuGetErrorName(int code, const char **name) { *name = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_UNKNOWN"; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuCtxSetCurrent(void *context) { return context == (void *)1 ? 0 : 201; }
int cuMemHostRegister_v2(void *at, size_t bytes, unsigned flags) { return at && bytes && flags ? 0 : 1; }
int cuMemHostUnregister(void *at) { return at ? 0 : 1; }
int cuMemHostGetDevicePointer_v2(uint64_t *device, void *at, unsigned flags) { *device = (uint64_t)at; return (int)flags; }
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void *stream) {
  num_copies++;
  return queue(stream, (struct work){.kind = COPY, .to = to, .from = from, .count = bytes});
}
int cuMemsetD32Async(uint64_t to, unsigned value, size_t words, void *stream) {
  return queue(stream, (struct work){.kind = FILL, .to = to, .value = value, .count = words});
}
int cuStreamWriteValue32_v2(void *stream, uint64_t to, uint32_t value, unsigned flags) {
  return queue(stream, (struct work){.kind = WRITE, .to = to, .value = value, .flags = flags});
}
int cuStreamWaitValue32_v2(void *stream, uint64_t at, uint32_t value, unsigned flags) {
  return queue(stream, (struct work){.kind = WAIT, .to = at, .value = value, .flags = flags});
}
int cuGraphLaunch(void *graph, void *stream) {
  num_launches++;
  if (fail_launches) return 700;
  return queue(stream, (struct work){.kind = LAUNCH, .graph = (void (*)(void))graph});
}

// For tests.

void *made_up_stream(void) {
  struct stream *s = calloc(1, sizeof *s);
  pthread_t thread;
  pthread_mutex_init(&s->lock, NULL);
  pthread_cond_init(&s->change, NULL);
  pthread_create(&thread, NULL, serve, s);
  pthread_detach(thread);
  return s;
}
void made_up_failure(int on) { fail_launches = on; }
void made_up_stall(unsigned us) { stall_us = us; }
int made_up_launches(void) { return num_launches; }
