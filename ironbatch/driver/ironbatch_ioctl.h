/* SPDX-License-Identifier: MIT */
/*
 * The UAPI of an Ironbatch device, version 1.0: ioctl numbers, their structs, and what stands in the mapped memory.
 *
 * docs/driver.md says the same at length, with the errors of each call and a checklist for a driver's author;
 * ironbatch/driver/abi.py and ironbatch/kernels/device_records.py declare it in Python. Tests compare the three.
 *
 * Rules that hold everywhere:
 *  - All integers are little-endian, all times absolute nanoseconds of CLOCK_MONOTONIC, all offsets bytes from the
 *    beginning of the mapping unless said otherwise. No struct is padded implicitly, on 32 bits no more than on 64.
 *  - An ioctl copies its struct and nothing else: there are no pointers. What varies in length goes through the ring.
 *  - Fields marked "out" are the device's to fill; the caller sends zeros there. Reserved fields are zero both ways. A
 *    device answers EINVAL to unknown flags and to reserved fields that are not zero, ENOTTY to a request that it does
 *    not know.
 *  - A call that fails has changed nothing, and what it leaves in the caller's struct means nothing.
 *  - A call that a signal interrupts fails with EINTR; the same call again is right, since deadlines are absolute.
 */
#ifndef IRONBATCH_IOCTL_H
#define IRONBATCH_IOCTL_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define IRONBATCH_ABI_MAJOR 1
#define IRONBATCH_ABI_MINOR 0
#define IRONBATCH_SIGNATURE 0x31544249U /* "IBT1" */
#define IRONBATCH_MAGIC 0xBE

/* No time limit; as a deadline_ns. */
#define IRONBATCH_NO_DEADLINE 0x7FFFFFFFFFFFFFFFLL

/* ------------------------------------------------------------------------------------------------------------ calls */

/* Bits of ironbatch_get_info.caps. */
#define IRONBATCH_CAP_MMAP (1ULL << 0)  /* the node itself can be mapped; else the file that GET_MEM_PATH names */
#define IRONBATCH_CAP_COPY (1ULL << 1)  /* takes COPY_BLOCKS records */
#define IRONBATCH_CAP_ZERO (1ULL << 2)  /* takes ZERO_BLOCKS records */
#define IRONBATCH_CAP_RESET (1ULL << 3) /* takes RESET */

/*
 * GET_INFO: who is there, and where things are in the mapping. The caller sends signature and its own version, the
 * device answers with its own, whatever the caller's is. The caller decides: the same abi_major, or no deal.
 *
 * status_off and ring_off are this open file's own: each open() is a context with its own status page and ring.
 */
struct ironbatch_get_info {
	__u32 signature;
	__u16 abi_major;
	__u16 abi_minor;
	__u64 caps;            /* out, as all that follows */
	__u32 num_blocks;      /* device ids are 0 <= id < num_blocks */
	__u32 block_bytes;
	__u32 block_tokens;    /* positions that a block holds */
	__u32 reset_count;     /* the epoch that SUBMIT_BATCH wants to hear */
	__u64 status_off;      /* of struct ironbatch_status; a multiple of 4096 */
	__u64 ring_off;        /* a multiple of 4096 */
	__u64 ring_bytes;      /* a multiple of 4096 */
	__u64 kv_off;          /* block `id` is at kv_off + id * block_bytes; a multiple of 4096 */
	__u64 kv_bytes;        /* num_blocks * block_bytes */
	__u64 map_bytes;       /* map [0, map_bytes), shared, for reading and writing */
	__u8 boot_id[16];      /* another one whenever the device has lost its state otherwise than by RESET */
	__u32 longest_step_us; /* a fence that is not signalled so long after its submission is lost */
	__s32 eos_token_id;    /* -1: none */
	__u64 reserved0[3];
};

/*
 * SUBMIT_BATCH: hand over a run of records. All of them are checked before the call returns, on a copy that the caller
 * cannot change; if it fails, nothing of the batch is done, and GET_ERROR says what was wrong with which record.
 */
struct ironbatch_submit_batch {
	__u64 batch_id;        /* the caller's; the device only logs it */
	__u32 num_seqs;        /* STEP records in the batch */
	__u32 flags;           /* 0 */
	__u32 ring_offset;     /* where the records begin in this context's ring; a multiple of 8 */
	__u32 ring_bytes;      /* their size, padding included; a multiple of 8 */
	__u32 results_offset;  /* where TOKENS records shall go in the ring; a multiple of 8 */
	__u32 results_bytes;   /* room there; a multiple of 8 */
	__s64 deadline_ns;     /* a batch that has not begun by then fails with ETIMEDOUT */
	__u32 epoch;           /* reset_count, as the caller knows it; another one: ESTALE */
	__u32 reserved0;
	__u64 fence;           /* out: 1, 2, 3... of this context */
	__u64 reserved1;
};

