/* SPDX-License-Identifier: MIT */
/*
 * Continue a prompt on an Ironbatch device: the least that a client of the UAPI does. docs/driver.md describes it.
 *
 *     cc -I ironbatch/driver -o step ironbatch/driver/examples/step.c && ./step ./device0 11 22 33
 *
 * Prints the ids of 8 tokens in a line. Exit code: 0, 1 the device can't or won't, 2 wrong use.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

#include "ironbatch_ioctl.h"

enum { NEW_TOKENS = 8, MAX_TOKENS = 256, SEED = 7 };

static int fd = -1;
static struct ironbatch_get_info info = { .signature = IRONBATCH_SIGNATURE, .abi_major = IRONBATCH_ABI_MAJOR };
static unsigned char *memory;

/* The same call again after a signal: deadlines are absolute. */
static int call(unsigned long request, void *argument)
{
	while (ioctl(fd, request, argument) < 0)
		if (errno != EINTR)
			return -1;
	return 0;
}

/* Say what errno means, and what the device says about it; end. */
static void fail(const char *what)
{
	struct ironbatch_get_error told;
	const int code = errno;

	fprintf(stderr, "step: %s: %s\n", what, strerror(code));
	if (call(IRONBATCH_GET_ERROR, &told) == 0 && told.code == -code)
		fprintf(stderr, "step: the device says: %.*s\n", (int)sizeof(told.message), told.message);
	exit(1);
}

static void open_device(const char *path)
{
	struct ironbatch_get_mem_path place = { 0 };
	int map_fd = fd = open(path, O_RDWR | O_CLOEXEC);
	struct stat found;

	if (fd < 0)
		fail(path);
	errno = EPROTO;
	if (call(IRONBATCH_GET_INFO, &info) < 0 || info.signature != IRONBATCH_SIGNATURE ||
	    info.abi_major != IRONBATCH_ABI_MAJOR)
		fail("this is not an Ironbatch device of version 1");
	if (!(info.caps & IRONBATCH_CAP_MMAP)) {
		if (call(IRONBATCH_GET_MEM_PATH, &place) < 0)
			fail("GET_MEM_PATH");
		errno = ESTALE; /* if another file is there by now */
		map_fd = open(place.path, O_RDWR | O_CLOEXEC);
		if (map_fd < 0 || fstat(map_fd, &found) < 0 || found.st_dev != place.st_dev ||
		    found.st_ino != place.st_ino || (__u64)found.st_size != place.size)
			fail(place.path);
	}
	memory = mmap(NULL, info.map_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, map_fd, 0);
	if (memory == MAP_FAILED)
		fail("mmap");
}

/* Write the record of a STEP at the ring's beginning. Returns its size, padded. */
static __u32 write_step(__u32 first_block, const __s32 *context, __u32 length, __u32 new_tokens)
{
	struct ironbatch_step *record = (struct ironbatch_step *)(memory + info.ring_off);
	__u32 blocks = (length + info.block_tokens - 1) / info.block_tokens, *ids = (__u32 *)(record + 1), i;

	memset(record, 0, sizeof(*record));
	record->header.op = IRONBATCH_OP_STEP;
	record->header.flags = IRONBATCH_STEP_EMITS;
	record->header.bytes = sizeof(*record) + 4 * (blocks + new_tokens);
	record->seed = SEED;
	record->context_tokens = length;
	record->new_tokens = new_tokens;
	record->block_count = blocks;
	record->top_p = 1;
	for (i = 0; i < blocks; i++) /* the block table: here, simply the claim's blocks in their order */
		ids[i] = first_block + i;
	memcpy(ids + blocks, context + length - new_tokens, 4 * new_tokens);
	return (record->header.bytes + IRONBATCH_RECORD_ALIGN - 1) & ~(IRONBATCH_RECORD_ALIGN - 1U);
}

/* Have it computed. Returns the token that it emits. */
static __s32 run_step(__u32 record_bytes)
{
	struct ironbatch_submit_batch batch = { .num_seqs = 1, .ring_bytes = record_bytes, .epoch = info.reset_count };
	struct ironbatch_wait_fence wait = { 0 };
	const struct ironbatch_status *page = (void *)(memory + info.status_off);
	const struct ironbatch_tokens *result = (void *)(memory + info.ring_off + record_bytes);
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	batch.deadline_ns = wait.deadline_ns = now.tv_sec * 1000000000LL + now.tv_nsec + info.longest_step_us * 1000LL;
	batch.results_offset = record_bytes;
	batch.results_bytes = sizeof(*result) + 8; /* one token, padded */
	if (call(IRONBATCH_SUBMIT_BATCH, &batch) < 0)
		fail("SUBMIT_BATCH");
	wait.fence = batch.fence;
	/* One look; what was stored before `signaled` is seen after it. Who sleeps, sleeps in the call. */
	if (__atomic_load_n(&page->signaled, __ATOMIC_ACQUIRE) < batch.fence || page->failed >= batch.fence)
		if (call(IRONBATCH_WAIT_FENCE, &wait) < 0 || (errno = -wait.status) != 0)
			fail("the batch");
	errno = EPROTO;
	if (result->header.op != IRONBATCH_OP_TOKENS || result->count != 1)
		fail("the device's answer");
	return *(const __s32 *)(result + 1);
}

int main(int count, char **arguments)
{
	__s32 context[MAX_TOKENS], prompt = count - 2, end = prompt + NEW_TOKENS, length, done;
	struct ironbatch_claim_blocks claim = { .flags = IRONBATCH_CLAIM_EXACT };
	struct ironbatch_get_limits limits;
	unsigned long id;
	char rest;

	if (prompt < 1 || end > MAX_TOKENS)
		return fprintf(stderr, "usage: step NODE TOKEN_ID... (at most %d)\n", MAX_TOKENS - NEW_TOKENS), 2;
	for (length = 0; length < prompt; context[length++] = (__s32)id)
		if (sscanf(arguments[2 + length], "%lu%c", &id, &rest) != 1 || id > 0x7FFFFFFF)
			return fprintf(stderr, "step: %s is no token id\n", arguments[2 + length]), 2;
	open_device(arguments[1]);
	if (call(IRONBATCH_GET_LIMITS, &limits) < 0)
		fail("GET_LIMITS");
	errno = E2BIG; /* it would have to come in pieces, by steps that do not emit */
	if (limits.max_tokens && prompt > (__s32)limits.max_tokens)
		fail("the prompt");
	claim.want = (end + info.block_tokens - 1) / info.block_tokens;
	if (call(IRONBATCH_CLAIM_BLOCKS, &claim) < 0)
		fail("CLAIM_BLOCKS");
	for (done = 0; length < end; done = length++) { /* first the prompt, then each token that has come */
		context[length] = run_step(write_step(claim.first, context, length, length - done));
		printf("%d%c", context[length], length + 1 < end ? ' ' : '\n');
	}
	return 0; /* the blocks go back with the file */
}
