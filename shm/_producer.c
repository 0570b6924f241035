/* The producer's end of a ring: put frames, publish them, ring the consumer's doorbell. */
#include "_ring.h"

#include <string.h>

struct RingProducer {
    PyObject_HEAD
    Segment segment;
    uint64_t tail;      /* where the next frame goes; private until flush() */
    uint64_t published; /* what the consumer may see */
    uint64_t head;      /* the consumer's position as last read */
    uint64_t part_offset, part_total; /* a message put in parts: how far, how long; 0, 0 between messages */
    uint64_t messages, bytes, full, rings, resumed; /* resumed: how often it got the space it waited for */
    uint16_t sequence;
    bool in_parts, waiting; /* waiting: FULL was answered, and not put since */
};

static uint64_t frame_size(uint64_t payload) { return (FRAME_HEADER + payload + 7) & ~UINT64_C(7); }

static uint32_t max_payload(const RingProducer *p) { return p->segment.max_frame - FRAME_HEADER; }

/* Read the consumer's position; -1 with an exception if it cannot be one. */
static int load_head(RingProducer *p) {
    uint64_t head = LOAD_ACQUIRE(WORD64(p->segment.base, RING_HEAD)); /* pairs with the release in publish_head:
                                                                         what lies before it has been copied out */
    if (head - p->head > p->published - p->head || head % 8 != 0) {
        PyErr_Format(errors.corrupt_frame, "channel %S: the consumer's position is impossible", p->segment.name);
        return -1;
    }
    p->head = head;
    return 0;
}

static bool fits(const RingProducer *p, uint64_t need) { return p->tail + need - p->head <= p->segment.capacity; }

static void publish(RingProducer *p) {
    if (p->published == p->tail)
        return;
    char *base = p->segment.base;
    STORE(WORD64(base, RING_PROD_MESSAGES), p->messages);
    STORE(WORD64(base, RING_PROD_BYTES), p->bytes);
    STORE_RELEASE(WORD64(base, RING_TAIL), p->tail); /* pairs with the acquire in the consumer's load_tail */
    p->published = p->tail;
    if (bell_notify(p->segment.peer)) /* begins with the full fence between the tail's store and `asleep`'s load */
        STORE(WORD64(base, RING_PROD_RINGS), ++p->rings);
}

/* Is there room for `need` bytes? 1, 0, -1. When there is not, the consumer knows that we want some. */
static int make_room(RingProducer *p, uint64_t need) {
    if (fits(p, need))
        return 1;
    if (load_head(p) < 0)
        return -1;
    if (fits(p, need))
        return 1;
    publish(p); /* frames the consumer cannot see would never make room */
    _Atomic uint32_t *want_space = WORD32(p->segment.base, RING_WANT_SPACE);
    STORE(want_space, 1);
    FULL_FENCE(); /* pairs with the one in publish_head: either we see its head, or it sees our wish */
    if (load_head(p) < 0)
        return -1;
    if (fits(p, need)) {
        STORE(want_space, 0);
        return 1;
    }
    p->waiting = true;
    STORE(WORD64(p->segment.base, RING_PROD_FULL), ++p->full);
    return 0;
}

static void write_frame(RingProducer *p, unsigned kind, const char *data, uint32_t length, const uint64_t *total) {
    char *frame = p->segment.data + (p->tail & p->segment.mask);
    uint32_t prefix = total != NULL ? (uint32_t)sizeof *total : 0, payload = prefix + length;
    uint8_t header[FRAME_HEADER];
    memcpy(header, &payload, 4);
    header[4] = (uint8_t)kind;
    header[5] = 0;
    memcpy(header + 6, &p->sequence, 2);
    memcpy(frame, header, FRAME_HEADER);
    if (prefix != 0)
        memcpy(frame + FRAME_HEADER, total, prefix);
    memcpy(frame + FRAME_HEADER + prefix, data, length);
    p->sequence++;
    p->tail += frame_size(payload);
    p->bytes += length;
    p->resumed += p->waiting;
    p->waiting = false;
}

static int check(RingProducer *p) {
    if (segment_check(&p->segment) < 0)
        return -1;
    if (LOAD_ACQUIRE(WORD32(p->segment.base, RING_CONS_STATE)) == END_CLOSED) {
        p->waiting = false;
        PyErr_Format(errors.channel_closed, "channel %S: the consumer closed", p->segment.name);
        return -1;
    }
    return 0;
}

