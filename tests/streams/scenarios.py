"""What a training and our threads do beside each other, on simulated devices.

Each scenario adds actors to a world, lets them run in some order, and asserts what must hold in every one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from ckpt_core.dcp import Fingerprints, TensorRead, TensorTarget
from ckpt_core.dcp._image import spec_of
from ckpt_core.devices import fetch_to, has_streams
from ckpt_core.errors import StagingMemoryError
from ckpt_core.formats.checksums import crc32
from ckpt_core.reading import Engine, Payload
from ckpt_core.saving._stager import StagedParts, Stager, StepGuard
from ckpt_core.staging import Arenas
from ckpt_core.state._items import RankBuffers
from tests.streams.world import DEVICES, Action, SimTensor, World


class Shards:
    """The part of a save that one rank writes: these tensors."""

    value_indices = ()
    records: Mapping[MetadataIndex, bytes] = MappingProxyType({})

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = tensors
        self.specs = [spec_of(MetadataIndex(str(at)), each) for at, each in enumerate(tensors)]

    def shards(self) -> list[torch.Tensor]:
        return list(self._tensors)

    def values(self) -> list[bytes]:
        return []


class Optimizer:
    """Steps add 100 to its tensors, after the hooks."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors, self._hooks = tensors, OrderedDict[int, Any]()

    def register_step_pre_hook(self, hook: Callable[..., None]) -> Any:
        handle = torch.utils.hooks.RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def step(self) -> None:
        for hook in self._hooks.values():
            hook()
        with torch.no_grad():
            for each in self._tensors:
                each.add_(100)


class Written:
    """The file of a save, as a writer finds it."""

    def __init__(self, world: World, staged: StagedParts) -> None:
        world.facts.append(self._facts)
        self._staged = staged
        (self._image,) = staged.images.values()
        self._pieces = self._image.pieces(lambda slot: staged.wait_for("", slot))
        self._content = bytearray()
        self.told: list[BaseException | None] = []
        self.error: BaseException | None = None
        self.released = False
        if staged.deferred is not None:
            staged.deferred.when_done(self._tell)

    def _tell(self, error: BaseException | None) -> None:
        # A reader of the handle's `staged` may do anything then.
        self.told.append(error)
        self.at_told = [target.tolist() for target in self._image.targets]

    def _facts(self) -> Any:
        deferred = self._staged.deferred
        parts = (
            ()
            if deferred is None
            else (deferred._device._checked, len(deferred._device.changed), deferred._host.done)
        )
        return parts, bytes(self._content), len(self.told), self.error is None, self.released

    def steps(self) -> list[Callable[[], object]]:
        return [*[self.write] * len(self._image.layout.slots), self.finish]

    def write(self) -> None:
        self._content += next(self._pieces)

    def finish(self) -> None:
        self._content += b"".join(self._pieces)
        if self._staged.deferred is not None:
            self.error = self._staged.deferred.settle()
        self.release()

    def release(self) -> None:
        self._staged.release()
        self.released = True

    def numbers(self) -> list[list[float]]:
        return [
            torch.frombuffer(
                self._content[slot.payload : slot.payload + slot.payload_bytes], dtype=slot.dtype
            ).tolist()
            for slot in self._image.layout.slots
        ]


def stage(
    stager: Stager, tensors: Sequence[torch.Tensor], *, stable: Sequence[Any] | None, generation: int = 1
) -> StagedParts:
    return stager.stage({"": Shards(*tensors)}, generation, stable=stable)  # type: ignore[dict-item]


def stager(count: int = 1) -> Stager:
    return Stager(Arenas(count, probe=lambda: None))


def equal(found: object, expected: object) -> None:
    assert found == expected, f"{found} instead of {expected}"


def an_overlapped_save(world: World) -> None:
    """A parameter steps and a buffer changes, on the device, while a writer writes."""
    weight, buffer = world.tensor(0, 1), world.tensor(3, 4)
    weight.requires_grad_()
    with torch.no_grad():
        weight.add_(1)  # still queued when the save begins
    file = _overlapped(world, [weight, buffer], [weight], lambda: buffer.add_(50))
    equal(file.numbers(), [[1, 2], [3, 4]])
    equal(weight.values.tolist(), [101, 102])


def a_save_of_tensors_everywhere(world: World) -> None:
    """One process has tensors on two devices and on the host."""
    everywhere = [world.tensor(1, 2), world.tensor(3, 4, device=DEVICES[1]), torch.tensor([5.0, 6.0])]
    file = _overlapped(world, everywhere, everywhere)
    equal(file.numbers(), [[1, 2], [3, 4], [5, 6]])


