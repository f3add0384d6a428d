"""A simulated accelerator: work is queued on streams, and executed in any order that the streams allow.

Our code runs as shipped, on tensors that it takes for tensors of a device. What torch does for a real device
is modelled: an operator is queued on the current stream of its device, a blocking copy waits, memory that
nothing refers to any more is given to the next allocation on its stream, unless `record_stream` has named
other streams that still have work. The host has actors, which stand for its threads. At every point where
something else could happen first, a chooser decides what does.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

DEVICES = (torch.device("cuda", 0), torch.device("cuda", 1))
Choose = Callable[["World", int], int]


class Pruned(BaseException):
    """Ends an execution whose remainder has been explored already."""


class Op:
    """One piece of queued work; a marker, which only waits, does nothing."""

    def __init__(self, number: int, work: Callable[[], object] | None, after: Sequence[Op]) -> None:
        self.number, self.work, self.after, self.done = number, work, after, False


class Event:
    """The moment after an op."""

    def __init__(self, world: World, ops: Sequence[Op]) -> None:
        self._world, self.ops = world, ops

    def query(self) -> bool:
        return self._world.saw(all(op.done for op in self.ops))

    def synchronize(self) -> None:
        self._world.block_until(self.ops)


class Stream:
    """A queue of ops."""

    def __init__(self, world: World, device: torch.device) -> None:
        self._world, self.device = world, device
        self.queue: list[Op] = []

    def __enter__(self) -> Stream:
        self._world.entered.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._world.entered.pop() is self

    def tail(self) -> list[Op]:
        return self.queue[-1:]

    def wait_stream(self, other: Stream) -> None:
        self.enqueue(None, other.tail())

    def wait_event(self, event: Event) -> None:
        self.enqueue(None, event.ops)

    def record_event(self) -> Event:
        return Event(self._world, self.tail())

    def synchronize(self) -> None:
        self._world.block_until(self.tail())

    def enqueue(self, work: Callable[[], object] | None, after: Sequence[Op] = ()) -> Op:
        with self._world.guard:
            op = Op(self._world.next_number(), work, [*self.tail(), *after])
            self.queue.append(op)
            self._world.settle_markers()
            return op


@dataclass(eq=False)
class Block:
    """Memory of a device, taken by one stream."""

    device: torch.device
    stream: Stream
    memory: torch.Tensor
    users: list[Stream] = field(default_factory=list)
    busy: Event | None = None


class Holding:
    """A tensor's storage: its end gives the block back to the allocator."""

    def __init__(self, world: World, block: Block) -> None:
        self.world, self.block = world, block

    def __del__(self) -> None:
        self.world.free(self.block)


