/* What the extension's files share. */
#ifndef RINGSERVE_SHM_RING_H
#define RINGSERVE_SHM_RING_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "_layout.h"

_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "shared words need lock-free atomics");

#define WORD32(base, offset) ((_Atomic uint32_t *)(void *)((base) + (offset)))
#define WORD64(base, offset) ((_Atomic uint64_t *)(void *)((base) + (offset)))
#define LOAD(word) atomic_load_explicit((word), memory_order_relaxed)
#define STORE(word, value) atomic_store_explicit((word), (value), memory_order_relaxed)
#define LOAD_ACQUIRE(word) atomic_load_explicit((word), memory_order_acquire)
#define STORE_RELEASE(word, value) atomic_store_explicit((word), (value), memory_order_release)
#define EXCHANGE(word, value) atomic_exchange_explicit((word), (value), memory_order_seq_cst)

/* Between "I wrote my word" and "I read yours". x86 needs it too: stores wait in a buffer while later loads run.
 * RINGSERVE_WITHOUT_FENCES exists to show that the stress test notices. */
#ifdef RINGSERVE_WITHOUT_FENCES
#define FULL_FENCE() atomic_signal_fence(memory_order_seq_cst)
#else
#define FULL_FENCE() atomic_thread_fence(memory_order_seq_cst)
#endif

/* ringserve.shm.errors, looked up once when the module is imported. */
struct errors {
    PyObject *shm_error, *message_too_large, *channel_closed, *peer_died, *corrupt_frame, *attach_error, *forked_use;
};
extern struct errors errors;

/* Changes in a child of fork(): an object that remembers another value belongs to the parent. */
unsigned fork_generation(void);

/* One process's doorbell, mapped. */
typedef struct {
    PyObject_HEAD
    char *page;
    int event_fd;
    int waiting; /* threads inside wait(): the page must stay mapped */
    unsigned generation;
    uint64_t arms, refused_arms, waits, wakes, rings, spurious_wakes, spins;
    uint64_t progress; /* of all ends at the last arm: did a wake-up lead to anything? */
    bool woken;        /* rung since the last arm */
    uint64_t spin_max_ns, spin_ns; /* allowed, and worth it at present */
    unsigned vain_spins, spin_pause; /* in a row without success; arms until it is tried again */
} Bell;
extern PyTypeObject *bell_type;
extern PyType_Spec bell_spec;
/* Call after storing what the owner shall see: wakes it if it sleeps. 1 if the eventfd was written. */
int bell_notify(Bell *bell);
void bell_release(Bell *bell);

/* One end's view of a ring segment. */
typedef struct {
    char *base, *data;
    uint64_t capacity, mask;
    uint32_t max_frame;
    unsigned generation;
    PyObject *name; /* str, for messages */
    Bell *peer;     /* the other end's doorbell */
} Segment;
/* Arguments of both ends: name, fd, peer, capacity, max_frame, ring_id, session_id. */
int segment_attach(Segment *segment, PyObject *args, unsigned state_word);
void segment_release(Segment *segment);
/* 0, or -1 with an exception: closed here, or inherited by fork. */
int segment_check(const Segment *segment);

typedef struct RingProducer RingProducer;
typedef struct RingConsumer RingConsumer;
extern PyTypeObject *producer_type, *consumer_type;
extern PyType_Spec producer_spec, consumer_spec;
/* For arm(): has the space it waits for (or learned that there will be none). */
bool producer_ready(RingProducer *producer);
/* Changes when a producer that waited has put something; of a consumer, when it has taken something. */
uint64_t producer_progress(const RingProducer *producer);
uint64_t consumer_progress(const RingConsumer *consumer);
/* For arm(): drain() would return or raise something new. */
bool consumer_ready(RingConsumer *consumer);

#endif