static PyObject *producer_try_put(RingProducer *p, PyObject *message) {
    if (check(p) < 0)
        return NULL;
    if (p->in_parts) {
        PyErr_Format(errors.shm_error, "channel %S: a message put in parts is not complete", p->segment.name);
        return NULL;
    }
    Py_buffer view;
    if (PyObject_GetBuffer(message, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    int room = -1;
    if ((uint64_t)view.len > max_payload(p)) {
        PyErr_Format(errors.message_too_large, "channel %S: %zd bytes do not fit one frame (%u); put it in parts",
                     p->segment.name, view.len, (unsigned)max_payload(p));
    } else if ((room = make_room(p, frame_size((uint64_t)view.len))) == 1) {
        write_frame(p, FRAME_WHOLE, view.buf, (uint32_t)view.len, NULL);
        p->messages++;
    }
    PyBuffer_Release(&view);
    return room < 0 ? NULL : PyBool_FromLong(room);
}

/* One fragment at p->part_offset: 1, 0 (no room), -1. */
static int put_fragment(RingProducer *p, const char *data, uint64_t total) {
    uint64_t offset = p->part_offset, left = total - offset;
    uint32_t room_in_frame = max_payload(p) - (offset == 0 ? 8 : 0);
    uint32_t length = left < room_in_frame ? (uint32_t)left : room_in_frame;
    int room = make_room(p, frame_size(length + (offset == 0 ? 8 : 0)));
    if (room != 1)
        return room;
    unsigned kind = offset == 0 ? FRAME_FIRST : length == left ? FRAME_LAST : FRAME_MIDDLE;
    write_frame(p, kind, data + offset, length, offset == 0 ? &total : NULL);
    p->part_offset += length;
    return 1;
}

static PyObject *producer_put_part(RingProducer *p, PyObject *args) {
    Py_buffer view;
    unsigned long long offset;
    if (check(p) < 0 || !PyArg_ParseTuple(args, "y*K", &view, &offset))
        return NULL;
    uint64_t total = (uint64_t)view.len;
    PyObject *result = NULL;
    if (total > MAX_MESSAGE) {
        PyErr_Format(errors.message_too_large, "channel %S: %zd bytes are more than a message may have (%d)",
                     p->segment.name, view.len, (int)MAX_MESSAGE);
    } else if (total <= max_payload(p) || (p->in_parts ? offset != p->part_offset || total != p->part_total
                                                       : offset != 0)) {
        PyErr_SetString(PyExc_ValueError, "not the next part of a message longer than a frame");
    } else {
        p->in_parts = true;
        p->part_total = total;
        int room = 1;
        while (room == 1 && p->part_offset < total)
            room = put_fragment(p, view.buf, total);
        if (room >= 0)
            result = PyLong_FromUnsignedLongLong(p->part_offset);
        if (p->part_offset == total)
            p->messages++;
        if (p->part_offset == total || p->part_offset == 0) {
            p->in_parts = false;
            p->part_offset = p->part_total = 0;
        }
    }
    PyBuffer_Release(&view);
    return result;
}

static PyObject *producer_flush(RingProducer *p, PyObject *Py_UNUSED(ignored)) {
    if (segment_check(&p->segment) < 0)
        return NULL;
    publish(p);
    Py_RETURN_NONE;
}

bool producer_ready(RingProducer *p) {
    if (p->segment.base == NULL || !p->waiting)
        return false;
    return LOAD_ACQUIRE(WORD32(p->segment.base, RING_WANT_SPACE)) == 0 ||
           LOAD_ACQUIRE(WORD32(p->segment.base, RING_CONS_STATE)) == END_CLOSED;
}

uint64_t producer_progress(const RingProducer *p) { return p->resumed; }

static PyObject *producer_close(RingProducer *p, PyObject *Py_UNUSED(ignored)) {
    /* In a child of fork() the shared words are the parent's; only the mappings here are ours to drop. */
    if (p->segment.base != NULL && p->segment.generation == fork_generation()) {
        publish(p);
        STORE_RELEASE(WORD32(p->segment.base, RING_PROD_STATE), (uint32_t)END_CLOSED);
        bell_notify(p->segment.peer);
    }
    segment_release(&p->segment);
    Py_RETURN_NONE;
}

static int producer_init(RingProducer *p, PyObject *args, PyObject *kwargs) {
    if (kwargs != NULL && PyDict_Size(kwargs) != 0) {
        PyErr_SetString(PyExc_TypeError, "RingProducer takes no keyword arguments");
        return -1;
    }
    return segment_attach(&p->segment, args, RING_PROD_STATE);
}

static void producer_dealloc(RingProducer *p) {
    segment_release(&p->segment);
    Py_CLEAR(p->segment.name);
    PyTypeObject *type = Py_TYPE((PyObject *)p);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(p);
    Py_DECREF(type);
}

static PyObject *producer_counters(RingProducer *p, PyObject *Py_UNUSED(ignored)) {
    uint64_t head = p->segment.base == NULL ? p->tail : LOAD(WORD64(p->segment.base, RING_HEAD));
    return Py_BuildValue("(KKKKK)", (unsigned long long)p->messages, (unsigned long long)p->bytes,
                         (unsigned long long)p->full, (unsigned long long)p->rings,
                         (unsigned long long)(p->tail - head));
}

static PyObject *producer_max_payload(RingProducer *p, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLong(p->segment.max_frame - FRAME_HEADER);
}

static PyMethodDef producer_methods[] = {
    {"try_put", (PyCFunction)producer_try_put, METH_O, "Put a message of one frame; False if there is no room."},
    {"put_part", (PyCFunction)producer_put_part, METH_VARARGS,
     "put_part(message, offset): put what fits of a message longer than a frame; the next offset."},
    {"flush", (PyCFunction)producer_flush, METH_NOARGS, "Publish what was put; ring the consumer if it sleeps."},
    {"counters", (PyCFunction)producer_counters, METH_NOARGS, "(messages, bytes, full, doorbell_writes, used)"},
    {"close", (PyCFunction)producer_close, METH_NOARGS, "Publish, tell the consumer that no more comes, unmap."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef producer_attributes[] = {
    {"max_payload", (getter)producer_max_payload, NULL, "Longest message of one frame, in bytes.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot producer_slots[] = {
    {Py_tp_init, producer_init},       {Py_tp_dealloc, producer_dealloc},
    {Py_tp_new, PyType_GenericNew},    {Py_tp_methods, producer_methods},
    {Py_tp_getset, producer_attributes}, {0, NULL},
};

PyType_Spec producer_spec = {.name = "ringserve.shm._ring.RingProducer",
                             .basicsize = sizeof(RingProducer),
                             .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                             .slots = producer_slots};
