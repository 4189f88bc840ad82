"""Patch kernels: the inner loops of the codec; they touch nothing but the arrays they get.

A changed element is written as a gap and a difference. The gap is the number of unchanged elements since
the last changed one, in bytes: 255 says that another byte follows. The difference is new minus parent of
the bits as an unsigned integer, modulo 2^bits, in zigzag order: 0, -1, 1, -2, 2, ... For floating-point
numbers it counts units in the last place, and for any dtype every bit comes back. Byte k of all
differences is plane k: the high planes of small differences are all zero.

Legend: N elements of a block, C changed ones, W bytes of an element.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

compiled = njit(cache=True, nogil=True)
Array = npt.NDArray[Any]

LAST_GAP_BYTE = 254
"""Largest byte that ends a gap."""
TILE = 4096
"""Elements that are searched before the changed ones among them are written."""
GAPS_TOO_SHORT, GAPS_TOO_LONG, BEYOND_THE_END = -1, -2, -3
FAULTS = {
    GAPS_TOO_SHORT: "the gaps end before the last change",
    GAPS_TOO_LONG: "gaps follow the last change",
    BEYOND_THE_END: "a gap leads beyond the end",
}
"""What `apply_changes` returns, and what it means."""


@compiled
def find_changes(parent: Any, new: Any, gaps: Any, planes: Any) -> tuple[int, int]:
    """Write gaps and differences of a block; return the number of changed elements and of gap bytes.

    Args:
        parent: [N] unsigned integers, bits of the parent's elements.
        new: [N] of the same dtype.
        gaps: [N + N // 255] uint8, is written.
        planes: [W, N] uint8, is written: row k is plane k.
    """
    width = planes.shape[0]
    one = np.uint64(1)
    top = np.uint64(8 * width - 1)
    mask = (one << top) | ((one << top) - one)
    places = np.empty(TILE, dtype=np.uint16)
    codes = np.empty(TILE, dtype=new.dtype)
    changed, gap_bytes, last = 0, 0, -1
    # Short loops over a tile, each of which the compiler makes fast: one for all takes twice as long.
    for start in range(0, len(new), TILE):
        before, after = parent[start : start + TILE], new[start : start + TILE]
        # No branch on what changed: at shares near one half the processor would guess wrong half the time.
        found = 0
        for i in range(len(after)):
            places[found] = i
            found += after[i] != before[i]
        for j in range(found):
            difference = (np.uint64(after[places[j]]) - np.uint64(before[places[j]])) & mask
            codes[j] = (difference << one) ^ (np.uint64(0) - (difference >> top))
        for k in range(width):
            plane = planes[k, changed : changed + found]
            for j in range(found):
                plane[j] = np.uint8((np.uint64(codes[j]) >> np.uint64(8 * k)) & np.uint64(255))
        changed += found
        for j in range(found):
            place = start + int(places[j])
            gap = place - last - 1
            last = place
            while gap > LAST_GAP_BYTE:
                gaps[gap_bytes] = 255
                gap_bytes += 1
                gap -= 255
            gaps[gap_bytes] = gap
            gap_bytes += 1
    return changed, gap_bytes


@compiled
def apply_changes(out: Any, gaps: Any, planes: Any) -> int:
    """Change a block that holds its parent's elements; return 0, or what is wrong with the gaps.

    Nothing is written outside of `out`; after an error its content is of no use.

    Args:
        out: [N] unsigned integers, bits of the parent's elements; is changed.
        gaps: [G] uint8, from a peer.
        planes: [W, C] uint8, from a peer.
    """
    width, count = planes.shape
    one = np.uint64(1)
    position, read = -1, 0
    for j in range(count):
        position += 1
        while True:
            if read >= len(gaps):
                return GAPS_TOO_SHORT
            gap = gaps[read]
            read += 1
            position += gap
            if gap <= LAST_GAP_BYTE:
                break
        if position >= len(out):
            return BEYOND_THE_END
        zigzag = np.uint64(0)
        for k in range(width):
            zigzag |= np.uint64(planes[k, j]) << np.uint64(8 * k)
        difference = (zigzag >> one) ^ (np.uint64(0) - (zigzag & one))
        out[position] = np.uint64(out[position]) + difference
    return 0 if read == len(gaps) else GAPS_TOO_LONG


def split_values(values: Array) -> Array:
    """Return the byte planes [W, N] of a block of a full payload, [N] unsigned integers.

    The sign goes to the lowest place first, so that the highest plane of a bfloat16 or float32 tensor
    holds exponents alone.
    """
    width = values.itemsize
    rotated = (values << 1) | (values >> (8 * width - 1))
    return np.ascontiguousarray(rotated.view(np.uint8).reshape(-1, width).T)


def join_values(planes: Array) -> Array:
    """Undo `split_values`: return [N] elements of planes [W, N]."""
    width = len(planes)
    rotated = np.zeros(planes.shape[1], dtype=f"<u{width}")
    for k, plane in enumerate(planes):
        rotated |= plane.astype(rotated.dtype) << (8 * k)
    values: Array = (rotated >> 1) | (rotated << (8 * width - 1))
    return values
