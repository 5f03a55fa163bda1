"""
CUDA graphs: many small kernels, which the host launches more slowly than the device runs them, are
recorded once and replayed as one. There is one way of recording, `capture`.
"""

import gc
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from attention import Cache
from decoding import Steps
from model import Decoder


def capture(function: Callable, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """The work of function(), which has run on this stream before, as a graph."""
    gc.collect()
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's watchdog may look at events while this thread captures
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        function()
    return graph


class Graphed:
    """A function of tensors of fixed shapes, which changes others in place, as a CUDA graph.

    Its first calls run it as it is, which compiles its kernels and makes its state, on the stream
    of the capture, as autograd remembers streams; the next one records, and those after it replay.
    What it returns is overwritten by the next call.
    """

    def __init__(self, function: Callable):
        self.function, self.eager = function, 2  # calls that run as they are
        self.stream, self.graph = torch.cuda.Stream(), None

    def run(self):
        self.out = self.function(*self.inputs)

    def __call__(self, *inputs: Tensor):
        if self.eager:
            self.eager -= 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                out = self.function(*inputs)
            torch.cuda.current_stream().wait_stream(self.stream)
            return out
        if self.graph is None:
            self.inputs = [x.clone() for x in inputs]
            torch.cuda.current_stream().wait_stream(self.stream)
            self.graph = capture(self.run, self.stream)
        for ours, theirs in zip(self.inputs, inputs):
            ours.copy_(theirs)
        self.graph.replay()
        return self.out


class Decoding:
    """`decoding.Decoding` where a step is a CUDA graph, and the way of the ids to the host goes
    beside the next step.

    A step changes tensors in place, no shape, and waits for nothing. The newest ids are in
    ids[newest]. The next step writes those after them to the other half, so that they may leave for
    the host while it runs.
    """

    def __init__(self, model: Decoder, h: Tensor, cache: Cache, index: Tensor, start: Tensor,
                 choice: Callable[[Tensor, Tensor, Tensor], None], filled: int = 0):
        self.steps = steps_of(model, cache)
        self.choice = model.faster(choice) if hasattr(model, "faster") else choice
        self.index, self.start = index.clone(), start.clone()
        self.n = torch.zeros(1, dtype=torch.long, device=h.device)  # ids chosen before
        self.halves, self.newest = index.new_zeros(2, len(index)), 0
        self.choice(self.steps.logits(h), self.n, self.halves[0])
        self.graphs = []
        self.side = torch.cuda.Stream() if h.is_cuda else None

    @property
    def ids(self) -> Tensor:
        """The newest ids (B,)."""
        return self.halves[self.newest]

    def step(self, newest: int):
        """Run halves[newest] through the model and choose the next."""
        h = self.steps(self.halves[newest], self.index, self.start, self.n)
        self.choice(self.steps.logits(h), self.n, self.halves[1 - newest])
        self.steps.finish()

    def prepare(self, n: int) -> bool:
        """Record a step, for either half of ids, if there are enough; nothing has changed then."""
        if n <= 8 or self.side is None:  # recording takes about so many steps
            return False
        state = self.halves, self.index, self.start, self.n
        self.graphs = [record(partial(self.step, newest), state) for newest in range(2)]
        return True

    def advance(self):
        if self.graphs:
            self.graphs[self.newest].replay()
        else:
            self.step(self.newest)
        self.newest = 1 - self.newest

    def fetch(self) -> Callable[[], list[int]]:
        """Have the newest ids copied to the host; call the result to wait for them, before the step
        after the next."""
        if self.side is None:
            return self.ids.clone().tolist
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            copy, done = self.ids.to("cpu", non_blocking=True), torch.cuda.Event()
            done.record()

        def wait() -> list[int]:
            done.synchronize()
            return copy.tolist()

        return wait

    def tokens(self, n: int) -> Iterator[list[int]]:
        """The next n ids of every row; the device is a step ahead of the caller."""
        waiting = deque([self.fetch()])
        for _ in range(1, n):
            self.advance()
            waiting.append(self.fetch())
            yield waiting.popleft()()
        yield waiting.popleft()()


def steps_of(model: Decoder, cache: Cache):
    """Steps on a cache of fixed size: by kernels of their own, if these serve its rows."""
    return model.steps(cache) if hasattr(model, "steps") else Steps(model, cache, None)


def record(function: Callable, state: tuple[Tensor, ...]) -> torch.cuda.CUDAGraph:
    """function() as a graph, after two calls that compile its kernels; the state is as before."""
    stream, saved = torch.cuda.Stream(), [t.clone() for t in state]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
            for t, before in zip(state, saved):
                t.copy_(before)
    torch.cuda.current_stream().wait_stream(stream)
    return capture(function, stream)
