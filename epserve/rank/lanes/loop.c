// The thread of a rank that serves lanes on its GPU. It sees each bell once, checks it, launches the captured graphs of the step on the
// rank's stream, and queues the answer behind them. Built with the C compiler at hand (native.py). The driver is opened at run time.
//
// A page of words belongs to one client, which can write anything there at any time. The thread therefore reads nothing from a page but
// bells, each bell once, and uses it as it was read. Addresses and finished jobs come from memory that no client has.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

typedef uint32_t u32;
typedef uint64_t u64;

enum { MODES = 2, SLOTS = 8, PARTS = 8, SIZES = 32, RING = 64, LANES = 256, LAYERS = 1 << 14, COUNTS = 6 };
enum { BAD_HEADER = 1 };                               // protocol/lane_words.py
enum { BELL_AT = 128, ANSWER_AT = 192, PER_SLOT = 128, ARRIVED_AT = 8 };  // likewise
enum { NO_ERROR = 0, NO_DRIVER = -1, NO_SYMBOL = -2, STUCK = -3 };

struct driver {
  int (*set_context)(void *);
  int (*copy)(u64 to, u64 from, size_t bytes, void *stream);
  int (*fill)(u64 to, unsigned value, size_t words, void *stream);
  int (*write)(void *stream, u64 to, u32 value, unsigned flags);
  int (*launch)(void *graph, void *stream);
};

// One static batch of the rank's graphs. `before` and `after` are graphs that all layers share, by mode. 0: none.
struct batch {
  u64 x, ids, weights, count, part, status, out;
  u32 tokens, row_bytes, top_k, pad;
  u64 before[MODES], after[MODES];
};
struct size { u64 graph; u32 batch, tokens; };
struct layer { struct size sizes[MODES][SIZES]; };

// Where a lane lies. x and y are offsets in a slot on the GPU, ids and weights from the start of the page, in the first slot.
struct place { u64 page, page_device, rows, slot_bytes, x, y, routing_bytes, ids, weights; u32 slots, most; };
struct slot { u32 taken, job; u64 seen; };
struct counts { u64 calls, tokens, joined, refused, failed, busy_ns; };
struct lane { _Atomic int open; struct place at; uint8_t *layers; struct slot slot[SLOTS]; struct counts counts; };

struct limits { u64 hot_ns, nap_ns, longest_nap_ns, join_ns, stuck_ns; u32 join_thousandths, pad; };

struct loop {
  struct driver driver;
  void *context, *stream;
  struct limits limits;
  volatile u32 *finished;
  u64 finished_device;
  struct batch *batches;
  struct layer **layers;  // by number
  struct lane lanes[LANES];
  u32 num_lanes, num_open, launched;
  u64 launched_at, ended_at, last_step_ns;
  u32 ended, joined_last;
  pthread_mutex_t turn;
  pthread_cond_t work;
  pthread_t thread;
  int running;
  _Atomic int stop, waiting, error;
  _Atomic u64 rounds, cpu_ns;
};

static u64 now_ns(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return (u64)t.tv_sec * 1000000000ull + (u64)t.tv_nsec;
}

static u64 *word(const struct lane *l, u32 at) { return (u64 *)(l->at.page + at); }
static u32 number_of(u64 bell) { return (u32)(bell >> 32); }
static u32 mode_of(u64 bell) { return (u32)(bell >> 30) & 3; }
static u32 layer_of(u64 bell) { return (u32)(bell >> 16) & (LAYERS - 1); }
static u32 tokens_of(u64 bell) { return (u32)bell & 0xffff; }
static u32 in_flight(const struct loop *d) { return d->launched - *d->finished; }
static int has_ended(const struct loop *d, u32 job) { return (int32_t)(*d->finished - job) >= 0; }

static const struct size *size_for(const struct loop *d, u32 layer, u32 mode, u32 tokens) {
  if (mode >= MODES || !d->layers[layer]) return NULL;
  for (u32 i = 0; i < SIZES; i++) {
    const struct size *s = &d->layers[layer]->sizes[mode][i];
    if (s->graph && tokens <= s->tokens) return s;
  }
  return NULL;
}

static u32 most_of(const struct loop *d, u32 layer, u32 mode) {
  u32 most = 0;
  for (u32 i = 0; i < SIZES; i++)
    if (d->layers[layer]->sizes[mode][i].graph) most = d->layers[layer]->sizes[mode][i].tokens;
  return most;
}

static void answer(struct lane *l, u32 slot, u32 number, u32 status) {
  char *at = (char *)word(l, ANSWER_AT + PER_SLOT * slot);
  __atomic_store_n((u64 *)at, (u64)number << 32 | status, __ATOMIC_RELEASE);
  __atomic_store_n((u32 *)(at + ARRIVED_AT), 1u, __ATOMIC_RELEASE);
}