class SimTensor(torch.Tensor):
    """A tensor of a simulated device; `values` is its memory, which only ops may touch."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    values: torch.Tensor
    holding: Holding

    @staticmethod
    def __new__(cls, values: torch.Tensor, holding: Holding) -> SimTensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device="cpu"
        )
        self.values, self.holding = values, holding
        return self

    @property
    def device(self) -> torch.device:
        return self.holding.block.device

    @property
    def is_cpu(self) -> bool:
        return False

    def record_stream(self, stream: Stream) -> None:
        self.holding.block.users.append(stream)

    def untyped_storage(self) -> Any:
        return self.values.untyped_storage()

    def replace(self, other: SimTensor) -> None:
        """As `tensor.data = other`: another storage under the same tensor."""
        self.values, self.holding = other.values, other.holding

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


def _map(work: Callable[[Any], Any], each: Any) -> Any:
    if isinstance(each, list | tuple):
        return [_map(work, one) for one in each]
    return work(each)


def _values(each: Any) -> Any:
    return each.values if isinstance(each, SimTensor) else each


def _tensors(each: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _map(lambda one: found.append(one) if isinstance(one, torch.Tensor) else None, each)
    return found


def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    if func is torch.ops.aten._foreach_copy_.default:
        for target, source in zip(*args[:2], strict=True):
            target.copy_(source, *args[2:], **kwargs)
        return None
    tensors = _tensors(args)
    first = next(each for each in tensors if isinstance(each, SimTensor))
    world, device = first.holding.world, first.device
    run = partial(func, *_map(_values, args), **kwargs)
    stream = world.current_stream(device)
    returned = func._schema.returns
    if any(each.alias_info and each.alias_info.is_write for each in func._schema.arguments):
        on_host = [each for each in tensors if not isinstance(each, SimTensor) and each.dim()]
        world.touched(on_host)
        op = stream.enqueue(partial(_quietly, run))
        if func is torch.ops.aten.copy_.default and on_host and not (len(args) > 2 and args[2]):
            world.block_until([op])
        return args[0] if returned else None
    made = run()
    if returned[0].alias_info is not None:
        return _map(lambda values: SimTensor(values, first.holding), made)
    if kwargs.get("device") == torch.device("cpu") or not isinstance(made, torch.Tensor):
        found: list[Any] = []
        world.block_until([stream.enqueue(lambda: found.append(run()))])
        return found[0] if found else made
    result = world.empty(made.shape, made.dtype, device)
    stream.enqueue(partial(_into, result.values, run))
    return result


def _quietly(run: Callable[[], object]) -> None:
    with torch.no_grad():
        run()


def _into(values: torch.Tensor, run: Callable[[], torch.Tensor]) -> None:
    values.copy_(run())


def factory(world: World, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Let a function of torch make tensors of simulated devices, and pinned ones: plain ones here."""

    def made(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        values = make(*args, **kwargs)
        if device not in DEVICES:
            return values if device is None else values.to(device)
        tensor = world.empty(values.shape, values.dtype, device)
        tensor.copy_(values, non_blocking=True)
        return tensor

    return made


@dataclass
class Action:
    """A step of an actor; it waits until it is possible."""

    work: Callable[[], object]
    possible: Callable[[], bool] = lambda: True


class World:
    """One execution of a scenario."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self._side: dict[torch.device, Stream] = {}
        self._default = {device: Stream(self, device) for device in DEVICES}
        self._streams = list(self._default.values())
        self._entered = threading.local()
        self.guard = threading.RLock()
        self._ops = 0
        self._free: list[Block] = []
        self._blocks: list[Block] = []
        self._host: dict[int, torch.Tensor] = {}
        self._actors: list[list[Action]] = []
        self._running: list[int] = []
        self._waits: list[Any] = []
        self._seen: defaultdict[int, list[bool]] = defaultdict(list)
        self.facts: list[Callable[[], Any]] = []
        self._paused = 0
        self.ended = False
        self.found: object = None
        """A result of an actor, which may decide about the rest."""

    # The seam of `ckpt_core.devices`.

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device in DEVICES

    def current_stream(self, device: torch.device) -> Stream:
        entered = (stream for stream in reversed(self.entered) if stream.device == device)
        return next(entered, self._default[device])

    @property
    def entered(self) -> list[Stream]:
        """The streams that the calling thread has made current."""
        if not hasattr(self._entered, "streams"):
            self._entered.streams = []
        return self._entered.streams  # type: ignore[no-any-return]

    def side_stream(self, device: torch.device) -> Stream:
        if device not in self._side:
            self._side[device] = self.new_stream(device)
        return self._side[device]

    def new_stream(self, device: torch.device = DEVICES[0]) -> Stream:
        self._streams.append(Stream(self, device))
        return self._streams[-1]

    # Memory.

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> SimTensor:
        with self.guard:
            size = max(1, torch.Size(shape).numel()) * dtype.itemsize
            stream = self.current_stream(device)
            for block in self._free:
                alike = block.stream is stream and len(block.memory) == size
                if alike and (block.busy is None or block.busy.query()):
                    self._free.remove(block)
                    break
            else:
                block = Block(device, stream, torch.zeros(size, dtype=torch.uint8))
                self._blocks.append(block)
            block.users, block.busy = [], None
            values = block.memory.view(dtype)[: torch.Size(shape).numel()].view(shape)
            return SimTensor(values, Holding(self, block))

    def tensor(self, *numbers: float, device: torch.device = DEVICES[0]) -> SimTensor:
        """Make a tensor whose numbers are there already."""
        made = self.empty([len(numbers)], torch.float32, device)
        made.values.copy_(torch.tensor(numbers))
        return made

    def free(self, block: Block) -> None:
        with self.guard:
            block.busy = Event(self, [op for stream in block.users for op in stream.tail()])
            self._free.append(block)

    def touched(self, values: Sequence[torch.Tensor]) -> None:
        """Note that an op reads or writes memory of the host."""
        self._host |= {each.data_ptr(): each.detach() for each in values}

    # Time.

    def actor(self, *actions: Action | Callable[[], object]) -> None:
        """Add a thread of the host, which takes these steps one after another."""
        self._actors.append([each if isinstance(each, Action) else Action(each) for each in actions])

    def spawn(self, work: Callable[[], object]) -> bool:
        """Start a thread, as `start_thread` does."""
        self.actor(work)
        return True

    def run(self) -> None:
        """Let everything happen that can."""
        while options := self._options():
            self._step(options)
        left = [op for stream in self._streams for op in stream.queue if not op.done]
        if left or any(self._actors):
            raise AssertionError("the execution hangs")

    def pause(self) -> None:
        """Let others go first, or not: a point where a thread may be interrupted."""
        self._paused += 1
        while not self.ended and (options := self._options()):
            chosen = self._choose(self, len(options) + 1)
            if chosen == 0:
                return
            options[chosen - 1]()

    def block_until(self, ops: Sequence[Op]) -> None:
        """Let the calling actor wait."""
        self._waits.append([op.number for op in ops])
        while not self.ended and not all(op.done for op in ops):
            with self.guard:
                options = self._options()
                if options:
                    self._step(options)
                elif not all(op.done for op in ops):
                    raise AssertionError("the host waits for work that never ends")
        self._waits.pop()

    def drain(self) -> None:
        """Let all queued work end."""
        self.block_until([op for stream in self._streams for op in stream.queue])

    def saw(self, value: bool) -> bool:
        self._seen[self._running[-1] if self._running else -1].append(value)
        return value

    def next_number(self) -> int:
        self._ops += 1
        return self._ops

    def settle_markers(self) -> None:
        """Pass the markers at the heads of streams."""
        passed = True
        while passed:
            passed = False
            for op in self._heads():
                if op.work is None:
                    op.done = passed = True

    @property
    def state(self) -> Any:
        """All on which the rest of an execution depends: `facts` are those of our code."""
        memory = (
            *(each.memory for each in self._blocks),
            *(each.view(torch.uint8) for each in self._host.values()),
        )
        return (
            (self._ops, self._paused, repr(self._waits), repr(sorted(self._seen.items()))),
            tuple(op.number for stream in self._streams for op in stream.queue if not op.done),
            (
                repr(self.found),
                tuple(map(len, self._actors)),
                tuple(self._running),
                tuple(fact() for fact in self.facts),
            ),
            (
                tuple(self._blocks.index(each) for each in self._free),
                b"|".join(each.numpy().tobytes() for each in memory),
            ),
        )

    def _heads(self) -> list[Op]:
        heads = (next((op for op in stream.queue if not op.done), None) for stream in self._streams)
        return [op for op in heads if op is not None and all(each.done for each in op.after)]

    def _options(self) -> list[Callable[[], None]]:
        return [
            *(
                partial(self._act, number)
                for number, actor in enumerate(self._actors)
                if actor and number not in self._running and actor[0].possible()
            ),
            *(partial(self._execute, op) for op in self._heads()),
        ]

    def _step(self, options: Sequence[Callable[[], None]]) -> None:
        options[self._choose(self, len(options)) if len(options) > 1 else 0]()

    def _act(self, number: int) -> None:
        self._running.append(number)
        try:
            self._actors[number].pop(0).work()
        finally:
            self._running.pop()

    def _execute(self, op: Op) -> None:
        assert op.work is not None
        op.work()
        op.done = True
        self.settle_markers()