/*
 * WAIT_FENCE: return when a batch is over. ETIMEDOUT at the deadline, at once if that is past (which makes it a poll).
 */
struct ironbatch_wait_fence {
	__u64 fence;
	__s64 deadline_ns;
	__u32 flags;           /* 0 */
	__s32 status;          /* out: of that batch: 0, or a negative errno */
	__u64 signaled;        /* out: as in the status page */
	__u64 reserved0;
};

struct ironbatch_query_free_blocks {
	__u32 free;            /* out */
	__u32 total;           /* out */
	__u32 used_by_fd;      /* out: claimed by this context */
	__u32 reserved0;
};

/* Bits of ironbatch_claim_blocks.flags. */
#define IRONBATCH_CLAIM_EXACT (1U << 0) /* all that is wanted, or ENOSPC */

/*
 * CLAIM_BLOCKS: get KV blocks in a row, all zeros, until the file is closed. Without CLAIM_EXACT the longest run that
 * is free, if not all that is wanted; ENOSPC if there is none. Claims add up.
 */
struct ironbatch_claim_blocks {
	__u32 want;            /* at least 1 */
	__u32 first;           /* out: device id of the first block */
	__u32 granted;         /* out */
	__u32 flags;
};

/*
 * GET_MEM_PATH: the file to map instead of the node, where CAP_MMAP is not set (else ENODATA). The caller checks
 * st_dev, st_ino and size of what it has opened there: a path may have been given to another file since.
 */
struct ironbatch_get_mem_path {
	__u64 st_dev;          /* out, as fstat(2) says */
	__u64 st_ino;          /* out */
	__u64 size;            /* out: map_bytes */
	char path[104];        /* out: absolute, ends with a NUL */
};

/*
 * RESET: of the whole device, for all contexts. Batches that are not over fail with ECANCELED and are signalled; what
 * KV blocks hold is lost; claims stay. reset_count rises by one, also in all status pages.
 */
struct ironbatch_reset {
	__u32 flags;           /* 0 */
	__u32 reset_count;     /* out */
	__u64 reserved0;
};

/* As ironbatch_get_error.record and .item: none. */
#define IRONBATCH_NO_INDEX 0xFFFFFFFFU

/* GET_ERROR: this context's newest error, of a refused call or of a batch that has failed. code 0: there was none. */
struct ironbatch_get_error {
	__u64 fence;           /* out: of the batch; 0: a call was refused */
	__s32 code;            /* out: a negative errno */
	__u32 record;          /* out: index of the record in its batch, or NO_INDEX */
	__u32 item;            /* out: index among the record's ids, block ids before token ids, or NO_INDEX */
	__u32 reset_count;     /* out: when it happened */
	__s64 value;           /* out: the value that was at fault, such as a block id */
	char message[96];      /* out: ASCII, ends with a NUL */
};

/* Bits of ironbatch_get_limits.flags. */
#define IRONBATCH_LIMITS_NO_MIX (1U << 0) /* a batch holds either prefills or decodes, not both */

/*
 * GET_LIMITS: what a batch may look like. 0: no limit. Buckets are the batch sizes that the device is compiled for:
 * ascending, up to the first 0 or the array's end; a batch is padded to the next one, by the device. A STEP that
 * has several new tokens or does not emit is a prefill; another may be a decode, or the last token of a prefill.
 */
struct ironbatch_get_limits {
	__u32 max_seqs;          /* out: STEP records in a batch */
	__u32 max_tokens;        /* out: new tokens in a batch */
	__u32 max_prefill_seqs;  /* out: STEP records that are prefills for sure */
	__u32 max_in_flight;     /* out: batches of a context that are not over; one more is EAGAIN */
	__u64 max_batch_context; /* out: padded sequences x longest context_tokens */
	__u32 flags;             /* out */
	__u32 reserved0;
	__u32 seq_buckets[12];   /* out: sequences */
	__u32 token_buckets[12]; /* out: new tokens */
};

#define IRONBATCH_GET_INFO _IOWR(IRONBATCH_MAGIC, 0x00, struct ironbatch_get_info)
#define IRONBATCH_SUBMIT_BATCH _IOWR(IRONBATCH_MAGIC, 0x01, struct ironbatch_submit_batch)
#define IRONBATCH_WAIT_FENCE _IOWR(IRONBATCH_MAGIC, 0x02, struct ironbatch_wait_fence)
#define IRONBATCH_QUERY_FREE_BLOCKS _IOR(IRONBATCH_MAGIC, 0x03, struct ironbatch_query_free_blocks)
#define IRONBATCH_CLAIM_BLOCKS _IOWR(IRONBATCH_MAGIC, 0x04, struct ironbatch_claim_blocks)
#define IRONBATCH_GET_MEM_PATH _IOR(IRONBATCH_MAGIC, 0x05, struct ironbatch_get_mem_path)
#define IRONBATCH_RESET _IOWR(IRONBATCH_MAGIC, 0x06, struct ironbatch_reset)
#define IRONBATCH_GET_ERROR _IOR(IRONBATCH_MAGIC, 0x07, struct ironbatch_get_error)
#define IRONBATCH_GET_LIMITS _IOR(IRONBATCH_MAGIC, 0x08, struct ironbatch_get_limits)

