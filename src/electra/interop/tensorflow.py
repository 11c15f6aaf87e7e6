"""Reads checkpoints of TensorFlow 1 ("tensor bundles": NAME.index and NAME.data-00000-of-00001) with numpy alone.

The index is a sorted table in LevelDB's format: blocks of keys that share prefixes with the previous key, each block with a
checksum, and a footer with the place of the index block. A value is a protocol buffer with type, shape, data file, offset and size
of the bytes, and their checksum. A partitioned variable has an entry that lists its slices, and an entry for each slice under a
key in Google's "ordered code".

Every offset, length and count is untrusted and is checked before it is used.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from electra.base.errors import CorruptError, ElectraError
from electra.base.files import read_bytes
from electra.interop.foreign import MOST_TENSORS, Weights, inside

FOOTER, MAGIC, TRAILER = 48, 0xDB4775248B80FB57, 5
MOST_INDEX, MOST_SHARDS, MOST_DIMENSIONS = 1 << 26, 10_000, 8
BFLOAT16, STRING = 14, 7
NUMPY_TYPES = {
    1: "<f4", 2: "<f8", 3: "<i4", 4: "u1", 5: "<i2", 6: "i1", 9: "<i8", 10: "?", BFLOAT16: "<u2", 17: "<u2", 19: "<f2",
    22: "<u4", 23: "<u8",
}  # fmt: skip
POLYNOMIAL = 0x82F63B78  # of CRC-32C, reflected
LANE = 256


@dataclass(frozen=True)
class BundleEntry:
    """A tensor as the index describes it. `slices`: for each part of a partitioned tensor, (start, length) by dimension; length
    -1 means all of it."""

    type: int
    shape: list[int]
    shard: int
    offset: int
    size: int
    checksum: int | None
    slices: list[list[tuple[int, int]]]


def read_bundle(prefix: Path) -> Weights:
    """The variables of a checkpoint. String tensors among them are left out."""
    index = inside(prefix.parent, f"{prefix.name}.index")
    try:
        table = dict(table_entries(read_bytes(index, MOST_INDEX)))
        shards = header_shards(table.pop(b"", b""))
        entries = {key: parse_entry(value) for key, value in table.items()}
        bundle = Bundle(prefix, entries, shards)
        named = {key.decode(): entry for key, entry in entries.items() if not key.startswith(b"\0")}
        shapes = {name: tuple(entry.shape) for name, entry in named.items() if entry.type != STRING}
        for name in shapes:
            bundle.check(name, named[name])
    except (ValueError, IndexError, struct.error, OverflowError) as error:
        raise error if isinstance(error, ElectraError) else CorruptError(f"{index} is damaged: {error}.") from None
    return Weights(index, shapes, lambda name: bundle.read(name))


@dataclass(frozen=True)
class Bundle:
    prefix: Path
    entries: dict[bytes, BundleEntry]
    shards: int

    def data_file(self, shard: int) -> Path:
        return inside(self.prefix.parent, f"{self.prefix.name}.data-{shard:05d}-of-{self.shards:05d}")

    def check(self, name: str, entry: BundleEntry) -> None:
        """Checks, before anything is read, that the numbers of an entry agree with each other and with the files."""
        if entry.type not in NUMPY_TYPES:
            raise CorruptError(f"{self.prefix}: {name} is of TensorFlow's type {entry.type}, which is not read.")
        if len(entry.shape) > MOST_DIMENSIONS or any(length < 0 for length in entry.shape):
            raise CorruptError(f"{self.prefix}: {name} has the shape {entry.shape[:9]}.")
        for part, key in zip(entry.slices, slice_keys(name, entry), strict=True):
            if key not in self.entries:
                raise CorruptError(f"{self.prefix}: a slice of {name} is missing.")
            self.check_bytes(name, self.entries[key])
            if list(self.entries[key].shape) != [len(range(*it)) for it in bounds(name, entry, part)]:
                raise CorruptError(f"{self.prefix}: a slice of {name} does not have its declared shape.")
        sizes = [math.prod(self.entries[key].shape) for key in slice_keys(name, entry)]
        if sizes and sum(sizes) != math.prod(entry.shape):
            raise CorruptError(f"{self.prefix}: the slices of {name} do not make up the whole.")
        if not entry.slices:
            self.check_bytes(name, entry)

    def check_bytes(self, name: str, entry: BundleEntry) -> None:
        size = math.prod(entry.shape) * np.dtype(NUMPY_TYPES.get(entry.type, "<f4")).itemsize
        if size != entry.size or entry.type not in NUMPY_TYPES:
            raise CorruptError(f"{self.prefix}: {name} has the shape {entry.shape}, but {entry.size:,} bytes.")
        if not 0 <= entry.shard < self.shards:
            raise CorruptError(f"{self.prefix}: {name} is said to be in file {entry.shard} of {self.shards}.")
        path = self.data_file(entry.shard)
        if entry.offset < 0 or entry.offset + entry.size > path.stat().st_size:
            raise CorruptError(f"{path} is cut: {name} should end at byte {entry.offset + entry.size:,}.")

    def read(self, name: str) -> Tensor:
        entry = self.entries[name.encode()]
        if not entry.slices:
            return torch.from_numpy(self.values(name, entry))
        parts = [self.values(name, self.entries[key]) for key in slice_keys(name, entry)]
        whole = np.full(entry.shape, np.nan, parts[0].dtype)  # a gap between slices stays nan
        for part, values in zip(entry.slices, parts, strict=True):
            whole[tuple(slice(*it) for it in bounds(name, entry, part))] = values
        return torch.from_numpy(whole)

    def values(self, name: str, entry: BundleEntry) -> np.ndarray:
        """The values of an entry, with their checksum verified. bfloat16 becomes float32, of which it is the upper half."""
        path = self.data_file(entry.shard)
        with path.open("rb") as file:
            file.seek(entry.offset)
            data = file.read(entry.size)
        if len(data) != entry.size or (entry.checksum is not None and masked(crc32c(data)) != entry.checksum):
            raise CorruptError(f"{path}: the checksum of {name} does not match. Restore the file.")
        values = np.frombuffer(data, NUMPY_TYPES[entry.type]).reshape(entry.shape)
        return (values.astype("<u4") << 16).view("<f4") if entry.type == BFLOAT16 else values.copy()


def bounds(name: str, entry: BundleEntry, part: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """A slice as (start, end) by dimension, checked to be inside the whole tensor."""
    ends = [
        (start, start + length if length >= 0 else size)
        for (start, length), size in zip(part, entry.shape, strict=True)
    ]
    if not all(0 <= start < end <= size for (start, end), size in zip(ends, entry.shape, strict=True)):
        raise CorruptError(f"a slice of {name} lies outside of its shape {entry.shape}.")
    return ends


# The table


def table_entries(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    if len(data) < FOOTER or struct.unpack("<Q", data[-8:])[0] != MAGIC:
        raise ValueError("it does not end like a TensorFlow index. It was truncated, or is another file")
    footer, at = data[-FOOTER:], 0
    for _ in range(2):  # the metaindex block is not read
        _, at = varint(footer, at)
    start, at = varint(footer, at)
    size, at = varint(footer, at)
    count, before = 0, b""
    for _, handle in block_entries(data, start, size):
        start, at = varint(handle, 0)
        size, at = varint(handle, at)
        for key, value in block_entries(data, start, size):
            if count and key <= before:
                raise ValueError("its keys are not in order")
            count, before = count + 1, key
            if count > MOST_TENSORS:
                raise ValueError(f"more than {MOST_TENSORS:,} tensors")
            yield key, value


def block_entries(data: bytes, start: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of one block, which ends with its restart points (offsets of entries with a whole key), their number, and a
    trailer: compression type and checksum."""
    raw = data[start : start + size + TRAILER]
    if len(raw) != size + TRAILER or size < 4:
        raise ValueError(f"a block of {size:,} bytes at {start:,} is beyond its end")
    content, packing, checksum = raw[:size], raw[size], struct.unpack("<I", raw[size + 1 :])[0]
    if masked(crc32c(raw[: size + 1])) != checksum:
        raise ValueError(f"the checksum of the block at byte {start:,} does not match")
    if packing:
        raise ValueError(
            f"the block at byte {start:,} is packed (kind {packing}); save the checkpoint with a newer TensorFlow"
        )
    end, at, key = size - 4 - 4 * struct.unpack("<I", content[-4:])[0], 0, b""
    if end < 0:
        raise ValueError(f"the block at byte {start:,} has more restarts than bytes")
    while at < end:
        shared, at = varint(content, at)
        more, at = varint(content, at)
        length, at = varint(content, at)
        if shared > len(key) or at + more + length > end:
            raise ValueError(f"an entry of the block at byte {start:,} is beyond its end")
        key, at = key[:shared] + content[at : at + more], at + more
        yield key, content[at : at + length]
        at += length