struct found { u32 lane, slot; u64 bell; };

static int is_among(const struct found *found, u32 n, u32 lane, u32 slot) {
  for (u32 f = 0; f < n; f++)
    if (found[f].lane == lane && found[f].slot == slot) return 1;
  return 0;
}

// Looks at every bell once. Calls of one layer and mode become one step, up to its largest size.
static u32 look(struct loop *d, struct found *found, u32 n, u32 *total, u32 first) {
  for (u32 k = 0; k < d->num_lanes && n < PARTS; k++) {
    u32 i = (first + k) % d->num_lanes;
    struct lane *l = &d->lanes[i];
    if (!atomic_load_explicit(&l->open, memory_order_acquire)) continue;
    for (u32 s = 0; s < l->at.slots && n < PARTS; s++) {
      struct slot *held = &l->slot[s];
      u64 bell = __atomic_load_n(word(l, BELL_AT + PER_SLOT * s), __ATOMIC_ACQUIRE);
      u32 number = number_of(bell), mode = mode_of(bell), layer = layer_of(bell), tokens = tokens_of(bell);
      if (number == held->taken || (held->job && !has_ended(d, held->job)) || is_among(found, n, i, s)) continue;
      int known = l->layers[layer] && size_for(d, layer, mode, tokens);
      if (!known && l->layers[layer] && mode < MODES && !d->layers[layer]) continue;  // no graphs now: the call waits
      if (number != held->taken + 1 || !known || tokens < 1 || tokens > l->at.most) {
        held->taken = number;
        l->counts.calls++, l->counts.refused++;
        answer(l, s, number, BAD_HEADER);
        continue;
      }
      if (n && (layer_of(found[0].bell) != layer || mode_of(found[0].bell) != mode || *total + tokens > most_of(d, layer, mode)))
        continue;  // in a later step
      held->seen = now_ns(CLOCK_MONOTONIC);
      found[n++] = (struct found){i, s, bell};
      *total += tokens;
    }
  }
  return n;
}

static int launch(struct loop *d, const struct found *found, u32 n, u32 total) {
  u32 mode = mode_of(found[0].bell), job = d->launched + 1, row = 0;
  const struct size *size = size_for(d, layer_of(found[0].bell), mode, total);
  const struct batch *b = &d->batches[size->batch];
  const struct driver *c = &d->driver;
  u64 routing = 4ull * b->top_k;
  int e = 0;
  for (u32 f = 0; f < n && !e; f++) {
    struct lane *l = &d->lanes[found[f].lane];
    u32 tokens = tokens_of(found[f].bell);
    u64 rows = l->at.rows + found[f].slot * l->at.slot_bytes;
    e = c->copy(b->x + (u64)row * b->row_bytes, rows + l->at.x, (size_t)tokens * b->row_bytes, d->stream);
    u64 given = l->at.page_device + found[f].slot * l->at.routing_bytes;
    if (!e && mode) e = c->copy(b->ids + row * routing, given + l->at.ids, tokens * routing, d->stream);
    if (!e && mode) e = c->copy(b->weights + row * routing, given + l->at.weights, tokens * routing, d->stream);
    if (!e) e = c->fill(b->part + 4ull * row, f, tokens, d->stream);
    row += tokens;
  }
  if (!e && row < b->tokens) e = c->fill(b->part + 4ull * row, PARTS, b->tokens - row, d->stream);
  if (!e) e = c->fill(b->count, row, 1, d->stream);
  if (!e && b->before[mode]) e = c->launch((void *)b->before[mode], d->stream);
  if (!e) e = c->launch((void *)size->graph, d->stream);
  if (!e) e = c->launch((void *)b->after[mode], d->stream);
  row = 0;
  for (u32 f = 0; f < n && !e; f++) {
    struct lane *l = &d->lanes[found[f].lane];
    struct slot *held = &l->slot[found[f].slot];
    u32 tokens = tokens_of(found[f].bell), number = number_of(found[f].bell);
    u64 rows = l->at.rows + found[f].slot * l->at.slot_bytes;
    u64 said = l->at.page_device + ANSWER_AT + PER_SLOT * found[f].slot;
    held->taken = number, held->job = job;
    l->counts.calls++, l->counts.tokens += tokens, l->counts.joined += n > 1;  // before the client can see an answer
    e = c->copy(rows + l->at.y, b->out + (u64)row * b->row_bytes, (size_t)tokens * b->row_bytes, d->stream);
    // The status, then the number: the stream keeps the order, and a write of a value has a fence of the whole system before it.
    if (!e) e = c->copy(said, b->status + 4ull * f, 4, d->stream);
    if (!e) e = c->write(d->stream, said + 4, number, 0);
    if (!e) e = c->write(d->stream, said + ARRIVED_AT, 1, 0);
    row += tokens;
  }
  if (!e) e = c->write(d->stream, d->finished_device, job, 0);
  d->launched = job;
  d->launched_at = now_ns(CLOCK_MONOTONIC);
  d->joined_last = n;
  return e;
}