def _overlapped(
    world: World,
    tensors: Sequence[torch.Tensor],
    stable: Sequence[torch.Tensor],
    *others: Callable[[], object],
) -> Written:
    optimizer, guard = Optimizer(*stable), StepGuard()
    staged = stage(stager(), tensors, stable=stable)
    guard.watch(staged.deferred, [optimizer])
    file = Written(world, staged)
    world.actor(*others, optimizer.step)
    world.actor(*file.steps())
    world.run()
    equal(file.error, None)
    equal(file.told, [None])
    equal(file.at_told, file.numbers())
    return file


class ShortOfMemory:
    """Arenas that have memory for a few windows, and for no whole state."""

    def reserve(self, *_: object, **__: object) -> Any:
        raise StagingMemoryError

    def reserve_most(self, least_bytes: int, refusal: StagingMemoryError, *, pinned: bool) -> Any:
        del refusal
        return Arenas(probe=lambda: None).reserve(least_bytes, pinned=pinned)


def a_save_in_waves(world: World) -> None:
    """All is copied before the save returns; then the training goes on beside the writer."""
    weight, buffer = world.tensor(0, 1), world.tensor(3, 4)
    weight.add_(1)  # still queued when the save begins
    staged = stage(Stager(ShortOfMemory()), [weight, buffer], stable=None)  # type: ignore[arg-type]
    assert staged.deferred is not None
    staged.deferred.wait()
    file = Written(world, staged)
    world.actor(lambda: weight.add_(50), lambda: buffer.add_(50))
    world.actor(*file.steps())
    world.run()
    equal(file.error, None)
    equal(file.numbers(), [[1, 2], [3, 4]])


def memory_taken_again(world: World) -> None:
    """Right after a save a parameter gets another storage, and its old memory another use."""
    with world.new_stream() as apart:
        weight, momentum = world.tensor(1, 2), world.tensor(3, 4)
    stager_ = stager()
    staged = stage(stager_, [weight, momentum], stable=[weight, momentum])
    guard = StepGuard()
    guard.watch(staged.deferred, [])
    file = Written(world, staged)
    others: list[torch.Tensor] = []

    def drop() -> None:
        weight.replace(world.tensor(9, 9))
        with apart:
            others.append(world.tensor(8, 8) + 1)

    def drop_behind_the_copies() -> None:
        guard.wait()
        momentum.replace(world.tensor(9, 9))
        with apart:
            others.append(world.tensor(8, 8) + 1)

    world.actor(drop, drop_behind_the_copies)
    world.actor(*file.steps())
    world.run()
    equal(file.error, None)
    equal(file.numbers(), [[1, 2], [3, 4]])


def a_clone_taken_again(world: World) -> None:
    """The clone of a buffer is dropped before it is copied, and its memory taken by the training."""
    buffer = world.tensor(5, 6)
    staged = stage(stager(), [buffer], stable=[])
    guard = StepGuard()
    guard.watch(staged.deferred, [])
    file = Written(world, staged)
    apart, kept = world.new_stream(), list[SimTensor]()

    def others() -> None:
        # Another stream of the training is current in its next step.
        with apart:
            guard.wait()
        kept.append(world.tensor(9, 9))

    world.actor(others)
    world.actor(*file.steps())
    world.run()
    equal(file.numbers(), [[5, 6]])


def two_saves_in_flight(world: World) -> None:
    """A step waits for every save in flight, not only for the last one."""
    tensors = [world.tensor(1, 2), world.tensor(3, 4), world.tensor(5, 6, device=DEVICES[1])]
    optimizer, guard, memory = Optimizer(*tensors), StepGuard(), stager(2)
    first = stage(memory, tensors, stable=tensors)
    guard.watch(first.deferred, [optimizer])

    def save() -> None:
        second = stage(memory, tensors[2:], stable=tensors, generation=2)
        guard.watch(second.deferred, [optimizer])

    world.actor(save, optimizer.step)
    world.run()
    file = Written(world, first)
    for step in file.steps():
        step()
    equal(file.error, None)
    equal(file.numbers(), [[1, 2], [3, 4], [5, 6]])


def a_long_training(world: World) -> None:
    """Three saves, two of them in flight, of tensors on two devices: too much for every order."""
    tensors = [world.tensor(n, n + 1, device=DEVICES[n % 2]) for n in range(5)]
    buffer, optimizer, guard, memory = world.tensor(7, 8), Optimizer(*tensors), StepGuard(), stager(2)
    files: list[Written] = []

    def save() -> None:
        staged = stage(memory, [*tensors, buffer], stable=tensors)
        guard.watch(staged.deferred, [optimizer])
        files.append(Written(world, staged))
        world.actor(*files[-1].steps())

    may_save = Action(save, lambda: memory.arenas.free > 0)
    world.actor(*[may_save, lambda: buffer.add_(1), optimizer.step] * 3)
    world.run()
    for at, file in enumerate(files):
        equal(file.error, None)
        weights = [[n + 100 * at, n + 1 + 100 * at] for n in range(5)]
        equal(file.numbers(), [*weights, [7 + at, 8 + at]])
    equal(len(files), 3)


