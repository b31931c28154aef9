"""Byte planes <-> zstd frames that hold only Huffman codes (RFC 8878, sections 3.1.1.3.1 and 4.2).

Exponents do not repeat, so only zstd's Huffman coder helps. A frame written here is an ordinary one that every zstd
reads. `read_huffman_frame` reads this one shape twice as fast: one lookup in its table yields as many symbols as fit in
its eleven bits, where zstd takes at most two. It returns False for any other frame, and zstd decides.

The shape: one segment, its content size in four bytes, and blocks of BLOCK_BYTES, each with its own tree with four-bit
weights, four streams, and no sequences. Invariant: it reads nothing outside `frame` and writes nothing outside `plane`.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import numpy as np
from numba import int64, uint8, uint32, uint64

from prime_protocol.codec.kernels.base import floor_log2, inline, kernel
from prime_protocol.codec.kernels.words import load_word, store_word, trailing_zeros

BLOCK_BYTES = 1 << 17
"""Maximum content of a zstd block."""
CODE_BITS_MAX = 11
WEIGHTS_MAX = 128
"""Weights that fit in half a byte each; the last symbol's follows from the others."""
HEAD = (0x28, 0xB5, 0x2F, 0xFD, 0xA0)
"""Magic number and descriptor: one segment, four bytes of content size, no checksum, no dictionary."""
HEAD_BYTES = len(HEAD) + 4
LITERALS_AT = 8
"""Size of the headers: three bytes for a block, five for its literals."""
JUMPS_BYTES = 6
"""Size of the jump table: the sizes of the first three streams."""
STREAM_BYTES_MIN = 8
"""Minimum size of a stream, so that it can be loaded as a word."""
SYMBOLS_MAX = 6
"""Symbols in one entry of the table."""
LOOKS = 5
"""Lookups between two loads: 55 bits of at least 56."""
MARGIN = LOOKS * SYMBOLS_MAX + 8
"""Bytes that these lookups may write, and the word that the last one stores."""
GAIN_MIN = 32
"""Inverse of the share by which a block must be smaller than its content to be worth a frame."""


@inline
def count_bytes(plane, begin, end, counts):
    """Count each byte. Four separate counters, because neighbours are often equal and would wait for one another."""
    lanes = np.zeros(4 * 256, np.uint32)
    whole = end - (end - begin) % 8
    for at in range(begin, whole, 8):
        word = load_word(plane, at)
        for _ in range(2):
            for lane in range(uint64(0), uint64(1024), uint64(256)):
                lanes[lane + (word & uint64(0xFF))] += uint32(1)
                word >>= uint64(8)
    for at in range(whole, end):
        lanes[plane[at]] += uint32(1)
    for symbol in range(256):
        counts[symbol] = int64(lanes[symbol]) + lanes[symbol + 256] + lanes[symbol + 512] + lanes[symbol + 768]


@inline
def code_lengths(counts, num_symbols, lengths):
    """Build Huffman's code for two or more symbols, halving counts until no code exceeds CODE_BITS_MAX. Returns the longest."""
    nodes, parents = np.zeros(2 * 256, np.int64), np.zeros(2 * 256, np.int64)
    order = np.zeros(256, np.int64)
    leaves = int64(0)
    for symbol in range(num_symbols):
        if counts[symbol]:
            at = leaves
            while at > 0 and counts[order[at - 1]] > counts[symbol]:
                order[at] = order[at - 1]
                at -= 1
            order[at] = symbol
            leaves += 1
    halvings = int64(0)
    while True:
        for leaf in range(leaves):
            nodes[leaf] = ((counts[order[leaf]] - 1) >> halvings) + 1
        leaf, inner = int64(0), leaves
        for made in range(leaves, 2 * leaves - 1):
            nodes[made] = 0
            for _ in range(2):  # the two lightest: leaves and inner nodes each come in ascending order
                if leaf < leaves and (inner >= made or nodes[leaf] <= nodes[inner]):
                    child = leaf
                    leaf += 1
                else:
                    child = inner
                    inner += 1
                nodes[made] += nodes[child]
                parents[child] = made
        root, longest = 2 * leaves - 2, int64(0)
        nodes[root] = 0  # from here on: depths
        for node in range(root - 1, -1, -1):
            nodes[node] = nodes[parents[node]] + 1
            longest = max(longest, nodes[node])
        if longest <= CODE_BITS_MAX:
            break
        halvings += 1
    lengths[:] = 0
    for leaf in range(leaves):
        lengths[order[leaf]] = nodes[leaf]
    return longest