// Notes jobs that have ended. The time of a step begins when it is launched, or when the one before it has ended.
static void note_ends(struct loop *d, u64 now) {
  u32 finished = *d->finished;
  if (finished == d->ended) return;
  u64 began = d->ended_at > d->launched_at ? d->ended_at : d->launched_at;
  if (finished == d->launched && d->launched - d->ended == 1 && now > began) d->last_step_ns = now - began;
  d->ended = finished, d->ended_at = now;
  for (u32 i = 0; i < d->num_lanes; i++) {
    struct lane *l = &d->lanes[i];
    if (!atomic_load(&l->open)) continue;
    for (u32 s = 0; s < l->at.slots; s++) {
      struct slot *held = &l->slot[s];
      if (!held->job || !has_ended(d, held->job)) continue;
      held->job = 0;
      l->counts.busy_ns += now - held->seen;
      l->counts.failed += (u32)__atomic_load_n(word(l, ANSWER_AT + PER_SLOT * s), __ATOMIC_ACQUIRE) != 0;  // a count only
    }
  }
}

static void nap(struct loop *d, u64 idle) {
  // Naps grow with the time without a call, so that an idle thread takes little.
  u64 ns = d->limits.nap_ns, grown = idle / 64;
  if (grown > ns) ns = grown < d->limits.longest_nap_ns ? grown : d->limits.longest_nap_ns;
  struct timespec t = {(time_t)(ns / 1000000000ull), (long)(ns % 1000000000ull)};
  nanosleep(&t, NULL);
}

static void *run(void *given) {
  struct loop *d = given;
  prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
  int e = d->driver.set_context(d->context);
  u64 last = now_ns(CLOCK_MONOTONIC);
  u32 first = 0, quiet = 0;
  while (!e && !atomic_load(&d->stop)) {
    pthread_mutex_lock(&d->turn);
    while (!d->num_open && !atomic_load(&d->stop)) pthread_cond_wait(&d->work, &d->turn);
    pthread_mutex_unlock(&d->turn);
    struct found found[PARTS];
    u32 total = 0, n = 0, kept = 0;
    u64 now = now_ns(CLOCK_MONOTONIC);
    // Whoever else has work for the stream goes first: a mutex alone would leave it to chance.
    int mine = !atomic_load(&d->waiting) && pthread_mutex_trylock(&d->turn) == 0;
    if (mine) {
      note_ends(d, now);
      if (in_flight(d) < RING) n = look(d, found, 0, &total, first);
      u64 share = d->last_step_ns * d->limits.join_thousandths / 1000, until = now + (share < d->limits.join_ns ? share : d->limits.join_ns);
      while (n && n < d->joined_last && n < PARTS && now_ns(CLOCK_MONOTONIC) < until) n = look(d, found, n, &total, first);
      for (u32 f = 0; f < n; f++)
        if (atomic_load(&d->lanes[found[f].lane].open)) found[kept++] = found[f];
      if (kept) {
        e = launch(d, found, kept, total);
        first = (found[0].lane + 1) % d->num_lanes;
        last = now;
      }
      pthread_mutex_unlock(&d->turn);
    }
    atomic_fetch_add(&d->rounds, 1);
    u64 since = d->launched_at > d->ended_at ? d->launched_at : d->ended_at;
    if (in_flight(d) && now > since && now - since > d->limits.stuck_ns) e = STUCK;
    if ((++quiet & 255) == 0) atomic_store(&d->cpu_ns, now_ns(CLOCK_THREAD_CPUTIME_ID));
    if (kept) continue;
    if (!mine || now - last > d->limits.hot_ns) nap(d, now - last);
    else __builtin_ia32_pause();
  }
  if (e) atomic_store(&d->error, e);
  return NULL;
}

// ---- what native.py calls ----

struct loop *loop_new(const char *library, void *context, void *stream, u32 *finished, u64 finished_device, const struct limits *limits,
                      u32 num_batches, int *error) {
  struct loop *d = calloc(1, sizeof *d);
  void *lib = dlopen(library, RTLD_NOW);
  *error = !d || !lib ? NO_DRIVER : NO_ERROR;
  if (*error) return NULL;
  struct { void **to; const char *name; } wanted[] = {
      {(void **)&d->driver.set_context, "cuCtxSetCurrent"}, {(void **)&d->driver.copy, "cuMemcpyAsync"},
      {(void **)&d->driver.fill, "cuMemsetD32Async"},       {(void **)&d->driver.write, "cuStreamWriteValue32_v2"},
      {(void **)&d->driver.launch, "cuGraphLaunch"},
  };
  for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
    if (!(*wanted[i].to = dlsym(lib, wanted[i].name))) *error = NO_SYMBOL;
  d->batches = calloc(num_batches, sizeof *d->batches);
  d->layers = calloc(LAYERS, sizeof *d->layers);
  if (!d->batches || !d->layers) *error = NO_DRIVER;
  if (*error) return NULL;
  d->context = context, d->stream = stream, d->finished = finished, d->finished_device = finished_device, d->limits = *limits;
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
  pthread_mutex_init(&d->turn, &attributes);
  pthread_cond_init(&d->work, NULL);
  return d;
}

