"""Log-linear histograms of microseconds (as HdrHistogram: exact below 32, then 32 buckets an octave, 3 % wide)."""

from __future__ import annotations

from ironbatch import layout
from ironbatch.kernels.jit import inline, kernel

SUB_BITS = layout.HISTOGRAM_SUB_BUCKET_BITS
SUB_BUCKETS = 1 << SUB_BITS
LAST_BUCKET = layout.HISTOGRAM_BUCKETS - 1


@inline
def bucket_of(value):
    """The bucket that counts `value` (microseconds >= 0); what is too large goes into the last one."""
    if value < SUB_BUCKETS:
        return max(value, 0)
    shift = 0
    while (value >> shift) >= 2 * SUB_BUCKETS:
        shift += 1
    return min((shift + 1) * SUB_BUCKETS + ((value >> shift) - SUB_BUCKETS), LAST_BUCKET)


@inline
def bucket_midpoint(bucket):
    """The value that stands for a bucket: the middle of its range."""
    if bucket < SUB_BUCKETS:
        return bucket
    shift = bucket // SUB_BUCKETS - 1
    return ((bucket % SUB_BUCKETS + SUB_BUCKETS) << shift) + ((1 << shift) >> 1)


@kernel("int64(int64)")
def histogram_bucket(value):
    """`bucket_of`, for Python."""
    return bucket_of(value)


@kernel("int64(int64)")
def histogram_midpoint(bucket):
    """`bucket_midpoint`, for Python."""
    return bucket_midpoint(bucket)


@kernel("int64(int64[::1], float64)")
def histogram_percentile(counts, fraction):
    """The value, in microseconds, at or below which `fraction` (0..1) of the counted values lie; 0 if there is none."""
    total = 0
    for bucket in range(counts.size):
        total += counts[bucket]
    if total == 0:
        return 0
    rank = max(int(fraction * total + 0.999999), 1)
    seen = 0
    for bucket in range(counts.size):
        seen += counts[bucket]
        if seen >= rank:
            return bucket_midpoint(bucket)
    return bucket_midpoint(counts.size - 1)