@inline
def first_cells(lengths, num_symbols, longest, cells):
    """Find where each symbol's cells begin in a table of 2^longest: long codes first, equal ones in symbol order."""
    at = int64(0)
    for length in range(longest, 0, -1):
        for symbol in range(num_symbols):
            if lengths[symbol] == length:
                cells[symbol] = at
                at += int64(1) << (longest - length)
    return at


@inline
def pair_codes(counts, num_symbols, codes, pairs):
    """Store the codes of two neighbours, the second in the lower bits, at `pairs[first + 256 * second]`.

    The bits are above byte 0, their number is in byte 0. Entries of pairs that cannot occur stay unchanged.
    """
    for second in range(num_symbols):
        if counts[second]:
            code, length = codes[second] >> 8, codes[second] & 0xFF
            for first in range(num_symbols):
                if counts[first]:
                    bits = code | ((codes[first] >> 8) << length)
                    pairs[256 * second + first] = (bits << 8) | (length + (codes[first] & 0xFF))


@inline
def put_code(octets, at, bits, filled):
    """Store whole bytes. Returns the offset after them and the remaining bits."""
    store_word(octets, at, bits)
    return at + int64(filled >> uint64(3)), bits >> (filled & uint64(56)), filled & uint64(7)


@inline
def append(bits, filled, code):
    """Append a code: its bits are above byte 0, their number in byte 0."""
    return bits | ((uint64(code) >> uint64(8)) << filled), filled + (uint64(code) & uint64(0xFF))


@inline
def write_stream(plane, begin, end, codes, pairs, octets, at):
    """Write codes from the last symbol to the first, and a one after them. Returns the offset of the next stream."""
    bits, filled = uint64(0), uint64(0)
    for i in range(end - 8, begin - 1, -8):
        word = load_word(plane, i)
        for _ in range(2):
            bits, filled = append(bits, filled, pairs[word >> uint64(48)])
            bits, filled = append(bits, filled, pairs[(word >> uint64(32)) & uint64(0xFFFF)])
            at, bits, filled = put_code(octets, at, bits, filled)
            word <<= uint64(32)
    for i in range(begin + (end - begin) % 8 - 1, begin - 1, -1):
        bits, filled = append(bits, filled, codes[plane[i]])
        at, bits, filled = put_code(octets, at, bits, filled)
    store_word(octets, at, bits | (uint64(1) << filled))
    return at + 1


