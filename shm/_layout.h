/* The shared layout, written once, as data.
 *
 * Ring segment (a sealed memfd of 4096 + C bytes; C a power of two):
 *
 *   0x0000  +----------------------------------------------------+
 *           | magic, version, C, max_frame, ids     (creator)    |  never written again
 *   0x0080  +----------------------------------------------------+
 *           | tail, prod_state, counters            (producer)   |
 *   0x0100  +----------------------------------------------------+
 *           | head, counters                        (consumer)   |
 *   0x0180  +----------------------------------------------------+
 *           | want_space (both), cons_state (consumer)           |  quiet unless the ring is full
 *   0x1000  +----------------------------------------------------+
 *           | frame | frame | frame | ...           (producer)   |
 *   0x1000+C +---------------------------------------------------+
 *           | the same C bytes, mapped once more: a frame that   |
 *           | runs over the end is still contiguous              |
 *           +----------------------------------------------------+
 *
 * tail and head are positions in bytes since the beginning: 64 bits, never wrapping; data[position & (C - 1)].
 * Lines written by different processes lie 128 bytes apart (adjacent lines are prefetched in pairs). cons_state lies
 * beside want_space and not beside head, so that a producer may look at it before every put without pulling over
 * the line that the consumer keeps writing.
 *
 * Frame: u32 length of the payload, u8 kind, u8 flags (0), u16 sequence number, payload, padding to 8 bytes.
 * The first frame of a fragmented message begins with the u64 length of the whole message.
 *
 * Doorbell page (a sealed memfd of 4096 bytes): what one process tells the others.
 */
#ifndef RINGSERVE_SHM_LAYOUT_H
#define RINGSERVE_SHM_LAYOUT_H

/*      name                 offset  bytes  written by */
#define RING_FIELDS(FIELD)                             \
    FIELD(RING_MAGIC,          0x000, 8, "creator")    \
    FIELD(RING_LAYOUT_VERSION, 0x008, 4, "creator")    \
    FIELD(RING_DATA_OFFSET,    0x00C, 4, "creator")    \
    FIELD(RING_CAPACITY,       0x010, 8, "creator")    \
    FIELD(RING_MAX_FRAME,      0x018, 4, "creator")    \
    FIELD(RING_ID,             0x01C, 4, "creator")    \
    FIELD(RING_SESSION_ID,     0x020, 8, "creator")    \
    FIELD(RING_TAIL,           0x080, 8, "producer")   \
    FIELD(RING_PROD_STATE,     0x088, 4, "producer")   \
    FIELD(RING_PROD_MESSAGES,  0x090, 8, "producer")   \
    FIELD(RING_PROD_BYTES,     0x098, 8, "producer")   \
    FIELD(RING_PROD_FULL,      0x0A0, 8, "producer")   \
    FIELD(RING_PROD_RINGS,     0x0A8, 8, "producer")   \
    FIELD(RING_HEAD,           0x100, 8, "consumer")   \
    FIELD(RING_CONS_MESSAGES,  0x108, 8, "consumer")   \
    FIELD(RING_CONS_BYTES,     0x110, 8, "consumer")   \
    FIELD(RING_CONS_RINGS,     0x118, 8, "consumer")   \
    FIELD(RING_CONS_HIGH_WATER, 0x120, 8, "consumer")  \
    FIELD(RING_WANT_SPACE,     0x180, 4, "both")       \
    FIELD(RING_CONS_STATE,     0x184, 4, "consumer")

#define BELL_FIELDS(FIELD)                             \
    FIELD(BELL_MAGIC,          0x000, 8, "creator")    \
    FIELD(BELL_LAYOUT_VERSION, 0x008, 4, "creator")    \
    FIELD(BELL_ASLEEP,         0x080, 4, "both")       \
    FIELD(BELL_HEARTBEAT_NS,   0x100, 8, "owner")      \
    FIELD(BELL_PHASE,          0x108, 4, "owner")      \
    FIELD(BELL_PID,            0x10C, 4, "owner")      \
    FIELD(BELL_ARMS,           0x110, 8, "owner")      \
    FIELD(BELL_REFUSED_ARMS,   0x118, 8, "owner")      \
    FIELD(BELL_WAITS,          0x120, 8, "owner")      \
    FIELD(BELL_WAKES,          0x128, 8, "owner")      \
    FIELD(BELL_SPURIOUS_WAKES, 0x130, 8, "owner")      \
    FIELD(BELL_SPINS,          0x138, 8, "owner")

#define AS_CONSTANT(name, offset, bytes, writer) name = offset,
enum { RING_FIELDS(AS_CONSTANT) BELL_FIELDS(AS_CONSTANT) };
#undef AS_CONSTANT

enum {
    LAYOUT_VERSION = 2,
    HEADER_SIZE = 4096, /* of a ring; also the size of a doorbell page */
    FRAME_HEADER = 8,
    MIN_CAPACITY = 64 * 1024,
    MAX_FRAME = 64 * 1024,        /* header included */
    MAX_MESSAGE = 64 * 1024 * 1024, /* all fragments together */
};
#define MAX_CAPACITY (UINT64_C(1) << 30)
#define RING_MAGIC_VALUE UINT64_C(0x31676e6972767372) /* "rsvring1", little endian */
#define BELL_MAGIC_VALUE UINT64_C(0x316c6c6562767372) /* "rsvbell1", little endian */

enum frame_kind { FRAME_WHOLE = 0, FRAME_FIRST = 1, FRAME_MIDDLE = 2, FRAME_LAST = 3 /* 4: close, on sockets */ };
enum end_state { END_NEW = 0, END_ATTACHED = 1, END_CLOSED = 2 };

#endif