/* ---------------------------------------------------------------------------------------------------- mapped memory */

/*
 * The status page of a context. The device writes, in this order: results into the ring, `failed` if the batch has
 * failed, and `signaled` with a release store. So who has loaded `signaled` with acquire order may read the others.
 */
struct ironbatch_status {
	__u64 signaled;        /* the newest fence whose batch is over; 0: none yet */
	__u64 failed;          /* the newest fence whose batch has failed; 0: none */
	__u32 reset_count;
	__u32 reserved0[11];
};

/* ironbatch_record.op */
#define IRONBATCH_OP_STEP 1
#define IRONBATCH_OP_COPY_BLOCKS 2
#define IRONBATCH_OP_ZERO_BLOCKS 3
#define IRONBATCH_OP_TOKENS 4

/* Every record begins at a multiple of this many bytes from its batch's beginning; what is skipped is not looked at. */
#define IRONBATCH_RECORD_ALIGN 8

/*
 * The header of a record. By itself that of COPY_BLOCKS, which (source, target) pairs of block ids follow (__u32), and
 * of ZERO_BLOCKS, which block ids follow (__u32).
 */
struct ironbatch_record {
	__u16 op;
	__u16 flags;           /* 0, but for a STEP's */
	__u32 bytes;           /* of header and body, without padding */
	__u64 user;            /* comes back in the STEP's TOKENS */
};

/* Bits of a STEP's header.flags. */
#define IRONBATCH_STEP_EMITS (1U << 0) /* the sequence is complete up to here and is owed its next token */

/*
 * STEP: compute the last new_tokens positions of a sequence; the ones before have been computed. block_count block ids
 * follow (__u32: its block table up to context_tokens), then new_tokens token ids (__s32).
 */
struct ironbatch_step {
	struct ironbatch_record header;
	__u64 sequence;        /* the caller's name for it; comes back in TOKENS */
	__u64 seed;
	__u32 context_tokens;  /* positions after this step; at least 1 */
	__u32 new_tokens;      /* 1 <= new_tokens <= context_tokens */
	__u32 block_count;     /* ceil(context_tokens / block_tokens) */
	__u32 reserved0;
	double temperature;
	double top_p;
	__s64 top_k;           /* 0: off */
	__u64 reserved1;
};

/* TOKENS: written by the device at results_offset, one for each STEP, in their order; count ids follow (__s32). */
struct ironbatch_tokens {
	struct ironbatch_record header;
	__u64 sequence;
	__u32 count;           /* 1 if the STEP emits, else 0 */
	__u32 reserved0;
};

/* ------------------------------------------------------------------------------------------------------------ sizes */

#if defined(__cplusplus) && __cplusplus >= 201103L
#define IRONBATCH_ASSERT_SIZE(name, size) static_assert(sizeof(struct name) == (size), #name " is padded")
#elif defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L
#define IRONBATCH_ASSERT_SIZE(name, size) _Static_assert(sizeof(struct name) == (size), #name " is padded")
#endif

#ifdef IRONBATCH_ASSERT_SIZE
IRONBATCH_ASSERT_SIZE(ironbatch_get_info, 128);
IRONBATCH_ASSERT_SIZE(ironbatch_submit_batch, 64);
IRONBATCH_ASSERT_SIZE(ironbatch_wait_fence, 40);
IRONBATCH_ASSERT_SIZE(ironbatch_query_free_blocks, 16);
IRONBATCH_ASSERT_SIZE(ironbatch_claim_blocks, 16);
IRONBATCH_ASSERT_SIZE(ironbatch_get_mem_path, 128);
IRONBATCH_ASSERT_SIZE(ironbatch_reset, 16);
IRONBATCH_ASSERT_SIZE(ironbatch_get_error, 128);
IRONBATCH_ASSERT_SIZE(ironbatch_get_limits, 128);
IRONBATCH_ASSERT_SIZE(ironbatch_status, 64);
IRONBATCH_ASSERT_SIZE(ironbatch_record, 16);
IRONBATCH_ASSERT_SIZE(ironbatch_step, 80);
IRONBATCH_ASSERT_SIZE(ironbatch_tokens, 32);
#undef IRONBATCH_ASSERT_SIZE
#endif

#endif