int loop_start(struct loop *d) {
  d->running = pthread_create(&d->thread, NULL, run, d) == 0;
  return d->running;
}

void loop_stop(struct loop *d) {
  atomic_store(&d->stop, 1);
  pthread_mutex_lock(&d->turn);
  pthread_cond_broadcast(&d->work);
  pthread_mutex_unlock(&d->turn);
  if (d->running) pthread_join(d->thread, NULL);
  d->running = 0;
}

void loop_free(struct loop *d) {
  for (u32 i = 0; i < LAYERS; i++) free(d->layers[i]);
  for (u32 i = 0; i < LANES; i++) free(d->lanes[i].layers);
  free(d->layers);
  free(d->batches);
  free(d);
}

// The thread launches nothing between the two. One thread may take its turn twice.
void loop_hold(struct loop *d) {
  atomic_fetch_add(&d->waiting, 1);
  pthread_mutex_lock(&d->turn);
}
void loop_release(struct loop *d) {
  pthread_mutex_unlock(&d->turn);
  atomic_fetch_sub(&d->waiting, 1);
}

// Waits for the jobs that were launched. Returns 0 when they have not ended in time.
int loop_drained(struct loop *d, u64 timeout_ns) {
  u64 until = now_ns(CLOCK_MONOTONIC) + timeout_ns;
  struct timespec t = {0, 20000};
  while (in_flight(d)) {
    if (atomic_load(&d->error) || now_ns(CLOCK_MONOTONIC) > until) return 0;
    nanosleep(&t, NULL);
  }
  return 1;
}

u32 loop_launched(struct loop *d) { return d->launched; }
int loop_error(struct loop *d) { return atomic_load(&d->error); }
u64 loop_cpu_ns(struct loop *d) { return atomic_load(&d->cpu_ns); }

// The table of graphs. The caller holds the turn.
void loop_set_batch(struct loop *d, u32 number, const struct batch *batch) { d->batches[number] = *batch; }

void loop_clear(struct loop *d) {
  for (u32 i = 0; i < LAYERS; i++) {
    free(d->layers[i]);
    d->layers[i] = NULL;
  }
}

int loop_set_graph(struct loop *d, u32 layer, u32 mode, u32 batch, u64 graph) {
  if (layer >= LAYERS || mode >= MODES) return 0;
  if (!d->layers[layer] && !(d->layers[layer] = calloc(1, sizeof *d->layers[layer]))) return 0;
  for (u32 i = 0; i < SIZES; i++) {
    struct size *s = &d->layers[layer]->sizes[mode][i];
    if (s->graph) continue;
    *s = (struct size){graph, batch, d->batches[batch].tokens};
    return 1;
  }
  return 0;
}

// `layers`: LAYERS bytes, 1 for each layer that may be called. A bell without an answer counts as a call that has not been seen.
int loop_open(struct loop *d, const struct place *place, const uint8_t *layers, const u32 *answered) {
  for (u32 i = 0; i < LANES; i++) {
    struct lane *l = &d->lanes[i];
    if (atomic_load(&l->open)) continue;
    if (!l->layers && !(l->layers = malloc(LAYERS))) return -1;
    memcpy(l->layers, layers, LAYERS);
    memset(l->slot, 0, sizeof l->slot);
    memset(&l->counts, 0, sizeof l->counts);
    l->at = *place;
    for (u32 s = 0; s < place->slots; s++) l->slot[s].taken = answered[s];
    if (i >= d->num_lanes) d->num_lanes = i + 1;
    d->num_open++;
    atomic_store_explicit(&l->open, 1, memory_order_release);
    pthread_cond_broadcast(&d->work);
    return (int)i;
  }
  return -1;
}

// The caller holds the turn, so the thread is not looking at the lane's page, and does not look at it again.
void loop_close(struct loop *d, u32 lane) {
  if (atomic_exchange(&d->lanes[lane].open, 0)) d->num_open--;
}

void loop_counts(struct loop *d, u32 lane, u64 *out) { memcpy(out, &d->lanes[lane].counts, sizeof(u64) * COUNTS); }