# Protocol buffers


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        byte = data[at]
        value, at = value | (byte & 127) << shift, at + 1
        if byte < 128:
            return value & (1 << 64) - 1, at
    raise ValueError("an unterminated number")


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        length = {1: 8, 5: 4}.get(tag & 7, 0)
        if tag & 7 == 0:
            value, at = varint(data, at)
            yield tag >> 3, value
            continue
        if tag & 7 == 2:
            length, at = varint(data, at)
        if (not length and tag & 7 != 2) or at + length > len(data):
            raise ValueError("a field that is no protocol buffer, or beyond its end")
        part, at = data[at : at + length], at + length
        yield tag >> 3, part if tag & 7 == 2 else int.from_bytes(part, "little")


def signed(value: int | bytes) -> int:
    """A varint as a signed number, as protocol buffers encode int64."""
    if not isinstance(value, int):
        raise ValueError("text where a number should be")
    return value - (1 << 64) if value >> 63 else value


def text(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where text should be")
    return value


def header_shards(data: bytes) -> int:
    """The number of data files, from BundleHeaderProto."""
    header = dict(fields(data))
    if header.get(2, 0):
        raise ValueError("it was written by a machine of the other byte order, which is not read")
    if not 1 <= (shards := signed(header.get(1, 0))) <= MOST_SHARDS:
        raise ValueError(f"it says that it has {shards} data files")
    return shards


def parse_entry(data: bytes) -> BundleEntry:
    """Parses a BundleEntryProto."""
    proto = dict(fields(data))
    sizes = [dict(fields(text(it))) for number, it in fields(text(proto.get(2, b""))) if number == 2]
    slices = [text(it) for number, it in fields(data) if number == 7]
    extents = [[dict(fields(text(it))) for number, it in fields(part) if number == 1] for part in slices]
    return BundleEntry(
        type=signed(proto.get(1, 0)),
        shape=[signed(it.get(1, 0)) for it in sizes],
        shard=signed(proto.get(3, 0)),
        offset=signed(proto.get(4, 0)),
        size=signed(proto.get(5, 0)),
        checksum=signed(proto[6]) if 6 in proto else None,
        slices=[[(signed(it.get(1, 0)), signed(it[2]) if 2 in it else -1) for it in part] for part in extents],
    )


def slice_keys(name: str, entry: BundleEntry) -> list[bytes]:
    """The keys of a tensor's slices: 0, the name, the number of dimensions, then start and length of each, in ordered code."""
    escaped = name.encode().replace(b"\0", b"\0\xff") + b"\0\1"
    for part in entry.slices:
        if len(part) != len(entry.shape):
            raise ValueError(f"a slice of {name} has {len(part)} dimensions")
    head = b"\0" + escaped + bytes([1, len(entry.shape)])
    return [head + b"".join(ordered(value) for extent in part for value in extent) for part in entry.slices]


def ordered(value: int) -> bytes:
    """A signed number as bytes that sort like the numbers: as many leading bits as bytes (ones, or zeros if it is negative), then
    the number in two's complement."""
    length = (value if value >= 0 else ~value).bit_length() // 7 + 1
    mark = ((1 << length) - 1) << 7 * length
    return ((value & (1 << 8 * length) - 1) ^ mark).to_bytes(length, "big")


# CRC-32C


@cache
def byte_table() -> np.ndarray:
    """[256]: the register after one byte of zeros, by the value of its lowest byte (all others zero)."""
    register = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        register = np.where(register & 1, (register >> 1) ^ np.uint32(POLYNOMIAL), register >> 1).astype(np.uint32)
    return register


@cache
def shift_tables(length: int) -> np.ndarray:
    """[4, 256]: the register after `length` bytes of zeros, as one table per byte of the register. The map is linear, and the
    map of twice the length is its composition with itself."""
    if length == 1:
        byte = np.arange(256, dtype=np.uint32)
        return np.stack([byte_table(), *(byte << np.uint32(8 * place) for place in range(3))])
    half = shift_tables(length // 2)
    doubled = apply_tables(half, half)
    return apply_tables(shift_tables(1), doubled) if length % 2 else doubled


def apply_tables(tables: np.ndarray, registers: np.ndarray) -> np.ndarray:
    parts = [tables[place][(registers >> np.uint32(8 * place)) & np.uint32(255)] for place in range(4)]
    return reduce(np.bitwise_xor, parts)


def crc32c(data: bytes) -> int:
    """CRC-32C. Lanes of 256 bytes are computed side by side, a four-byte word of each at a time; then they are joined in pairs."""
    register, whole = 0xFFFFFFFF, len(data) // LANE * LANE
    for start in range(0, whole, LANE << 14):
        words = np.frombuffer(data, "<u4", min(whole - start, LANE << 14) // 4, start).reshape(-1, LANE // 4)
        lanes = np.zeros(len(words), np.uint32)
        for column in np.ascontiguousarray(words.T):
            lanes = apply_tables(shift_tables(4), lanes ^ column)
        length = LANE
        while len(lanes) > 1:
            lanes = np.pad(lanes, (len(lanes) % 2, 0))  # zeros in front change nothing
            lanes, length = apply_tables(shift_tables(length), lanes[::2]) ^ lanes[1::2], 2 * length
        before = apply_tables(shift_tables(words.nbytes), np.array([register], np.uint32))
        register = int((before ^ lanes)[0])
    table = byte_table().tolist()
    for byte in data[whole:]:
        register = table[(register ^ byte) & 255] ^ (register >> 8)
    return register ^ 0xFFFFFFFF


def masked(checksum: int) -> int:
    """The checksum as TensorFlow stores it: masked, because a CRC of data that contains CRCs is weak."""
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF
