"""Which HLO instruction a kernel comes from.

XLA's annotations name it, except in CUDA graphs (which XLA calls command buffers): there a kernel
carries no more than its own name. XLA names the kernels that it compiles after the instruction.
Those of libraries (cuBLAS) and of Mosaic are found by their place: between which instructions they
run.
"""

import collections
import re

from jax_mok.profile.hlo import Instruction, Program, Programs
from jax_mok.profile.trace import Kernel

# Custom calls whose kernels belong to a library; those that Mosaic compiles, and its kernels.
_LIBRARY = re.compile(r"^__(cublas|cudnn|cub)")
_MOSAIC = re.compile(r"mosaic_gpu")
# What a graph holds beside kernels of instructions.
_NO_OP = re.compile(r"^(memcpy|memset)", re.IGNORECASE)


def origins(kernels: list[Kernel], programs: Programs) -> list[Instruction | None]:
    """The instruction of each kernel (sorted by start, of one device), or None."""
    known: dict[tuple, Instruction | None] = {}
    found = []
    for kernel in kernels:
        key = (kernel.program_id, kernel.hlo_op, kernel.name)
        if key not in known:
            known[key] = _by_name(kernel, programs)
        found.append(known[key])
    _by_place(kernels, found, programs)
    return found


def _by_name(kernel: Kernel, programs: Programs) -> Instruction | None:
    program = programs[kernel.program_id]
    if kernel.hlo_op in program.instructions:
        return program.instructions[kernel.hlo_op]
    if kernel.hlo_op:
        return None
    names = program.by_kernel_name if kernel.program_id >= 0 else programs.by_kernel_name
    # The passes of a sort are kernels of their own: sort_2, sort_2__1, sort_2__2.
    return names.get(kernel.name) or names.get(re.sub(r"__\d+$", "", kernel.name))


def _by_place(kernels: list[Kernel], found: list[Instruction | None], programs: Programs) -> None:
    """Fills in kernels that XLA did not name, run by run: a run lies between two known kernels."""
    seen = {(k.program_id, i.name) for k, i in zip(kernels, found) if i is not None}
    before: dict[int, Instruction] = {}  # the last known instruction of each program
    runs: dict[int, list[int]] = collections.defaultdict(list)  # of each program, since then
    for n, kernel in enumerate(kernels):
        program_id = kernel.program_id
        if found[n] is not None:
            if run := runs.pop(program_id, None):
                calls = _calls(programs[program_id], program_id, before, found[n], seen)
                for mosaic in (False, True):
                    its = [c for c in calls if _is_mosaic(c.target) == mosaic]
                    places = [p for p in run if _is_mosaic(kernels[p].name) == mosaic]
                    for place, call in zip(places, _share(its, len(places))):
                        found[place] = call
            before[program_id] = found[n]
        elif not kernel.hlo_op and not _NO_OP.match(kernel.name):
            runs[program_id].append(n)


def _is_mosaic(name: str) -> bool:
    return _MOSAIC.search(name) is not None


def _share(calls: list[Instruction], count: int) -> list[Instruction | None]:
    """The call of each of `count` kernels: in order, if there is one for each. A call may also
    launch several kernels: then the first stands for all, if all are from one scope."""
    if len(calls) == count:
        return list(calls)
    scopes = {call.op_name.rpartition("/")[0] for call in calls}
    return [calls[0] if len(scopes) == 1 else None] * count


def _calls(
    program: Program,
    program_id: int,
    before: dict[int, Instruction],
    after: Instruction,
    seen: set[tuple[int, str]],
) -> list[Instruction]:
    """Calls of libraries and Mosaic that XLA schedules between two instructions, one after the
    other or (at an end of a loop's body) in different sequences, with no instruction between that
    has kernels."""

    def walk(start: Instruction, step: int) -> tuple[list[Instruction], Instruction | None]:
        calls = []
        number, place = program.places.get(start.name, (0, None))
        while place is not None and 0 <= (place := place + step) < len(program.sequences[number]):
            instruction = program.instructions[program.sequences[number][place]]
            if (program_id, instruction.name) in seen:
                return calls, instruction
            if _LIBRARY.match(instruction.target) or _is_mosaic(instruction.target):
                calls.append(instruction)
        return calls, None

    first, end = walk(before[program_id], 1) if program_id in before else ([], None)
    if end is not None and end.name == after.name:
        return first
    return first + walk(after, -1)[0][::-1]