def a_blocking_save(world: World) -> None:
    """The training changes everything as soon as the call has returned."""
    weight, other = world.tensor(1, 2), world.tensor(3, 4, device=DEVICES[1])
    staged = stage(stager(), [weight, other], stable=None)
    file = Written(world, staged)
    world.actor(lambda: weight.add_(100), lambda: other.add_(100))
    world.actor(*file.steps())
    world.run()
    equal(file.numbers(), [[1, 2], [3, 4]])


def a_change_without_a_wait(world: World) -> None:
    """A change that waits for nothing is saved as a whole or fails the save; never a mixture."""
    weight, other = world.tensor(1, 2), world.tensor(3, 4)
    file = Written(world, stage(stager(), [weight, other], stable=[weight, other]))
    world.actor(lambda: other.add_(100))
    world.actor(*file.steps())
    world.run()
    if file.error is None:
        equal(file.numbers(), [[1, 2], [3, 4]])


def a_save_after_a_failed_one(world: World) -> None:
    """A writer fails at its first piece; the next save gets the same memory, for something else."""
    weight, other = world.tensor(1, 2), world.tensor(3, 4)
    on_host = [torch.tensor([7.0, 8.0]), torch.tensor([9.0, 10.0])]
    stager_ = stager()
    failed = Written(world, stage(stager_, [weight, other], stable=[weight, other]))
    files: list[Written] = []

    def save() -> None:
        files.append(Written(world, stage(stager_, on_host, stable=None, generation=2)))

    world.actor(failed.release)
    world.actor(Action(save, lambda: failed.released))
    world.run()
    for step in files[0].steps():
        step()
    equal(files[0].numbers(), [[7, 8], [9, 10]])


class Broken(SimTensor):
    """A tensor of which no copy can be enqueued."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._foreach_copy_.default:
            return super().__torch_dispatch__(func, types, args, kwargs)
        raise RuntimeError("the device is out of memory")


def a_save_after_one_that_could_not_be_staged(world: World, *, blocking: bool = False) -> None:
    """An error comes after the first copies are enqueued; the next save gets the same memory."""
    weight, made = world.tensor(1, 2), world.tensor(3, 4)
    tensors = [weight, Broken(made.values, made.holding)]
    on_host = [torch.tensor([7.0, 8.0]), torch.tensor([9.0, 10.0])]
    stager_ = stager()
    with suppress(RuntimeError):
        stage(stager_, tensors, stable=None if blocking else tensors)
    file = Written(world, stage(stager_, on_host, stable=None, generation=2))
    world.actor(*file.steps())
    world.run()
    equal(file.numbers(), [[7, 8], [9, 10]])


def a_save_after_a_blocking_one_that_could_not_be_staged(world: World) -> None:
    """The same, where all copies are enqueued on the training's own stream."""
    a_save_after_one_that_could_not_be_staged(world, blocking=True)


def fingerprints(world: World) -> None:
    """Fingerprints have the values of the call, not those of the next step."""
    weight = world.tensor(1, 2)
    _compared(world, Fingerprints([weight]).encode, weight)
    equal(Fingerprints([world.tensor(1, 2)]).encode(), world.found)


def rank_local_buffers(world: World) -> None:
    """Copies of rank-local buffers have the values of the call, not those of the next batch."""
    buffer, other = world.tensor(1, 2), world.tensor(3, 4, device=DEVICES[1])
    keys = [("", "a"), ("", "b")]
    copies = RankBuffers(dict(zip(keys, [buffer, other], strict=True)))
    _compared(world, copies.digests, buffer, other)
    equal(
        RankBuffers(dict(zip(keys, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), strict=True))).digests(),
        world.found,
    )


def _compared(world: World, compare: Callable[[], object], *live: torch.Tensor) -> None:
    """Change live tensors beside a thread that compares what they were."""

    def find() -> None:
        world.found = compare()

    world.actor(*(partial(each.add_, 100) for each in live))
    world.actor(find)
    world.run()


class Stored:
    """A storage of one file, whose reads others may interrupt."""

    rereads_from_memory, reads_in_place = True, False
    url = "memory"

    def __init__(self, world: World, content: bytes, *, broken_from: int | None = None) -> None:
        self._world, self._content, self._broken_from = world, content, broken_from
        self.size_bytes = len(content)

    @contextmanager
    def open_ranges(self, key: str) -> Generator[Stored]:
        yield self

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._world.pause()
        if self._broken_from is not None and offset >= self._broken_from:
            raise OSError("the disk is broken")
        buffer[:] = self._content[offset : offset + len(buffer)]


NUMBERS = [float(number) for number in range(1, 13)]