@kernel
def write_frame(plane, octets, pairs):
    """Write the frame of a plane to `octets`. Returns its size, or 0 if this shape does not pay or is impossible.

    `pairs` is scratch: one number for every two bytes.
    """
    for i in range(len(HEAD)):
        octets[i] = HEAD[i]
    store_word(octets, len(HEAD), uint64(plane.size))
    counts, lengths, cells = np.zeros(256, np.int64), np.zeros(256, np.int64), np.zeros(256, np.int64)
    codes, ends = np.zeros(256, np.int64), np.zeros(5, np.int64)
    at = int64(HEAD_BYTES)
    for begin in range(0, plane.size, BLOCK_BYTES):
        size = min(plane.size - begin, BLOCK_BYTES)
        count_bytes(plane, begin, begin + size, counts)
        num_symbols, kinds, total_bits = int64(0), int64(0), int64(0)
        for symbol in range(256):
            if counts[symbol]:
                num_symbols, kinds = symbol + 1, kinds + 1
        if kinds < 2 or num_symbols > WEIGHTS_MAX + 1:
            return int64(0)
        longest = code_lengths(counts, num_symbols, lengths)
        first_cells(lengths, num_symbols, longest, cells)
        for symbol in range(num_symbols):
            total_bits += counts[symbol] * lengths[symbol]
            codes[symbol] = ((cells[symbol] >> (longest - lengths[symbol])) << 8) | lengths[symbol]
        if total_bits >> 3 > size - size // GAIN_MIN - WEIGHTS_MAX or total_bits >> 3 < 16 * STREAM_BYTES_MIN:
            return int64(0)
        pair_codes(counts, num_symbols, codes, pairs)
        tree = at + LITERALS_AT
        octets[tree] = 127 + num_symbols - 1
        jumps = tree + 1 + num_symbols // 2
        octets[tree + 1 : jumps] = 0
        for symbol in range(num_symbols - 1):
            weight = longest + 1 - lengths[symbol] if lengths[symbol] else int64(0)
            octets[tree + 1 + symbol // 2] |= weight << (0 if symbol & 1 else 4)
        quarter = (size + 3) // 4
        ends[0] = jumps + JUMPS_BYTES
        for stream in range(4):
            last = begin + min((stream + 1) * quarter, size)
            ends[stream + 1] = write_stream(plane, begin + stream * quarter, last, codes, pairs, octets, ends[stream])
        for stream in range(3):
            stream_bytes = ends[stream + 1] - ends[stream]
            octets[jumps + 2 * stream], octets[jumps + 2 * stream + 1] = stream_bytes & 0xFF, stream_bytes >> 8
        octets[ends[4]] = 0  # no sequences
        end = ends[4] + 1
        header = int64(begin + size == plane.size) | (2 << 1) | ((end - at - 3) << 3)
        literals = 2 | (3 << 2) | (size << 4) | ((end - 1 - tree) << 22)
        for i in range(3):
            octets[at + i] = (header >> (8 * i)) & 0xFF
        for i in range(5):
            octets[at + 3 + i] = (literals >> (8 * i)) & 0xFF
        at = end
    return at


@inline
def take_number(frame, at, size):
    """Read `size` bytes as a little-endian number."""
    value = int64(0)
    for i in range(size):
        value |= int64(frame[at + i]) << (8 * i)
    return value


@inline
def read_tree(frame, at, end, lengths):
    """Read the code lengths. Returns the offset of the jump table, or 0."""
    if at + 1 > end or frame[at] < 128:
        return int64(0)
    given = int64(frame[at]) - 127
    behind = at + 1 + (given + 1) // 2
    if behind > end:
        return int64(0)
    sum_cells, lengths[:] = int64(0), 0
    for symbol in range(given):
        weight = (int64(frame[at + 1 + symbol // 2]) >> (0 if symbol & 1 else 4)) & 15
        lengths[symbol] = weight
        if weight:
            sum_cells += int64(1) << (weight - 1)
    if sum_cells == 0:
        return int64(0)
    longest = floor_log2(sum_cells) + 1
    rest = (int64(1) << longest) - sum_cells
    if longest > CODE_BITS_MAX or rest & (rest - 1):
        return int64(0)
    lengths[given] = floor_log2(rest) + 1
    longest_codes = int64(0)
    for symbol in range(given + 1):
        if lengths[symbol]:
            longest_codes += lengths[symbol] == 1
            lengths[symbol] = longest + 1 - lengths[symbol]
    return behind if longest_codes >= 2 else int64(0)


@inline
def fill_table(lengths, cells, table):
    """Fill the table: for every value of k bits, at 2^k + value, the whole codes in it, for k from 0 to CODE_BITS_MAX.

    An entry: the number of bits in byte 0, symbols in bytes 1 to SYMBOLS_MAX, their number in byte 7. After a code of n
    bits follows the content of the other k - n bits, which is an entry of a smaller table.
    """
    at_most, shortest, num_symbols = uint64(0x0000FFFFFFFFFF00), int64(CODE_BITS_MAX), int64(0)
    for symbol in range(WEIGHTS_MAX + 1):
        if lengths[symbol]:
            shortest, num_symbols = min(shortest, lengths[symbol]), symbol + 1
    first_cells(lengths, num_symbols, CODE_BITS_MAX, cells)
    looked = min(int64(CODE_BITS_MAX), SYMBOLS_MAX * shortest - 1)  # bits after a code that hold at most five more
    table[:] = 0
    for bits in range(1, CODE_BITS_MAX + 1):
        for symbol in range(num_symbols):
            length = lengths[symbol]
            if length == 0 or length > bits:
                continue
            begin = uint64((int64(1) << bits) + (cells[symbol] >> (CODE_BITS_MAX - bits)))
            own = uint64(length) | uint64(symbol << 8) | (uint64(1) << uint64(56))
            rest = bits - length
            unused = uint64(max(int64(0), rest - looked))
            smaller = uint64(1) << (uint64(rest) - unused)
            for value in range(uint64(1) << uint64(rest)):
                more = table[smaller + (value >> unused)]
                table[begin + value] = ((more & at_most) << uint64(8)) + (more & ~at_most) + own


@inline
def look(table, plane, bits, to):
    """Write the next symbols. Returns the bits after their codes and the offset after the symbols."""
    entry = table[uint64(1 << CODE_BITS_MAX) + (bits >> uint64(64 - CODE_BITS_MAX))]
    store_word(plane, to, entry >> uint64(8))
    return bits << (entry & uint64(63)), to + (entry >> uint64(56))


@inline
def load(frame, at, passed):
    """Load bits that end at byte at + 8, less the passed ones; the lowest set bit shows how many are used since."""
    return (load_word(frame, at) | uint64(1)) << passed


@inline
def finish(frame, begin, left, lengths, table, plane, to, end):
    """Decode the last symbols of a stream one by one, from `left` bits. Returns whether they end where it begins."""
    while to < end:
        if left <= 0:
            return False
        at = max(int64(0), ((left + 7) >> 3) - 8)
        bits = load_word(frame, begin + at) << uint64(64 - (left - 8 * at))
        symbol = (table[uint64(1 << CODE_BITS_MAX) + (bits >> uint64(64 - CODE_BITS_MAX))] >> uint64(8)) & uint64(0xFF)
        plane[to] = uint8(symbol)
        left -= lengths[symbol]
        to += uint64(1)
    return left == 0


@inline
def open_stream(frame, begin, end):
    """Return the word at a stream's end, without its end mark, a one; 0 if there is none."""
    last = int64(frame[end - 1])
    return load(frame, end - 8, uint64(8 - floor_log2(last))) if last else uint64(0)


@kernel
def read_huffman_frame(frame, plane):
    """Write the plane of a complete frame of this shape. Returns False for any other; `plane` is then undefined."""
    if frame.size < HEAD_BYTES:
        return False
    for i in range(len(HEAD)):
        if frame[i] != HEAD[i]:
            return False
    if take_number(frame, len(HEAD), 4) != plane.size:
        return False
    at, begins, ends = int64(HEAD_BYTES), np.zeros(4, np.int64), np.zeros(4, np.int64)
    lengths, cells, table = np.zeros(256, np.int64), np.zeros(256, np.int64), np.zeros(2 << CODE_BITS_MAX, np.uint64)
    for begin in range(0, plane.size, BLOCK_BYTES):
        size = min(plane.size - begin, BLOCK_BYTES)
        if at + LITERALS_AT > frame.size:
            return False
        header, literals = take_number(frame, at, 3), take_number(frame, at + 3, 5)
        end = at + 3 + (header >> 3)
        if header & 7 != (2 << 1) | int64(begin + size == plane.size) or end > frame.size:
            return False
        if literals & ((1 << 22) - 1) != 2 | (3 << 2) | (size << 4) or literals >> 22 != end - at - LITERALS_AT - 1:
            return False
        if header >> 3 > min(plane.size, BLOCK_BYTES):  # zstd accepts no block longer than its maximum content
            return False
        if frame[end - 1] != 0:
            return False
        jumps = read_tree(frame, at + LITERALS_AT, end - 1, lengths)
        if jumps == 0 or jumps + JUMPS_BYTES > end - 1:
            return False
        first = jumps + JUMPS_BYTES
        for stream in range(4):
            begins[stream] = first
            first = end - 1 if stream == 3 else first + take_number(frame, jumps + 2 * stream, 2)
            ends[stream] = first
            if first > end - 1 or first - begins[stream] < STREAM_BYTES_MIN or frame[first - 1] == 0:
                return False
        fill_table(lengths, cells, table)
        if not read_streams(frame, begins, ends, plane, begin, begin + size, table, lengths):
            return False
        at = end
    return at == frame.size


@inline
def read_streams(frame, begins, ends, plane, begin, end, table, lengths):
    """Decode the four streams of a block in parallel until one is near its end, then each alone."""
    quarter = uint64((end - begin + 3) // 4)
    at0, at1, at2, at3 = ends[0] - 8, ends[1] - 8, ends[2] - 8, ends[3] - 8
    bits0, bits1 = open_stream(frame, begins[0], ends[0]), open_stream(frame, begins[1], ends[1])
    bits2, bits3 = open_stream(frame, begins[2], ends[2]), open_stream(frame, begins[3], ends[3])
    to0 = uint64(begin)
    to1, to2, to3 = to0 + quarter, to0 + quarter + quarter, to0 + quarter + quarter + quarter
    end0, end1, end2, end3 = to1, to2, to3, uint64(end)
    margin = uint64(MARGIN)
    while (
        (to0 + margin <= end0) & (to1 + margin <= end1) & (to2 + margin <= end2) & (to3 + margin <= end3)
        & (at0 >= begins[0]) & (at1 >= begins[1]) & (at2 >= begins[2]) & (at3 >= begins[3])
    ):  # fmt: skip
        for _ in range(LOOKS):
            bits0, to0 = look(table, plane, bits0, to0)
            bits1, to1 = look(table, plane, bits1, to1)
            bits2, to2 = look(table, plane, bits2, to2)
            bits3, to3 = look(table, plane, bits3, to3)
        used0, used1, used2, used3 = (
            trailing_zeros(bits0), trailing_zeros(bits1), trailing_zeros(bits2), trailing_zeros(bits3)
        )  # fmt: skip
        at0, at1, at2, at3 = at0 - (used0 >> 3), at1 - (used1 >> 3), at2 - (used2 >> 3), at3 - (used3 >> 3)
        bits0, bits1 = load(frame, at0, uint64(used0 & 7)), load(frame, at1, uint64(used1 & 7))
        bits2, bits3 = load(frame, at2, uint64(used2 & 7)), load(frame, at3, uint64(used3 & 7))
    left0, left1 = 8 * (at0 + 8 - begins[0]) - trailing_zeros(bits0), 8 * (at1 + 8 - begins[1]) - trailing_zeros(bits1)
    left2, left3 = 8 * (at2 + 8 - begins[2]) - trailing_zeros(bits2), 8 * (at3 + 8 - begins[3]) - trailing_zeros(bits3)
    return (
        finish(frame, begins[0], left0, lengths, table, plane, to0, end0)
        and finish(frame, begins[1], left1, lengths, table, plane, to1, end1)
        and finish(frame, begins[2], left2, lengths, table, plane, to2, end2)
        and finish(frame, begins[3], left3, lengths, table, plane, to3, end3)
    )
