"""HLO of the programs in a trace: which op names and opcodes stand behind a kernel.

A profile holds the `HloProto` of each program as a stat in the metadata of the plane
`/host:metadata`. JAX's `ProfileData` gives events only, no metadata, so this file reads the
protobuf wire format itself: the few fields below, everything else is skipped unread. Field
numbers: tsl/profiler/protobuf/xplane.proto, xla/service/hlo.proto, xla/xla_data.proto.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator

METADATA_PLANE = b"/host:metadata"

# Ops whose kernels compute what their called computations say.
_WRAPPERS = frozenset({"fusion", "call", "async-start", "async-update", "async-done"})


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An HLO instruction with what it wraps.

    opcode: of the instruction itself ("fusion", "custom-call", "all-gather-start", ...).
    target: of a custom call, else "".
    op_name: from JAX's name stack, "" if XLA left none.
    inner: (opcode, op_name) of all instructions of a fusion or an async wrapper, else empty.
    """

    opcode: str
    target: str
    op_name: str
    inner: tuple[tuple[str, str], ...]

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """(opcode, op_name) of the instruction and of what it wraps."""
        return ((self.opcode, self.op_name), *self.inner)


class Programs:
    """The programs of one trace file; each is parsed when it is first asked for."""

    def __init__(self, xspace: bytes):
        self._protos = dict(_hlo_protos(memoryview(xspace)))
        self._parsed: dict[int, dict[str, Instruction]] = {}

    def __len__(self) -> int:
        return len(self._protos)

    def instructions(self, program_id: int) -> dict[str, Instruction]:
        """Instructions by name; empty for a program that the trace does not hold."""
        if program_id not in self._parsed:
            proto = self._protos.get(program_id)
            self._parsed[program_id] = {} if proto is None else _instructions(proto)
        return self._parsed[program_id]

    @functools.cached_property
    def by_kernel_name(self) -> dict[str, Instruction]:
        """Instructions after which XLA names a kernel, where that name says which one it is.

        For kernels without annotations: those in a CUDA graph that was made before the trace.
        """
        found: dict[str, Instruction | None] = {}
        for program_id in self._protos:
            for name, instruction in self.instructions(program_id).items():
                kernel = re.sub(r"\W", "_", name)
                same = found.setdefault(kernel, instruction) == instruction
                found[kernel] = instruction if same else None
        return {name: i for name, i in found.items() if i is not None}


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(field number, value): an int for varints, the bytes for everything else."""
    at, size = 0, len(message)

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    while at < size:
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        if kind == 2:
            length = varint()
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind} at byte {at}: not a protobuf of this kind")
        yield key >> 3, message[at : at + length]
        at += length


def _hlo_protos(xspace: memoryview) -> Iterator[tuple[int, memoryview]]:
    """(program id, HloProto) of the metadata planes of an XSpace."""
    for number, plane in _fields(xspace):
        if number != 1:  # XSpace.planes
            continue
        for number, value in _fields(plane):
            if number == 2 and value != METADATA_PLANE:  # XPlane.name, before the long fields
                break
            if number == 4:  # XPlane.event_metadata, a map
                entry = dict(_fields(value))
                for field, stat in _fields(entry.get(2, memoryview(b""))):
                    if field == 5:  # XEventMetadata.stats
                        proto = dict(_fields(stat)).get(6)  # XStat.bytes_value
                        if proto is not None:
                            yield entry.get(1, 0), proto


def _text(value: memoryview | None) -> str:
    return "" if value is None else str(value, "utf-8", "replace")


def _instructions(hlo_proto: memoryview) -> dict[str, Instruction]:
    module = dict(_fields(hlo_proto)).get(1, memoryview(b""))  # HloProto.hlo_module
    computations: dict[int, list[dict]] = {}
    for number, computation in _fields(module):
        if number == 3:  # HloModuleProto.computations
            identity, instructions = 0, []
            for field, value in _fields(computation):
                if field == 2:
                    instructions.append(_instruction(value))
                elif field == 5:
                    identity = value
            computations[identity] = instructions

    def parts(instruction: dict) -> Iterator[tuple[str, str]]:
        if instruction["opcode"] in _WRAPPERS:
            for identity in instruction["called"]:
                for inner in computations.get(identity, ()):
                    yield inner["opcode"], inner["op_name"]
                    yield from parts(inner)

    return {
        i["name"]: Instruction(i["opcode"], i["target"], i["op_name"], tuple(parts(i)))
        for instructions in computations.values()
        for i in instructions
    }


def _instruction(message: memoryview) -> dict:
    found = dict(name="", opcode="", target="", op_name="", called=[])
    texts = {1: "name", 2: "opcode", 28: "target"}  # HloInstructionProto
    for number, value in _fields(message):
        if number in texts:
            found[texts[number]] = _text(value)
        elif number == 7:  # metadata: OpMetadata.op_name
            found["op_name"] = _text(dict(_fields(value)).get(2))
        elif number == 38:  # called_computation_ids, packed or not
            ids = [value] if isinstance(value, int) else list(_packed(value))
            found["called"] += ids
    return found


def _packed(values: memoryview) -> Iterator[int]:
    value = shift = 0
    for byte in values:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield value
            value = shift = 0