def _file(world: World, **options: Any) -> tuple[Stored, Payload]:
    content = torch.tensor(NUMBERS).numpy().tobytes()
    payload = Payload(path="f", key="w", offset=0, size_bytes=len(content), crc32=crc32(content))
    return Stored(world, content, **options), payload


def _reads(payload: Payload, targets: Sequence[tuple[tuple[int, int], torch.Tensor]]) -> list[TensorRead]:
    return [
        TensorRead(
            name=str(at),
            payload=payload,
            target=TensorTarget(shape=(6, 2), dtype=torch.float32, offsets=offsets, tensor=tensor),
        )
        for at, (offsets, tensor) in enumerate(targets)
    ]


def _targets(world: World, *shapes: Sequence[int], device: torch.device = DEVICES[0]) -> list[SimTensor]:
    targets = [world.empty(shape, torch.float32, device) for shape in shapes]
    for each in targets:
        each.fill_(-1)  # still queued when the load begins
    return targets


def a_load(world: World) -> None:
    """Tensors are loaded that the training has still to initialise, and used as soon as they are loaded."""
    rows, column = _targets(world, [4, 2], [6, 1])
    _load(world, {(0, 0): rows, (0, 1): column, (2, 0): torch.zeros(4, 1)})


def a_load_to_two_devices(world: World) -> None:
    """Each buffer is read by both devices."""
    _load(
        world,
        {(1, 0): _targets(world, [4, 2])[0], (0, 0): _targets(world, [6, 2], device=DEVICES[1])[0]},
    )


def _load(world: World, targets: Mapping[tuple[int, int], torch.Tensor]) -> None:
    storage, payload = _file(world)
    reads = _reads(payload, list(targets.items()))
    devices = {each.device for each in targets.values() if has_streams(each)}
    with fetch_to(devices) as fetch, Engine(storage, "", threads=1) as engine:  # type: ignore[arg-type]
        engine.fetch([part for read in reads for part in read.ranges(fetch=fetch)], fetch)
    for each in targets.values():
        each.add_(100)
    world.run()
    for (row, column), each in targets.items():
        found = each.values if isinstance(each, SimTensor) else each
        part = torch.tensor(NUMBERS).view(6, 2)[row:, column:][: found.shape[0], : found.shape[1]]
        equal(found.tolist(), (part + 100).tolist())


def a_load_that_fails(world: World) -> None:
    """After the error no copy reaches memory that the training uses for something else."""
    (rows,) = _targets(world, [6, 2])
    storage, payload = _file(world, broken_from=32)
    reads = _reads(payload, [((0, 0), rows)])
    try:
        with fetch_to({rows.device}) as fetch, Engine(storage, "", threads=1) as engine:  # type: ignore[arg-type]
            engine.fetch([part for read in reads for part in read.ranges(fetch=fetch)], fetch)
    except OSError:
        rows.fill_(7)
    world.run()
    equal(rows.values.flatten().tolist(), [7] * 12)


def a_load_read_once(world: World) -> None:
    """Bytes that another rank has sent are in memory that the next ones overwrite."""
    (rows,) = _targets(world, [6, 2])
    storage, payload = _file(world)
    (read,) = _reads(payload, [((0, 0), rows)])
    inbox = bytearray(16)
    with fetch_to({rows.device}) as fetch:
        for start in range(0, 48, 16):
            storage.read_into(start, memoryview(inbox))
            read.fill(start, memoryview(inbox), fetch)
        inbox[:] = bytes(16)
    world.run()
    equal(rows.values.flatten().tolist(), NUMBERS)


def a_long_range_in_a_load(world: World) -> None:
    """A range that is longer than a pinned buffer goes through a pageable one."""
    (rows,) = _targets(world, [6, 2])
    storage, payload = _file(world)
    (read,) = _reads(payload, [((0, 0), rows)])
    with fetch_to({rows.device}) as fetch:
        assert fetch is not None
        for _ in range(2):
            with fetch.lend(0, 48) as memory:
                storage.read_into(0, memory)
                read.target.fill(0, memory, fetch.place)
            with fetch.lend(0, 48) as memory:
                memory[:] = bytes(48)
    world.run()
    equal(rows.values.flatten().tolist(), NUMBERS)


SCENARIOS = [
    a_load,
    a_load_to_two_devices,
    a_load_that_fails,
    a_load_read_once,
    a_long_range_in_a_load,
    a_save_after_a_failed_one,
    a_save_after_one_that_could_not_be_staged,
    a_save_after_a_blocking_one_that_could_not_be_staged,
    a_blocking_save,
    a_clone_taken_again,
    two_saves_in_flight,
    rank_local_buffers,
    a_change_without_a_wait,
    fingerprints,
    an_overlapped_save,
    a_save_in_waves,
    a_save_of_tensors_everywhere,
    memory_taken_again,
]
"""Those with few executions first: a fault is found by any."""
