"""HLO of the programs in a trace: which op names and opcodes stand behind a kernel.

A profile holds the `HloProto` of each program as a stat in the metadata of the plane
`/host:metadata`. JAX's `ProfileData` gives events only, no metadata, so this file reads the
protobuf wire format itself: the few fields below, everything else is skipped unread. Field
numbers: tsl/profiler/protobuf/xplane.proto, xla/service/hlo.proto, xla/xla_data.proto.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator

METADATA_PLANE = b"/host:metadata"

# Ops whose kernels compute what their called computations say.
_WRAPPERS = frozenset({"fusion", "call", "async-start", "async-update", "async-done"})


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An HLO instruction with what it wraps.

    name: unique within its program.
    opcode: of the instruction itself ("fusion", "custom-call", "all-gather-start", ...).
    target: of a custom call, else "".
    op_name: from JAX's name stack, "" if XLA left none.
    inner: (opcode, op_name) of all instructions of a fusion or an async wrapper, else empty.
    """

    name: str
    opcode: str
    target: str
    op_name: str
    inner: tuple[tuple[str, str], ...]

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """(opcode, op_name) of the instruction and of what it wraps."""
        return ((self.opcode, self.op_name), *self.inner)


@dataclasses.dataclass(frozen=True)
class Program:
    """instructions: by name. sequences: names in the order in which XLA runs them, one sequence
    per computation that was scheduled (the entry, bodies of loops)."""

    instructions: dict[str, Instruction]
    sequences: list[list[str]]

    @functools.cached_property
    def by_kernel_name(self) -> dict[str, Instruction]:
        """Instructions after which XLA names a kernel, where the name says which one it is."""
        found: dict[str, Instruction | None] = {}
        for name, instruction in self.instructions.items():
            kernel = re.sub(r"\W", "_", name)
            found[kernel] = None if kernel in found else instruction
        return {name: i for name, i in found.items() if i is not None}

    @functools.cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """(sequence, place in it) of each instruction."""
        return {
            name: (number, place)
            for number, sequence in enumerate(self.sequences)
            for place, name in enumerate(sequence)
        }


_NO_PROGRAM = Program({}, [])


class Programs:
    """The programs of one trace file; each is parsed when it is first asked for."""

    def __init__(self, xspace: bytes):
        self._protos = dict(_hlo_protos(memoryview(xspace)))
        self._parsed: dict[int, Program] = {}

    def __len__(self) -> int:
        return len(self._protos)

    def __getitem__(self, program_id: int) -> Program:
        """The program, or an empty one if the trace does not hold it."""
        if program_id not in self._parsed:
            proto = self._protos.get(program_id)
            self._parsed[program_id] = _NO_PROGRAM if proto is None else _program(proto)
        return self._parsed[program_id]

    @functools.cached_property
    def by_kernel_name(self) -> dict[str, Instruction]:
        """The same for all programs together, where they agree: for kernels without a program."""
        found: dict[str, Instruction | None] = {}
        for program_id in self._protos:
            for name, instruction in self[program_id].by_kernel_name.items():
                same = found.setdefault(name, instruction) == instruction
                found[name] = instruction if same else None
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
                program_id, proto = -1, None
                for field, part in _fields(dict(_fields(value)).get(2, memoryview(b""))):
                    if field == 2:  # XEventMetadata.name: "jit_step(PROGRAM_ID)"
                        if found := re.search(r"\((\d+)\)$", _text(part)):
                            program_id = int(found[1])
                    elif field == 5:  # XEventMetadata.stats; XStat.bytes_value
                        proto = dict(_fields(part)).get(6, proto)
                if proto is not None:
                    yield program_id, proto


def _text(value: memoryview | None) -> str:
    return "" if value is None else str(value, "utf-8", "replace")


def _program(hlo_proto: memoryview) -> Program:
    module = dict(_fields(hlo_proto)).get(1, memoryview(b""))  # HloProto.hlo_module
    computations: dict[int, list[dict]] = {}
    scheduled: list[list[int]] = []
    for number, value in _fields(module):
        if number == 3:  # HloModuleProto.computations
            identity, instructions = 0, []
            for field, part in _fields(value):
                if field == 2:
                    instructions.append(_instruction(part))
                elif field == 5:
                    identity = part
            computations[identity] = instructions
        elif number == 7:  # HloModuleProto.schedule: sequences, a map
            for _, entry in _fields(value):
                sequence = dict(_fields(entry)).get(2, memoryview(b""))
                scheduled.append(_integers(part for _, part in _fields(sequence)))

    def parts(instruction: dict) -> Iterator[tuple[str, str]]:
        if instruction["opcode"] in _WRAPPERS:
            for identity in instruction["called"]:
                for inner in computations.get(identity, ()):
                    yield inner["opcode"], inner["op_name"]
                    yield from parts(inner)

    everything = [i for instructions in computations.values() for i in instructions]
    names = {i["id"]: i["name"] for i in everything}
    fields = ("name", "opcode", "target", "op_name")
    return Program(
        {i["name"]: Instruction(*(i[f] for f in fields), tuple(parts(i))) for i in everything},
        [[names[i] for i in sequence if i in names] for sequence in scheduled],
    )


def _instruction(message: memoryview) -> dict:
    found = dict(name="", opcode="", target="", op_name="", id=0, called=[])
    texts = {1: "name", 2: "opcode", 28: "target"}  # HloInstructionProto
    for number, value in _fields(message):
        if number in texts:
            found[texts[number]] = _text(value)
        elif number == 7:  # metadata: OpMetadata.op_name
            found["op_name"] = _text(dict(_fields(value)).get(2))
        elif number == 35:
            found["id"] = value
        elif number == 38:  # called_computation_ids
            found["called"] += _integers([value])
    return found


def _integers(values: Iterable[int | memoryview]) -> list[int]:
    """Of a repeated integer field, packed or not."""
    found = []
    for value in values:
        if isinstance(value, int):
            found.append(value)
            continue
        number = shift = 0
        for byte in value:
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                found.append(number)
                number = shift = 0
    return found
